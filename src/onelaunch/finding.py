"""A finding of a rule at a line: a refusal as data, and the doctor's result."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from onelaunch.error_catalogue import CATALOGUE

Severity = Literal["blocks-capture", "silently-wrong", "slow"]
Means = Literal["source", "run", "capture", "replay"]
"""The means by which a fault was found: the source, an eager run, a capture of ours, or a bare
replay whose results differ from eager's."""
_WHERE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?:: (?P<source>.*))?\Z")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault at a line.

    Attributes:
        code, name, severity: of the rule.
        what: the fault with its values: ``"`.item()` reads a tensor on the host"``.
        file, line, column: the user's line; both count from 1. Without a line (a setting that
            is off, say), the file is empty and both are 0.
        source: the text of the line.
        fix: the code to write instead.
        found_by: the means by which it was found.
        calls: the calls from the callable to the line: ``("model.py:12 in forward", ...)``.
        library: the line of a library where the fault is, below the user's; None: the user's own.
        causes: the codes of other rules that name the same fault: why two runs differ, for example.
    """

    code: str
    name: str
    severity: Severity
    what: str
    file: str
    line: int
    column: int
    source: str
    fix: str
    found_by: tuple[Means, ...]
    calls: tuple[str, ...] = ()
    library: str | None = None
    causes: tuple[str, ...] = ()

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all rules that name this fault, its own first."""
        return (self.code, *self.causes)

    @property
    def key(self) -> tuple[str, str, int]:
        """The identity of a fault: no fault is found twice."""
        return self.code, self.file, self.line

    def also(self, other: Finding) -> Finding:
        """Return this finding, joined with another of the same fault."""
        return replace(
            self,
            found_by=tuple(dict.fromkeys((*self.found_by, *other.found_by))),
            calls=self.calls or other.calls,
            library=self.library or other.library,
            causes=tuple(dict.fromkeys((*self.causes, *other.causes))),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {k: v for k, v in fields.items() if v or k not in ("calls", "library", "causes")}


def of_refusal(code: str, what: str, where: str | None, fix: str) -> Finding | None:
    """Return the finding for a refusal of a capture; None for a code that is no rule. `where`:
    ``path/file.py:LINE: source``, or several lines of it; another text is no place."""
    entry = CATALOGUE.get(code)
    if entry is None or not entry.rule:
        return None
    place = _WHERE.match((where or "").partition("\n")[0])
    file, line, source = place.group("file", "line", "source") if place else ("", "0", "")
    text = linecache.getline(file, int(line)).rstrip() if file else ""
    return Finding(
        code=code,
        name=entry.rule,
        severity="blocks-capture",
        what=what,
        file=file,
        line=int(line),
        column=len(text) - len(text.lstrip()) + 1 if file else 0,
        source=text.strip() or source or "",
        fix=fix,
        found_by=("capture",),
    )
