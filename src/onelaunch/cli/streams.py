"""stdout and stderr that cannot be written, as where a disk is full: an error of ours."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Generator
from typing import Any, TextIO, cast

from onelaunch.errors import ArgumentError


class Unwritable(Exception):
    """The error of a stream that takes no more. No `OSError`, which click answers by itself."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause

    def told(self) -> None:
        """Tell it on stderr; not that the reader of a pipe has enough."""
        if self.cause.errno == errno.EPIPE:
            return
        error = ArgumentError(
            "OL401",
            f"the output could not be written: {self.cause.strerror}",
            where="stdout",
            why="what was found is printed there",
            fix="onelaunch ... > a file on a disk that has room",
        )
        with contextlib.suppress(OSError):  # stderr may be what cannot be written
            print(f"{type(error).__name__} {error}", file=sys.stderr)


class _Guarded:
    """A stream that raises `Unwritable`; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return _guarded(self._stream.write, text)

    def flush(self) -> None:
        _guarded(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _guarded(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except OSError as error:
        raise Unwritable(error) from error


@contextlib.contextmanager
def guarded_streams() -> Generator[None]:
    """Let stdout and stderr raise `Unwritable`, and write all of stdout by the end."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Guarded(stream)) for stream in streams)
    try:
        yield
        sys.stdout.flush()
    except Unwritable:
        # At its end the interpreter writes what is left once more, and would fail once more.
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), streams[0].fileno())
        raise
    finally:
        sys.stdout, sys.stderr = streams
