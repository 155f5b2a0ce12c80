"""The terminal of the command, and its progress there: a bar; elsewhere a line on stderr for each
step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from onelaunch.tools.cli import STOPPED, STOPPED_EARLY

if TYPE_CHECKING:
    from onelaunch.tools.bench.workload import OnProgress

BEGAN = time.monotonic()
WIDTH = 140  # of what goes to a file or a pipe, if COLUMNS does not say
REPEAT_SECONDS = 10.0  # between two lines of one step, such as the rounds of timing
LATE_SECONDS = 2.0


@contextlib.contextmanager
def progress(console: Console) -> Generator[OnProgress]:
    """Show each step that the given function is told, and the part that is done, from 0 to 1."""
    if _is_lines(console):
        with Lines() as lines:
            yield lines
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(text: str, part: float) -> None:
            bar.update(task, description=text, completed=part)

        yield tell


@contextlib.contextmanager
def told(text: str, console: Console) -> Generator[None]:
    """Tell a step in which code of the user's may print or ask something, so that a bar would be in
    the way: in a line, on a terminal after two seconds."""
    if _is_lines(console):
        with Lines() as lines:
            lines(text, 0.0)
            yield
        return
    late = threading.Timer(LATE_SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _is_lines(console: Console) -> bool:
    return not sys.stdout.isatty() or console.is_dumb_terminal


class Lines:
    """Lines of progress: a line for each new step, and every ten seconds while a step goes on.

    Texts that differ only in a number at the end are of the same step.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr  # which building an engine redirects, to keep its chatter away
        self._step = self._text = ""
        self._begun = self._told = 0.0
        self._lock, self._over = threading.Lock(), threading.Event()

    def __call__(self, text: str, part: float) -> None:
        """Print the step, after the seconds since the command began."""
        with self._lock:
            now, step = time.monotonic(), text.rstrip("0123456789")
            if step != self._step or now - self._told >= REPEAT_SECONDS:
                self._print(text, now)
            if step != self._step:
                self._begun = now
            self._step, self._text = step, text

    def go_on(self) -> None:
        """Print that the step goes on, if no line was printed for a while."""
        with self._lock:
            now = time.monotonic()
            if self._text and now - self._told >= REPEAT_SECONDS:
                self._print(f"{self._text}, for {now - self._begun:.0f} s", now)

    def _print(self, text: str, now: float) -> None:
        print(f"{now - BEGAN:4.0f} s  {text}", file=self._stream, flush=True)
        self._told = now

    def __enter__(self) -> Lines:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LATE_SECONDS):
            self.go_on()


def console_for_reports() -> Console:
    """Make the console of stdout, also for a time when stdout is redirected."""
    if sys.stdout.isatty():
        return Console(file=sys.stdout)
    columns = os.environ.get("COLUMNS", "")
    width = (int(columns) if columns.isdecimal() else 0) or WIDTH
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
