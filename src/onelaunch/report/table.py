"""A comparison in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from onelaunch.bench.rows import Comparison
from onelaunch.report.cells import COLUMNS, cells, header, in_order, verdict

_STYLE = {"wrong": "red", "failed": "yellow", "missing": "dim", "interrupted": "dim"}


def show(comparison: Comparison, console: Console) -> None:
    """Print what bounds the workload, the table, and the code of the fastest correct engine."""
    console.print()
    if comparison.profile is not None:
        console.print(Text(comparison.profile.summary))
        console.print()
    console.print(_table(comparison))
    console.print(Text(header(comparison), style="dim"))
    for remark in comparison.remarks:
        console.print(Text(remark, style="yellow"))
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
    rows = in_order(comparison)
    texts = [cells(row) for row in rows]
    used = [i for i in range(len(COLUMNS)) if i == 0 or any(text[i] for text in texts)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i in used:
        right = 0 < i < len(COLUMNS) - 1
        table.add_column(COLUMNS[i], justify="right" if right else "left", no_wrap=right)
    for row, text in zip(rows, texts, strict=True):
        best = comparison.best is not None and row.engine == comparison.best.engine
        style = "bold green" if best else _STYLE.get(row.status, "")
        table.add_row(*(Text(text[i]) for i in used), style=style)
    return table
