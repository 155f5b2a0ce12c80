"""Comments that silence a finding: ``# onelaunch: allow host-read -- read once, at the start``.

The comment is at the end of the finding's line, or on a line of its own above it. Several names
are separated by commas; codes work too. Without a reason it does not silence anything: the finding
stays, and says so.
"""

from __future__ import annotations

import difflib
import linecache
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from onelaunch.rules import RULES
from onelaunch.rules.finding import Finding

_COMMENT = re.compile(
    r"#\s*onelaunch:\s*allow\s+(?P<names>[\w-]+(?:\s*,\s*[\w-]+)*)\s*(?:--\s*(?P<reason>.*\S))?"
)
_NAMES = {rule.name for rule in RULES.values()}


def allowed(finding: Finding) -> bool:
    """Return whether a comment, with a reason, allows a finding."""
    return any(reason and _names(finding, names) for names, reason in _comments(finding))


def kept(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that no comment allows.

    Where a comment would allow one but has no reason, or a name that no rule has, the finding says
    so.
    """
    return [_with_hint(finding) for finding in findings if not allowed(finding)]


def _with_hint(finding: Finding) -> Finding:
    for names, reason in _comments(finding):
        if not reason and _names(finding, names):
            return _hinted(finding, f"its comment lacks a reason: `allow {finding.name} -- why`")
        for name in names:
            if name not in _NAMES and name.upper() not in RULES:
                near = difflib.get_close_matches(name, _NAMES, 1) or [finding.name]
                hint = f"its comment allows `{name}`, which is no rule: `{near[0]}`"
                return _hinted(finding, hint)
    return finding


def _hinted(finding: Finding, hint: str) -> Finding:
    what = finding.what if hint in finding.what else f"{finding.what}; {hint}"
    return replace(finding, what=what)


def _names(finding: Finding, names: list[str]) -> bool:
    given = {*names, *(name.upper() for name in names)}
    return not given.isdisjoint((*finding.names, *finding.codes))


def _comments(finding: Finding) -> Iterator[tuple[list[str], str | None]]:
    """Return the names and reasons of the comments at a finding."""
    for line in _lines(finding):
        match = _COMMENT.search(line)
        if match is not None:
            yield [name.strip() for name in match["names"].split(",")], match["reason"]


def _lines(finding: Finding) -> Iterator[str]:
    """Return the line of a finding, and the lines right above it that are comments."""
    if not finding.file:
        return
    file = os.path.abspath(finding.file) if os.path.exists(finding.file) else finding.file
    linecache.checkcache(file)
    yield linecache.getline(file, finding.line)
    for number in range(finding.line - 1, 0, -1):
        line = linecache.getline(file, number).strip()
        if not line.startswith("#"):
            return
        yield line
