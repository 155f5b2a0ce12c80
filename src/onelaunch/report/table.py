"""A comparison in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from onelaunch.bench.rows import Comparison
from onelaunch.report.cells import COLUMNS, cells, header, in_order, remark, verdict

_STYLE = {"wrong": "red", "failed": "yellow", "missing": "dim", "interrupted": "dim"}


def show(comparison: Comparison, console: Console) -> None:
    """Print the profile, the table, and the code of the fastest correct engine."""
    console.print()
    if comparison.profile is not None:
        console.print(Text(comparison.profile.summary))
        console.print()
    for table in (_table(comparison), _reasons(comparison)):
        if table.row_count:
            console.print(table)
            console.print()
    console.print(Text(header(comparison), style="dim"))
    if any(row.wall and row.fresh_output is False for row in comparison.rows):
        console.print(Text("*: the next call overwrites the result.", style="dim"))
    for said in comparison.remarks:
        console.print(Text(said, style="yellow"))
    for row in comparison.rows:
        for note in row.notes:
            console.print(Text(f"{row.title}: {note}", style="dim"))
    if comparison.interrupted:
        console.print(Text("Interrupted: this is what was known by then.", style="yellow"))
    console.print()
    console.print(Text(verdict(comparison), style="bold"))
    if comparison.best is not None:
        console.print()
        console.print(Syntax(comparison.best.code, "python", background_color="default"))


def _table(comparison: Comparison) -> Table:
    """Lay out the rows that were timed, narrow enough for 80 columns on a CPU."""
    rows = [row for row in in_order(comparison) if row.wall is not None]
    texts = [cells(row) for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(text[i] for text in texts)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i in used:
        right = i > 0
        justify = "right" if right else "left"
        table.add_column(COLUMNS[i], justify=justify, no_wrap=right, overflow="fold")
    for row, text in zip(rows, texts, strict=True):
        best = comparison.best is not None and row.engine == comparison.best.engine
        style = "bold green" if best else _STYLE.get(row.status, "")
        table.add_row(*(Text(text[i]) for i in used), style=style)
    return table


def _reasons(comparison: Comparison) -> Table:
    """List the rows without times, each with its reason."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in in_order(comparison):
        if row.wall is None:
            style = _STYLE.get(row.status, "")
            table.add_row(Text(row.title), Text(remark(row)), style=style)
    return table
