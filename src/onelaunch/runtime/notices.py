"""The warnings of a graphed callable, each given once."""

from __future__ import annotations

import warnings

from onelaunch.errors import GraphWarning
from onelaunch.source import levels_to_user, user_line

_EAGER = frozenset({"OL301", "OL302", "OL303", "OL304", "OL305", "OL307", "OL311"})


class Notices:
    """The warnings that a callable has given."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    @property
    def say_eager(self) -> bool:
        """True if a given warning says that calls run eagerly."""
        return any(key[:5] in _EAGER for key in self._given)

    def clear(self) -> None:
        """Forget the given warnings."""
        self._given.clear()

    def warn(
        self, code: str, what: str, kind: str = "", fix: str = "", where: object = None
    ) -> None:
        """Warn once for each code and kind, by default of the line that runs."""
        if code + kind not in self._given:
            warning = GraphWarning(code, what, where=where or user_line(), fix=fix or None)
            self.give(warning, kind)

    def give(self, warning: GraphWarning, kind: str = "") -> None:
        """Warn, unless that was done for the same code and kind."""
        if warning.code + kind not in self._given:
            self._given.add(warning.code + kind)
            warnings.warn(warning, stacklevel=levels_to_user())
