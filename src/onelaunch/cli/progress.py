"""The terminal of the command, and its progress there: a bar; elsewhere a line on stderr for each
step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from onelaunch.cli import STOPPED, STOPPED_EARLY

OnProgress = Callable[[str, float], None]
BEGAN = time.monotonic()
WIDTH = 140  # of what goes to a file or a pipe, if COLUMNS does not say
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


def console_for_reports() -> Console:
    """Make the console of stdout, also for a time when stdout is redirected."""
    if sys.stdout.isatty():
        return Console(file=sys.stdout)
    width = int(os.environ.get("COLUMNS") or WIDTH)
    # With a height, rich takes this width even where TERM says that the terminal is dumb.
    return Console(file=sys.stdout, width=width, height=width)


@contextlib.contextmanager
def ended_by_interrupts(console: Console) -> Generator[None]:
    """End the process at Ctrl-C: a module under import may swallow a KeyboardInterrupt."""

    def end(*_: object) -> None:
        console.show_cursor(True)
        print(STOPPED_EARLY, file=sys.stderr, flush=True)
        os._exit(STOPPED)

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
