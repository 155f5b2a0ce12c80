"""Output of the user's code, kept off stdout, and a stdout that takes no more."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Generator

from onelaunch.errors import bad


def tell_unwritable(error: OSError) -> None:
    """Tell on stderr that stdout takes no more; not that the reader of a pipe has enough."""
    # At its end the interpreter writes what is left once more, and would fail once more.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        what, why = (
            f"the output could not be written: {error.strerror}",
            "results are printed there",
        )
        told = bad(what, "stdout", why, "onelaunch ... > a file on a disk that has room")
        with contextlib.suppress(OSError):  # stderr may be what cannot be written
            print(f"{type(told).__name__} {told}", file=sys.stderr)


def tell_unreadable(error: OSError) -> None:
    """Tell on stderr of a file that can be neither read nor written."""
    place = str(error.filename or "the current folder")
    what, why = f"{place} cannot be used: {error.strerror}", "the command reads or writes there"
    told = bad(what, place, why, "a file or folder that is there, and that you may use")
    print(f"{type(told).__name__} {told}", file=sys.stderr)


class _Unshown(io.TextIOBase):
    """A stdout that shows nothing, and counts the lines."""

    lines = 0

    def write(self, text: str, /) -> int:
        self.lines += text.count("\n")
        return len(text)

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def unshown(target: str, done: str) -> Generator[None]:
    """Keep what a callable prints, in each of its many calls, off stdout, which has the result
    alone; and tell on stderr how much that was.

    Args:
        done: what is done with the target: ``"compared"``.
    """
    nowhere = _Unshown()
    with contextlib.redirect_stdout(nowhere):
        yield
    if nowhere.lines:
        what = "1 line" if nowhere.lines == 1 else f"{nowhere.lines} lines"
        print(f"not shown: {what} that {target} printed while it was {done}", file=sys.stderr)
