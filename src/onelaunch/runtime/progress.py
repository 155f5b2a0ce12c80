"""The bar of `warm_up(progress=True)`. Rich is imported here alone, when a bar is asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def bar(name: str) -> Generator[Callable[[int, int, str], object]]:
    """Show a bar on stderr; the given function is told (done, total, call)."""
    columns = (
        TextColumn("{task.fields[name]}", markup=False),
        *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("", name=name)

        def tell(done: int, total: int, what: str) -> None:
            shown.update(task, completed=done, total=total, description=what)

        yield tell
