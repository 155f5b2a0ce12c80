"""Where in the user's code something happened."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import random
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import NamedTuple

import torch

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
MOST = 160  # characters of a line in a message
_PLUMBING = frozenset({contextlib.__file__, functools.__file__, random.__file__})


class Place(NamedTuple):
    """A line of source; its text is ``path/file.py:LINE: source``."""

    filename: str
    lineno: int
    source: str

    def __str__(self) -> str:
        try:
            path = os.path.relpath(self.filename)
        except ValueError:  # another drive, on Windows
            path = self.filename
        path = self.filename if path.startswith("..") else path
        if not self.source:
            return f"{path}:{self.lineno}"
        source = f"{self.source[:MOST]} ..." if len(self.source) > MOST else self.source
        return f"{path}:{self.lineno}: {source}"


def user_frame(traceback: TracebackType | None = None) -> Place | None:
    """The innermost line that belongs neither to torch nor to onelaunch.

    Args:
        traceback: of an exception; the stack of the running thread if None.

    Returns:
        The place, or None where no such frame exists (in a thread of the autograd engine, say).
    """
    frames = _live() if traceback is None else reversed(list(_raised(traceback)))
    for frame, lineno in frames:
        filename = frame.f_code.co_filename
        if is_users(filename):
            return Place(filename, lineno, linecache.getline(filename, lineno).strip())
    return None


def torch_files() -> Iterator[str]:
    """The files of torch that run between the user's line and here, innermost first:
    ``nn/modules/batchnorm.py``."""
    for frame, _ in _live():
        filename = frame.f_code.co_filename
        if is_users(filename):
            return
        if filename.startswith((TORCH, PACKAGE)[0]):
            yield filename[len((TORCH, PACKAGE)[0]) :].replace(os.sep, "/")


def levels_to_user() -> int:
    """The `stacklevel` with which `warnings.warn`, called where this is, shows the user's line."""
    for level, (frame, _) in enumerate(_live(), start=1):
        if is_users(frame.f_code.co_filename):
            return level
    return 1


def _live() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _raised(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def is_users(filename: str) -> bool:
    """Whether a file belongs neither to torch, nor to onelaunch, nor to the plumbing between."""
    if filename.startswith("<"):  # generated code, unless a notebook or doctest holds its source
        return bool(linecache.getline(filename, 1))
    return _outside(filename)


@functools.cache
def _outside(filename: str) -> bool:
    return not os.path.abspath(filename).startswith((TORCH, PACKAGE)) and filename not in _PLUMBING
