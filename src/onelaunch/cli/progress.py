"""The progress of the command: a bar on a terminal, elsewhere a line on stderr for each step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

OnProgress = Callable[[str, float], None]
BEGAN = time.monotonic()
REPEAT_SECONDS = 10.0  # between two lines of one step, such as the rounds of timing


@contextlib.contextmanager
def progress(console: Console) -> Generator[OnProgress]:
    """Show each step that the given function is told, and the part that is done, from 0 to 1."""
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        yield Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(text: str, part: float) -> None:
            bar.update(task, description=text, completed=part)

        yield tell


class Lines:
    """A line for each new step; of those that differ in a last number, one in ten seconds."""

    def __init__(self) -> None:
        self._step = ""
        self._told = 0.0

    def __call__(self, text: str, part: float) -> None:
        """Print the step, after the seconds since the command began."""
        now, step = time.monotonic(), text.rstrip("0123456789")
        if step != self._step or now - self._told >= REPEAT_SECONDS:
            print(f"{now - BEGAN:4.0f} s  {text}", file=sys.stderr, flush=True)
            self._step, self._told = step, now
