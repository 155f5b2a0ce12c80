"""Comments that silence a finding: ``# onelaunch: allow host-read -- read once, at the start``.

The comment is at the end of the finding's line, or on a line of its own above it. Several names
are separated by commas; codes work too. Without a reason the finding stays, and says so.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from onelaunch.finding import Finding
from onelaunch.tools.rules.findings import names_of

_COMMENT = re.compile(
    r"#\s*onelaunch:\s*allow\s+(?P<names>[\w-]+(?:\s*,\s*[\w-]+)*)\s*(?:--\s*(?P<reason>.*\S))?"
)


def kept(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that no comment allows. Where a comment has no reason, they say so."""
    return [_with_hint(finding) for finding in findings if not allowed(finding)]


def allowed(finding: Finding) -> bool:
    """Return whether a comment, with a reason, allows a finding."""
    return any(reason and _names(finding, names) for names, reason in _comments(finding))


def _with_hint(finding: Finding) -> Finding:
    hint = f"its comment lacks a reason: `allow {finding.name} -- why`"
    named = any(not reason and _names(finding, names) for names, reason in _comments(finding))
    told = hint in finding.what
    return replace(finding, what=f"{finding.what}; {hint}") if named and not told else finding


def _names(finding: Finding, names: list[str]) -> bool:
    given = {*names, *(name.upper() for name in names)}
    return not given.isdisjoint((*names_of(finding), *finding.codes))


def _comments(finding: Finding) -> Iterator[tuple[list[str], str | None]]:
    """Return the names and reasons of the comments at a finding: on its line, or right above it."""
    file = os.path.abspath(finding.file) if os.path.exists(finding.file) else finding.file
    linecache.checkcache(file)
    for number in range(finding.line, 0, -1):
        line = linecache.getline(file, number)
        if number < finding.line and not line.strip().startswith("#"):
            return
        match = _COMMENT.search(line)
        if match is not None:
            yield [name.strip() for name in match["names"].split(",")], match["reason"]
