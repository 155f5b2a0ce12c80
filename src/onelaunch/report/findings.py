"""A diagnosis in the terminal."""

from __future__ import annotations

import linecache
import textwrap

from rich.console import Console
from rich.text import Text

from onelaunch.doctor.diagnosis import Diagnosis, listed
from onelaunch.rules import RULES
from onelaunch.rules.document import SEVERITIES
from onelaunch.rules.finding import Finding
from onelaunch.rules.rule import Severity

_STYLES: dict[Severity, str] = {
    "blocks-capture": "bold red",
    "silently-wrong": "bold magenta",
    "slow": "bold yellow",
}

_INDENT = 9  # columns before the text of a part


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings by severity, each with its source, and a line that sums them up."""
    explained = set[str]()
    for severity, title in SEVERITIES.items():
        found = [finding for finding in diagnosis.findings if finding.severity == severity]
        if found:
            console.print(Text(f"{title}\n", style=_STYLES[severity]))
        for finding in found:
            _print(finding, console, why=finding.code not in explained)
            explained.add(finding.code)
    if diagnosis.in_pieces:
        console.print(Text(f"{diagnosis.in_pieces}\n"), soft_wrap=True)
    good = diagnosis.clean and diagnosis.replayed is not False
    console.print(Text(diagnosis.summary, style="bold green" if good else "bold"), soft_wrap=True)
    if explained:
        command = f"onelaunch explain {min(explained)}"
        console.print(Text(f"{command} prints the whole rule, with an example.", style="dim"))


def _print(finding: Finding, console: Console, *, why: bool) -> None:
    style = _STYLES[finding.severity]
    for code, name in zip(finding.codes, finding.names, strict=True):
        console.print(Text.assemble((code, style), (f" {name}", "bold")))
    parts = {"what": finding.what}
    if finding.file:
        parts["where"] = f"{finding.file}:{finding.line}:{finding.column}"
    parts["way"] = "\n".join(finding.calls)
    parts["below"] = finding.library or ""
    parts["why"] = RULES[finding.code].why if why else ""
    parts["fix"] = finding.fix
    parts["found"] = f"by {listed(finding.found_by)}"
    for name, text in parts.items():
        if text:
            lines = _wrapped(text, console.width)
            console.print(
                Text.assemble((f"{f'  {name}:':{_INDENT}}", "dim"), lines), soft_wrap=True
            )
        if name == "where":
            _print_excerpt(finding, console, style)
    console.print()


def _wrapped(text: str, width: int) -> str:
    """Break each line of a text into those of a column beside the names of the parts."""
    after = " " * _INDENT
    lines = [
        textwrap.fill(
            line,
            max(width, 40 + _INDENT),
            initial_indent=after,
            subsequent_indent=after,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    ]
    return "\n".join(lines).removeprefix(after)


def _print_excerpt(finding: Finding, console: Console, style: str) -> None:
    """Print the line of a finding, with its column marked if the file still has that line."""
    indent = " " * _INDENT
    console.print(Text(indent + finding.source, style="bold"), no_wrap=True, overflow="ellipsis")
    line = linecache.getline(finding.file, finding.line)
    before = finding.column - 1 - (len(line) - len(line.lstrip()))
    if line.strip() == finding.source and 0 <= before < len(finding.source):
        console.print(Text(indent + " " * before + "^", style=style), no_wrap=True, overflow="crop")
