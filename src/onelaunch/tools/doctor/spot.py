"""A place in source, and the finding of a rule there; files as they are shown."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from onelaunch.finding import Finding, Means
from onelaunch.tools.rules import RULES


@dataclass(frozen=True)
class Spot:
    """A place in source: file, line and column, which count from 1, and the line's text.

    Attributes:
        calls: the way there from the callable, outermost first.
        library: the line of a library below, where the event really is.
    """

    file: str = ""
    line: int = 0
    column: int = 0
    source: str = ""
    calls: tuple[str, ...] = ()
    library: str | None = None

    def finding(self, code: str, what: str, fix: str | None, means: Means) -> Finding:
        """Make the finding of a rule here.

        Args:
            fix: the code to write instead; the rule's by default.
        """
        rule = RULES[code]
        return Finding(
            code=code,
            name=rule.name,
            severity=rule.severity,
            what=what,
            file=self.file,
            line=self.line,
            column=self.column,
            source=self.source,
            fix=fix or rule.fix,
            found_by=(means,),
            calls=self.calls,
            library=self.library,
        )


NOWHERE = Spot()


def shown(file: str) -> str:
    """Return a file as it is shown: from the current folder, if it is in there."""
    return _shown(file, os.getcwd())


@functools.lru_cache(maxsize=1024)
def _shown(file: str, folder: str) -> str:
    try:
        path = os.path.relpath(file, folder)
    except ValueError:  # another drive, on Windows
        return file
    return file if path.startswith("..") or file.startswith("<") else path
