"""Two comparisons side by side in the terminal, and their texts."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onelaunch.bench.changes import Change, Changes, EngineChange
from onelaunch.report.charts.ratios import HEAD, figures

_STYLES: dict[Change, str] = {
    "slower": "red",
    "wrong": "bold red",
    "failed": "bold red",
    "faster": "green",
    "mended": "green",
    "within noise": "dim",
    "gone": "yellow",
}
_SAID: tuple[tuple[Change, str], ...] = (
    ("wrong", "wrong now"),
    ("failed", "failing now"),
    ("slower", "slower"),
    ("faster", "faster"),
    ("mended", "mended"),
    ("gone", "without a time now"),
    ("new", "with a time now"),
    ("within noise", "within noise"),
)


def show_changes(changes: Changes, console: Console) -> None:
    """Print a line for each engine, what differs of the machines, and what changed in all."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(HEAD):
        table.add_column(name, justify="right" if 0 < i < 5 else "left", no_wrap=0 < i < 5)
    for one in changes.engines:
        if one.change != "not timed":
            table.add_row(*map(Text, figures(one)), style=_STYLES.get(one.change, ""))
    console.print()
    if table.row_count:
        console.print(table)
        console.print()
    for one in changes.engines:
        if reason := reason_of(one):
            console.print(Text(f"{one.title}: {reason}", style=_STYLES.get(one.change, "")))
    for name, before, after in environments(changes):
        console.print(Text(f"{name}: {before} -> {after}", style="dim"))
    head, *rest = summary(changes)
    console.print(Text(head, style="bold"))
    for said in rest:
        console.print(Text(said))


def summary(changes: Changes) -> list[str]:
    """Say in a headline what changed, then what else is to be known."""
    counts = {kind: sum(one.change == kind for one in changes.engines) for kind, _ in _SAID}
    told = [f"{counts[kind]} {said}" for kind, said in _SAID if counts[kind]]
    timed = sum(one.ratio is not None for one in changes.engines)
    if timed and counts["within noise"] == timed == sum(counts.values()):
        head = f"No change beyond noise in {timed} engine{'s' * (timed > 1)}"
    else:
        head = ", ".join(told) or "No engine was timed in both"
    said = [head]
    before, after = changes.workloads
    if before != after:
        said.append(f"They are not of the same workload: {before}, and {after}.")
    if any(one.before and one.after and _noisy(one) for one in changes.engines):
        said.append("Where a time had not settled, a change of up to 10% counts as noise.")
    return said


def reason_of(change: EngineChange) -> str:
    """Return why an engine is wrong, fails or is missing now."""
    if change.change not in ("wrong", "failed", "gone") or change.after is None:
        return ""
    return f"{change.after.status}: {change.after.reason}"


def environments(changes: Changes) -> list[tuple[str, str, str]]:
    return [(name, old or "-", new or "-") for name, old, new in changes.environment]


def _noisy(change: EngineChange) -> bool:
    rows = (change.before, change.after)
    return change.ratio is not None and any(row is not None and row.noisy for row in rows)
