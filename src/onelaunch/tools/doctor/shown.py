"""A diagnosis as a document: what was found, by severity, each with its source."""

from __future__ import annotations

import linecache
from collections.abc import Iterator

from onelaunch.finding import Finding, Severity
from onelaunch.tools.doctor.diagnosis import Diagnosis, listed
from onelaunch.tools.report.document import Document, Entries, Line, ReportEntry, Style, Text
from onelaunch.tools.rules import RULES
from onelaunch.tools.rules.document import SEVERITIES
from onelaunch.tools.rules.findings import names_of

_STYLES: dict[Severity, Style] = {
    "blocks-capture": "bad",
    "silently-wrong": "good",
    "slow": "warn",
}


def document(diagnosis: Diagnosis) -> Document:
    """Show each finding as an error is shown; the reason once for each rule."""
    explained = set[str]()
    parts = tuple(
        Entries(
            title,
            tuple(_entry(f, explained) for f in diagnosis.findings if f.severity == severity),
            _STYLES[severity],
        )
        for severity, title in SEVERITIES.items()
    )
    pieces = diagnosis.in_pieces
    more = f"onelaunch explain {min(explained, default='')} prints the whole rule, with an example."
    if not explained:
        read = diagnosis.means == ("source",)
        more = (
            "Nothing was run: a callable, path.py:name, shows more than its file." if read else ""
        )
    return Document(
        command="doctor",
        title=diagnosis.target,
        answer=(diagnosis.summary,),
        good=diagnosis.clean and diagnosis.replayed is not False,
        parts=(*parts, *((Text("In pieces", pieces),) if pieces else ())),
        environment=tuple(diagnosis.environment.items()),
        more=more,
    )


def _entry(finding: Finding, explained: set[str]) -> ReportEntry:
    names = zip(finding.codes, names_of(finding), strict=True)
    entry = ReportEntry(tuple(names), tuple(_lines(finding, finding.code not in explained)))
    explained.add(finding.code)
    return entry


def _lines(finding: Finding, why: bool) -> Iterator[Line]:
    yield Line("what", finding.what)
    if finding.file:
        yield Line("where", f"{finding.file}:{finding.line}:{finding.column}", "place")
        yield Line("", finding.source, "source", _marked(finding))
    yield Line("way", "\n".join(finding.calls), "way")
    yield Line("below", finding.library or "", "remark")
    yield Line("why", RULES[finding.code].why if why and finding.code in RULES else "")
    yield Line("fix", finding.fix, "fix")
    yield Line("found", f"by {listed(finding.found_by)}", "remark")


def _marked(finding: Finding) -> int | None:
    """Return the place of a finding's column in its source, if the file still has that line."""
    line = linecache.getline(finding.file, finding.line)
    before = finding.column - 1 - (len(line) - len(line.lstrip()))
    there = line.strip() == finding.source and 0 <= before < len(finding.source)
    return before if there else None
