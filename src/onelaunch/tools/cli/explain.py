"""`onelaunch explain`: all that is known of a code, without torch."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from onelaunch.error_catalogue import CATALOGUE, CatalogueEntry
from onelaunch.errors import bad
from onelaunch.tools.cli import OK
from onelaunch.tools.cli.progress import console_for_reports
from onelaunch.tools.rules import RULES
from onelaunch.tools.rules.document import SEVERITIES, programs, sections
from onelaunch.tools.rules.rule import Rule
from onelaunch.tools.rules.selection import code_of, nearest

_SHORT = ("Why it matters", "What to write")  # which the entry begins with


def explain(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE_OR_NAME", help="A code, such as OL101, or a rule's name: host-read."
        ),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="A line for each code: its name, severity and title.")
    ] = False,
) -> int:
    """Explain an error or a rule of the doctor, with the code to write instead."""
    if list_all:
        _list()
        return OK
    if word is None:
        why = "it explains one code or name; `--list` prints all"
        raise bad(
            "Missing argument CODE_OR_NAME", "onelaunch explain", why, "onelaunch explain OL101"
        )
    code = code_of(word)
    if code is None:
        what = (
            f"there is no code {word}" if word[:2].upper() == "OL" else f"no rule is called {word}"
        )
        why = "`onelaunch explain --list` prints all codes and names"
        raise bad(what, "onelaunch explain", why, f"onelaunch explain {nearest(word) or '--list'}")
    console = console_for_reports()
    rule = RULES.get(code)
    entry = _entry(code)
    console.print(Text(f"{code}: {entry.title}", style="bold"))
    if rule is not None:
        console.print(Text(f"rule: {rule.name}, {SEVERITIES[rule.severity].lower()}"))
    console.print(Text(f"why:  {entry.why}"))
    console.print(Text(f"fix:  {entry.fix}"))
    if rule is not None:
        _print(rule, console)
    return OK


def _print(rule: Rule, console: Console) -> None:
    for title, text in sections(rule).items():
        if title not in _SHORT:
            console.print(Text(f"\n{title}\n", style="bold"), Text(text), sep="")
    for title, program in programs(rule).items():
        code = Syntax(program, "python", background_color="default").highlight(program)
        console.print(Text(f"\n{title}\n", style="bold"), code, sep="", end="", soft_wrap=True)


def _list() -> None:
    """Print a line for each code, in columns that a program can read, too."""
    console = console_for_reports()
    for code in sorted({*CATALOGUE, *RULES}):
        rule = RULES.get(code)
        name, severity = (rule.name, rule.severity) if rule is not None else ("-", "-")
        line = f"{code}  {name:24}  {severity:14}  {_entry(code).title}"
        console.print(Text(line), soft_wrap=True)


def _entry(code: str) -> CatalogueEntry | Rule:
    return CATALOGUE[code] if code in CATALOGUE else RULES[code]
