"""The warnings of a graphed callable, each given once. One that never replays tells the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from onelaunch.autograd.graph_walk import packing
from onelaunch.call.spec import CallSpec
from onelaunch.driver.select import recordable
from onelaunch.errors import GraphWarning, describe_type
from onelaunch.runtime.why import varying_sizes
from onelaunch.source import levels_to_user, user_line

if TYPE_CHECKING:
    from onelaunch.runtime.candidate import Call, Candidate

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


_MANY = 24  # the calls in a row, without a launch in between, before the warning
_WHY = "each such call runs the callable itself: no recording can serve it, or none was made"
_OTHERWISE = "call it without that, or leave the callable as it is, without `ol.graph`"
REMADE = (
    "pass the tensors themselves, in lists, dicts or dataclasses; or give the same objects, with "
    "new contents, at each call"
)
_PLAIN = "pass plain strided tensors, and make others of them inside of the callable"


class Unserved:
    """The calls in a row of one callable that were neither replays nor warm-ups of known
    signatures. `launched`: counts the launches of its recordings."""

    def __init__(self, name: str, notices: Notices, launched: Callable[[], int]) -> None:
        self._name = name
        self._notices = notices
        self._launched = launched
        self._row = self._last = 0

    def clear(self) -> None:
        self._row = self._last = 0

    def is_unrecordable(self, call: Call) -> bool:
        """Return whether a call cannot be recorded: in another capture, under hooks that pack saved
        tensors, or for tensors that are no plain memory."""
        if call.driver.capturing():
            return True
        if packing():
            self.note("OL303", "hooks that pack saved tensors are on")
            return True
        for path, t in zip(call.flat.paths, call.flat.tensors, strict=True):
            if not recordable(t):
                layout = str(t.layout).removeprefix("torch.")
                what = f"`{path}` is {describe_type(t)}, {t.dtype}, {layout}"
                self.note("OL302", f"{what}, which no recording reads", _PLAIN)
                return True
        return False

    def note_warmup(self, candidate: Candidate, specs: Collection[CallSpec]) -> None:
        """Note a warm-up. It counts if it is its signature's first. `specs`: all signatures."""
        if candidate.status.warmups > 1 or not self._is_due():
            return
        varied = varying_sizes(specs, candidate.spec, candidate.flat.paths)
        if varied is None:
            self._warn("OL302", "each has other arguments than all before it", REMADE)
        else:
            self._warn("OL301", *varied)

    def note(self, code: str, reason: str, fix: str = _OTHERWISE) -> None:
        """Count a call, and warn once there are many."""
        if self._is_due():
            self._warn(code, reason, fix)

    def _is_due(self) -> bool:
        """Count a call, and return whether to warn."""
        launched = self._launched()
        if launched != self._last:
            self._last, self._row = launched, 0
        self._row += 1
        return self._row == _MANY and not self._notices.say_eager

    def _warn(self, code: str, reason: str, fix: str) -> None:
        what = f"`{self._name}` was called {_MANY} times without a launch; {reason}"
        warning = GraphWarning(code, what, where=user_line(), why=_WHY, fix=fix)
        self._notices.give(warning, "unserved")
