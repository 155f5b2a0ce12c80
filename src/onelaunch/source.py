"""Lines of the user's code, for messages."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import linecache
import os
import random
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
MOST = 160  # characters of a line in a message
PLUMBING = frozenset(
    {
        *(module.__file__ for module in (contextlib, functools, random, threading)),
        *map(inspect.getfile, (Executor, ThreadPoolExecutor)),
    }
)
"""Files between a line of the user's and what it calls."""


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
    """Return the innermost line that belongs neither to torch nor to onelaunch.

    Args:
        traceback: of an exception; the stack of the running thread if None.

    Returns:
        The place, or None if there is no such frame (in a thread of the autograd engine, say).
    """
    if traceback is not None:
        raised = reversed(list(_raised(traceback)))
        found = next((at for at in raised if is_users(at.tb_frame.f_code.co_filename)), None)
        return found and _place(found.tb_frame, found.tb_lineno)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and _place(frame, frame.f_lineno)


def _place(frame: FrameType, lineno: int) -> Place:
    filename = frame.f_code.co_filename
    return Place(filename, lineno, _source(filename, lineno))


def user_line() -> str | None:
    """Return the innermost line of the user's that runs now, as a message has it."""
    place = user_frame()
    return str(place) if place else None


def line_of(fn: object, pattern: str | None = None) -> Place | None:
    """Find the last line of a callable's source that matches, else the line where it begins.

    Args:
        fn: a function, method, module or other object that can be called.
        pattern: a regular expression to search for.

    Returns:
        The place, or None for code that is torch's or has no source.
    """
    code = code_of(fn)
    if code is None or not is_users(code.co_filename):
        return None
    filename, first = code.co_filename, code.co_firstlineno
    last = max((line for *_, line in code.co_lines() if line is not None), default=first)
    lines = [Place(filename, n, _source(filename, n)) for n in range(first, last + 1)]
    if pattern is not None:
        for place in reversed(lines):
            if re.search(pattern, place.source):
                return place
    # A decorated function begins at its decorators.
    return next((p for p in lines if re.search(r"\b(def|lambda)\b", p.source)), lines[0])


def stored_at(codes: Iterable[CodeType], name: object) -> Place | None:
    """Find the first line of the user's, in code that ran, that stores a name."""
    return _first(codes, name, _STORES)


def loaded_at(codes: Iterable[CodeType], name: object) -> Place | None:
    """Find the first line of the user's, in code that ran, that loads a name."""
    return _first(codes, name, _LOADS)


_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"}
_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF"}


def _first(codes: Iterable[CodeType], name: object, instructions: set[str]) -> Place | None:
    for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
        if not is_users(code.co_filename):
            continue
        for step in dis.get_instructions(code):
            line = step.positions and step.positions.lineno
            if step.opname in instructions and step.argval == name and line is not None:
                return Place(code.co_filename, line, _source(code.co_filename, line))
    return None


def code_of(fn: Any) -> CodeType | None:
    """Return the code that a call of a callable begins with, below its decorators."""
    while isinstance(fn, functools.partial):
        fn = fn.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not hasattr(fn, "__code__"):
        fn = getattr(type(fn), "forward", type(fn).__call__)
    return getattr(inspect.unwrap(fn), "__code__", None)


def _source(filename: str, lineno: int) -> str:
    return linecache.getline(filename, lineno).strip()


def library_calls() -> Iterator[tuple[str, str]]:
    """Return the functions of installed libraries that run between the user's own line and here,
    innermost first: ``("torch/nn/modules/batchnorm.py", "forward")``."""
    for frame in _live():
        code = frame.f_code
        file = _path_in_packages(code.co_filename)
        if file is not None:
            yield file, code.co_name
        elif is_users(code.co_filename):
            return


@functools.cache
def _path_in_packages(filename: str) -> str | None:
    """Return a file of an installed library as ``package/path.py``; None for another file."""
    if filename.startswith(TORCH):
        return "torch/" + filename[len(TORCH) :].replace(os.sep, "/")
    _, found, path = filename.replace(os.sep, "/").rpartition("-packages/")
    return path if found else None


def levels_to_user() -> int:
    """Return the `stacklevel` with which `warnings.warn`, called from here, shows the user's
    line."""
    for level, frame in enumerate(_live(), start=1):
        if is_users(frame.f_code.co_filename):
            return level
    return 1


def _live() -> Iterator[FrameType]:
    """Return the frames above the caller's, innermost first. Asking each for its line would take
    longer than all else."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _raised(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def is_users(filename: str) -> bool:
    """Return whether a file belongs neither to torch, nor onelaunch, nor the plumbing between."""
    found = _users.get(filename)
    if found is not None:
        return found
    if filename.startswith("<"):  # generated code, unless a notebook or doctest holds its source
        return not filename.startswith(_OF_GRAPHS) and bool(linecache.getline(filename, 1))
    inside = os.path.abspath(filename).startswith((TORCH, PACKAGE, *_inductors()))
    found = _users[filename] = not inside and filename not in PLUMBING
    return found


_OF_GRAPHS = "<eval_with_key>"
"""Torch's name for the files of the code that it makes of graphs, whose source it keeps."""


def _inductors() -> Sequence[str]:
    """Return the folder where Inductor keeps the code that it makes, if it is in use."""
    caches: Any = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    read = getattr(caches, "cache_dir", None)  # it may be half imported
    return () if read is None else (os.path.abspath(read()) + os.sep,)


_users: dict[str, bool] = {}
"""file -> whether it is the user's."""
