"""One finding of a rule, at a line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from onelaunch.rules import RULES
from onelaunch.rules.rule import Severity

Means = Literal["source", "run", "capture", "replay"]
"""The means by which a finding was found: reading the source, an eager run, a capture of ours, or a
bare replay that gave something else than eager."""
_WHERE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?:: (?P<source>.*))?\Z")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault at a line.

    Attributes:
        code, name, severity: those of the rule.
        what: the fault with its values: ``"`.item()` reads a tensor on the host"``.
        file, line, column: the user's line; both count from 1. Without a line (a setting that
            is off, say), the file is empty and both are 0.
        source: the text of the line.
        fix: the code to write instead.
        found_by: the means by which it was found.
        calls: the way there from the callable: ``("model.py:12 in forward", ...)``; may be empty.
        library: the line of a library below the user's, where the fault is; None: their own.
        causes: the codes of other rules that name the same fault: why two runs differ, say.
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
    def names(self) -> tuple[str, ...]:
        """The names of these rules."""
        return tuple(RULES[code].name for code in self.codes)

    @property
    def key(self) -> tuple[str, str, int]:
        """The identity of a fault: no fault is found twice."""
        return self.code, self.file, self.line

    def also(self, other: Finding) -> Finding:
        """Return this one, found by the means of another too."""
        return replace(
            self,
            found_by=tuple(dict.fromkeys((*self.found_by, *other.found_by))),
            calls=self.calls or other.calls,
            library=self.library or other.library,
            causes=tuple(dict.fromkeys((*self.causes, *other.causes))),
        )

    def because(self, cause: Finding) -> Finding:
        """Return this one with the finding of another rule on the same fault.

        The fix of a refusal that knows no better than its rule gives way to the cause's.
        """
        both = self.also(cause)
        if cause.code in self.causes:
            return both
        causes = tuple(dict.fromkeys((*self.causes, *cause.codes)))
        vague = self.severity == "blocks-capture" and self.fix == RULES[self.code].fix
        fix = cause.fix if vague else self.fix
        return replace(both, what=f"{self.what}; {cause.what}", fix=fix, causes=causes)

    def under(self, codes: Collection[str]) -> Finding | None:
        """Return this one as a finding of these rules alone; None if none of them names it."""
        code, *causes = [code for code in self.codes if code in codes] or [""]
        if not code:
            return None
        rule = RULES[code]
        named = {"name": rule.name, "severity": rule.severity, "causes": tuple(causes)}
        return replace(self, code=code, **named)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        found: dict[str, Any] = {
            "code": self.code,
            "name": self.name,
            "severity": self.severity,
            "what": self.what,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "source": self.source,
            "fix": self.fix,
            "found_by": list(self.found_by),
        }
        if self.calls:
            found["calls"] = list(self.calls)
        if self.library is not None:
            found["library"] = self.library
        if self.causes:
            found["causes"] = list(self.causes)
        return found

    @staticmethod
    def of_dict(data: dict[str, Any]) -> Finding:
        """Return the finding that `to_dict` wrote."""
        listed = {name: tuple(data.get(name, ())) for name in ("found_by", "calls", "causes")}
        fields: dict[str, Any] = {**data, **listed}
        return Finding(**fields)


def merged(findings: list[Finding]) -> list[Finding]:
    """Return each fault once, with all means that found it; in the order of files and lines."""
    known: dict[tuple[str, str, int], Finding] = {}
    for finding in findings:
        before = known.get(finding.key)
        known[finding.key] = finding if before is None else before.also(finding)
    for key in list(known):
        finding = known[key]
        for code in RULES[finding.code].same_as if finding.file else ():
            same = known.get((code, *key[1:]))
            if same is not None:
                known[same.key] = same.because(finding)
                del known[key]
                break
    return sorted(known.values(), key=lambda f: (f.file, f.line, f.code))


def of_refusal(code: str, what: str, where: str | None, fix: str) -> Finding | None:
    """Return the finding for a refusal of a capture; None for a code that is no rule.

    Args:
        where: ``path/file.py:LINE: source``, or of several such lines; another text is no place.
    """
    rule = RULES.get(code)
    if rule is None:
        return None
    place = _WHERE.match((where or "").partition("\n")[0])
    file, line, source = place.group("file", "line", "source") if place else ("", "0", "")
    text = linecache.getline(file, int(line)).rstrip() if file else ""
    return Finding(
        code=code,
        name=rule.name,
        severity=rule.severity,
        what=what,
        file=file,
        line=int(line),
        column=len(text) - len(text.lstrip()) + 1 if file else 0,
        source=text.strip() or source or "",
        fix=fix,
        found_by=("capture",),
    )
