"""A document in the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.syntax import Syntax
from rich.table import Table as Grid
from rich.text import Text as Said

from onelaunch.tools.report.document import (
    LONG,
    Bars,
    Document,
    Entries,
    ReportEntry,
    ReportTable,
    Style,
    Text,
)

_STYLES: dict[Style, str] = {
    "": "",
    "best": "bold green",
    "good": "bold magenta",
    "bad": "bold red",
    "warn": "yellow",
    "dim": "dim",
}
_INKS = ("█ blue", "▓ yellow", "▒ red", "░ magenta")
BAR = 60  # columns
_INDENT = 9  # columns before the text of a line of an entry


def show(document: Document, console: Console) -> None:
    """Print the tables, then the answer, then its code."""
    for part in document.parts:
        for block in _blocks(part, console):
            console.print(block, soft_wrap=not isinstance(block, Grid))
            console.print()
    lines = [Said(said, style="dim") for said in document.context]
    lines += [Said(said, style="yellow") for said in document.remarks]
    lines += [Said(said, style="dim") for said in document.notes]
    for line in lines:
        console.print(line)
    if lines:
        console.print()
    style = "bold green" if document.good else "bold"
    for i, said in enumerate(document.answer):
        console.print(Said(said, style="" if i else style), soft_wrap=True)
    if document.more:
        console.print(Said(document.more, style="dim"))
    if document.code:
        console.print()
        for code in _code(document):
            console.print(code, soft_wrap=True)


def _code(document: Document) -> Iterator[Said]:
    """Write code as it is pasted: no line is cut or wrapped; of a long one the first lines."""
    lines = document.code.splitlines()
    shown = "\n".join(lines if len(lines) <= LONG else lines[: LONG // 2])
    code = Syntax(shown, "python", background_color="default").highlight(shown)
    code.rstrip()
    yield code
    if len(lines) > LONG:
        more = len(lines) - LONG // 2
        yield Said(f"# and {more} lines more: --json and --report write all", style="dim")


def _blocks(part: object, console: Console) -> Iterator[RenderableType]:
    """Return the blocks of a part, to be set apart by empty lines; of charts the stacked ones."""
    if isinstance(part, Text):
        lines = "\n" in part.text  # which are laid out already
        yield Said(part.text if lines else textwrap.fill(part.text, console.width))
    elif isinstance(part, ReportTable) and part.rows:
        yield _grid(part)
    elif isinstance(part, Entries) and part.entries:
        yield Said(part.title, style=_STYLES[part.style])
        for entry in part.entries:
            yield _entry(entry, _STYLES[part.style], console)
    elif isinstance(part, Bars) and part.stacked:
        yield _stacked(part)


def _grid(table: ReportTable) -> Grid:
    """Lay out rows; a figure is never wrapped or cut, and a column that nobody fills left out."""
    grid = Grid(box=None, pad_edge=False, header_style="bold", show_header=bool(table.head))
    width = len(table.rows[0])
    used = [i for i in range(width) if any(row[i] for row in table.rows)]
    for i in used:
        figure = bool(table.head) and i > 0 and i not in table.words
        grid.add_column(
            table.head[i] if table.head else "",
            justify="right" if figure else "left",
            no_wrap=figure or (not table.head and i == 0),
            overflow="fold",
        )
    for i, row in enumerate(table.rows):
        style = _STYLES[table.styles[i]] if table.styles else ""
        grid.add_row(*(Said(row[n]) for n in used), style=style)
    return grid


def _entry(entry: ReportEntry, style: str, console: Console) -> Said:
    lines = [Said.assemble((code, style), (f" {name}", "bold")) for code, name in entry.names]
    after = " " * _INDENT
    for line in entry.lines:
        if line.kind == "source":
            source = Said(after + line.text, style="bold")
            source.truncate(console.width, overflow="ellipsis")
            lines.append(source)
            if line.column is not None:
                mark = Said(f"{after}{' ' * line.column}^", style=style)
                mark.truncate(console.width)
                lines.append(mark)
        elif line.text:
            head = (f"{f'  {line.label}:':{_INDENT}}", "dim")
            lines.append(Said.assemble(head, _wrapped(line.text, console.width)))
    return Said("\n").join(lines)


def _wrapped(text: str, width: int) -> str:
    """Break each line of a text into those of a column beside the labels."""
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


def _stacked(bars: Bars) -> Said:
    """Draw the parts of each kind in a line, and name each with its figure in the next."""
    lines: list[Said] = []
    whole = max(value["high"] for value in bars.values) or 1.0
    for kind in dict.fromkeys(value["kind"] for value in bars.values):
        bar, legend = Said(f"{kind:>5}  "), Said(" " * 7)
        for i, value in enumerate(v for v in bars.values if v["kind"] == kind):
            idle = value["name"].endswith(("idle", "gaps"))
            ink, style = ["·", "dim"] if idle else _INKS[i % len(_INKS)].split()
            start, end = (round(value[field] / whole * BAR) for field in ("low", "high"))
            bar.append(ink * (end - start), style)
            if value["high"] > value["low"]:
                legend.append(f"{ink} ", style).append(f"{value['part']} {value['shown']}   ")
        lines += [bar, legend]
    return Said("\n").join(lines)
