"""The page of a diagnosis."""

from __future__ import annotations

from onelaunch.doctor.diagnosis import Diagnosis, listed
from onelaunch.report.page.elements import (
    Html,
    code,
    element,
    environment,
    joined,
    paragraph,
    prose,
    section,
    text,
)
from onelaunch.report.page.frame import page
from onelaunch.rules import RULES
from onelaunch.rules.document import SEVERITIES, sentence
from onelaunch.rules.finding import Finding


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """Write a diagnosis as one HTML file: what was found, by severity, each with its source."""
    explained = set[str]()
    sections: list[Html] = []
    for severity, title in SEVERITIES.items():
        found = [finding for finding in diagnosis.findings if finding.severity == severity]
        shown: list[Html] = []
        for finding in found:
            shown.append(_finding(finding, why=finding.code not in explained))
            explained.add(finding.code)
        sections.append(section(f"{title} ({len(found)})" if found else "", *shown))
    body = joined([*sections, environment(diagnosis.environment)])
    return page(f"{diagnosis.target}: onelaunch doctor", _answer(diagnosis), body)


def _answer(diagnosis: Diagnosis) -> Html:
    count = len(diagnosis.findings)
    if diagnosis.clean:
        head = "Nothing stops it" if diagnosis.replayed is not False else "It is not one launch"
    else:
        head = f"{count} finding{'s' * (count > 1)}"
    return joined(
        [
            paragraph(f"onelaunch doctor · {diagnosis.target}", "kicker"),
            element("h1", head),
            paragraph(diagnosis.summary, "lead"),
            code(diagnosis.in_pieces, "What on_refusal=split makes of it"),
        ]
    )


def _finding(finding: Finding, *, why: bool) -> Html:
    """Show a finding: what, where, the way there, why, and the code to write instead."""
    calls = "".join(f"<li><code>{text(call)}</code></li>" for call in finding.calls)
    below = f"Below, in a library: `{finding.library}`" if finding.library else ""
    place = f"{finding.file}:{finding.line}:{finding.column}" if finding.file else ""
    reason = RULES[finding.code].why if why and finding.code in RULES else ""
    return element(
        "article",
        joined(
            [
                Html(f"<h3>{', '.join(map(_rule, finding.codes, finding.names))}</h3>"),
                prose(sentence(finding.what)),
                element("p", element("code", place), class_="place"),
                code(finding.source, f"The source of {place}"),
                _way(calls),
                prose(below, "small"),
                prose(sentence(reason)),
                _fix(finding.fix),
                paragraph(f"Found by {listed(finding.found_by)}.", "small"),
            ]
        ),
        class_="finding",
    )


def _rule(code: str, name: str) -> str:
    return f"<code>{text(code)}</code> {text(name)}"


def _fix(said: str) -> Html:
    """Show what to write instead: a sentence, or lines of code."""
    if "\n" not in said:
        return prose(sentence(said), "fix")
    return joined([paragraph("in lines:", "fix"), code(said, "What to write instead")])


def _way(calls: str) -> Html:
    if not calls:
        return Html("")
    return Html(f"<details><summary>The way there</summary><ol>{calls}</ol></details>")
