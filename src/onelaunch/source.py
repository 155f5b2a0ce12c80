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
import sysconfig
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PACKAGE = os.path.dirname(sys._getframe().f_code.co_filename) + os.sep
"""The folder of onelaunch as its code names it, in a checkout, a wheel or a zip."""
STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
"""Names of folders of installed packages. The first lies inside the standard library's folder."""
MOST = 160  # characters of a line in a message
PLUMBING = frozenset(
    {
        *(module.__file__ for module in (contextlib, functools, random, threading)),
        *map(inspect.getfile, (Executor, ThreadPoolExecutor)),
    }
)
"""Files between the user's line and the function that it calls."""


class Place(NamedTuple):
    """A line of source; its text is ``path/file.py:LINE: source``."""

    filename: str
    lineno: int
    source: str

    @staticmethod
    def of(filename: str, lineno: int, of: dict[str, Any] | None = None) -> Place:
        """Return a line with its source. `of`: the globals of its code, which know a zip."""
        return Place(filename, lineno, linecache.getline(filename, lineno, of).strip())

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
    """Return the innermost line that belongs neither to torch nor to onelaunch; None if there is
    none, as in a thread of the autograd engine. `traceback`: of an exception; the stack of the
    running thread if None."""
    if traceback is None:
        point = user_point()
        return point and point.place()
    raised = ((f.f_code.co_filename, n, f.f_globals) for f, n in reversed([*walk_tb(traceback)]))
    return next((Place.of(*at) for at in raised if is_users(at[0])), None)


class CodePoint(NamedTuple):
    """A point in code that runs, from which a message makes its `Place`."""

    code: CodeType
    instruction: int
    globals: dict[str, Any]

    def place(self) -> Place:
        lines = self.code.co_lines()
        numbers = (n for start, stop, n in lines if n and start <= self.instruction < stop)
        line = next(numbers, self.code.co_firstlineno)
        return Place.of(self.code.co_filename, line, self.globals)


def user_point() -> CodePoint | None:
    """Return the point of `user_frame` without its line: 0.1 us for each frame above it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        users = _users.get(code.co_filename)
        if is_users(code.co_filename) if users is None else users:
            return CodePoint(code, frame.f_lasti, frame.f_globals)
        frame = frame.f_back
    return None


def user_line() -> str | None:
    """Return the user's innermost line that runs now, for a message."""
    place = user_frame()
    return str(place) if place else None


def line_of(fn: object, pattern: str | None = None) -> Place | None:
    """Find the last line of a callable's source that matches, else the line where it begins; None
    for code that is torch's or has no source."""
    code = code_of(fn)
    if code is None or not is_users(code.co_filename):
        return None
    filename, first = code.co_filename, code.co_firstlineno
    last = max((line for *_, line in code.co_lines() if line is not None), default=first)
    lines = [Place.of(filename, n) for n in range(first, last + 1)]
    if pattern is not None:
        for place in reversed(lines):
            if re.search(pattern, place.source):
                return place
    # A decorated function begins at its decorators.
    return next((p for p in lines if re.search(r"\b(def|lambda)\b", p.source)), lines[0])


def changed_at(codes: Iterable[CodeType], name: object, item: bool = False) -> Place | None:
    """Find the user's first line that changes an attribute or a variable of this name, in code that
    ran. A computation of the next value precedes an assignment of a constant. `item`: True for an
    item of a container, whose key is `name`."""
    best, most = None, 0
    for place, steps in _lines(codes):
        rank = _change(steps, name, item)
        if rank > most:
            best, most = place, rank
    return best


def loaded_at(codes: Iterable[CodeType], name: object, item: bool = False) -> Place | None:
    """Find the user's first line that loads a name or a key, in code that ran."""
    loads = _CONSTANTS if item else _LOADS
    return next((place for place, steps in _lines(codes) if _has(steps, loads, name)), None)


def argument_changed_at(fn: object) -> Place | None:
    """Find the first line of a callable's that changes an argument: an item, or by a method."""
    code = code_of(fn)
    names = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for place, steps in () if code is None else _lines([code]):
        changes = any(step.opname in _ITEMS or step.argval in _CHANGING for step in steps)
        loaded = [s.argval for s in steps if s.opname.startswith("LOAD_FAST")]
        # Since Python 3.13 an instruction may load two variables.
        each = [name for a in loaded for name in (a if isinstance(a, tuple) else (a,))]
        if changes and not set(names).isdisjoint(each):
            return place
    return None


_STORES = {
    *("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"),
    *("DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF"),
}
_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF"}
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}
_ITEMS = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_KEYED = _ITEMS | {"COPY"}  # instructions after a key: a store, or the load in `d["n"] += 1`
_BY_NAME = frozenset(("setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars"))
"""Names by which code changes an attribute whose name is a string."""
_CHANGING = frozenset(
    (
        *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert"),
        *("move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setdefault"),
        *("sort", "update"),
    )
)
"""Methods that change a container."""


def _lines(codes: Iterable[CodeType]) -> Iterator[tuple[Place, list[dis.Instruction]]]:
    for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
        if not is_users(code.co_filename):
            continue
        lines: dict[int, list[dis.Instruction]] = {}
        for step in dis.get_instructions(code):
            line = step.positions and step.positions.lineno
            if line is not None:
                lines.setdefault(line, []).append(step)
        for line, steps in lines.items():
            yield Place.of(code.co_filename, line), steps


def _has(steps: Iterable[dis.Instruction], instructions: Collection[str], name: object) -> bool:
    return any(step.opname in instructions and step.argval == name for step in steps)


def _change(steps: Sequence[dis.Instruction], name: object, item: bool) -> int:
    """Return how much a line looks like the change of a name, from 0 for not at all. A condition
    and the statement behind it count apart."""
    tests = [at for at, step in enumerate(steps) if "_IF_" in step.opname]
    parts = [steps[start:end] for start, end in pairwise((0, *tests, len(steps)))]
    return max(_part_of_change(part, name, item) for part in parts)


def _part_of_change(steps: Sequence[dis.Instruction], name: object, item: bool) -> int:
    names = {step.opname for step in steps}
    key = _has(steps, _CONSTANTS, name)
    loads = key if item else _has(steps, _LOADS, name)
    if item:
        stores = any(_has([a], _CONSTANTS, name) and b.opname in _KEYED for a, b in pairwise(steps))
        computes = "BINARY_OP" in names
    else:
        stores = _has(steps, _STORES, name) or (key and _mentions(steps, _BY_NAME))
        computes = loads
    if stores and computes:
        return 5  # `self.n += 1`
    if loads and _mentions(steps, _CHANGING):
        return 4  # `self.log.append(n)`
    if stores:
        return 3 if "BINARY_OP" in names or names.isdisjoint(_CONSTANTS) else 2
    return int(loads and not names.isdisjoint(_ITEMS))  # `self.log[n] = 1`


def _mentions(steps: Iterable[dis.Instruction], words: Collection[str]) -> bool:
    return any(step.argval in words for step in steps)


def code_of(fn: Any) -> CodeType | None:
    """Return the code that a call of a callable begins with, below its decorators."""
    while isinstance(fn, functools.partial):
        fn = fn.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not hasattr(fn, "__code__"):
        fn = getattr(type(fn), "forward", type(fn).__call__)
    return getattr(inspect.unwrap(fn), "__code__", None)


def levels_to_user() -> int:
    """Return the `stacklevel` with which the caller's `warnings.warn` shows the user's line."""
    for level, frame in enumerate(live(), start=1):
        if is_users(frame.f_code.co_filename):
            return level
    return 1


def live() -> Iterator[FrameType]:
    """Return the frames above the caller's, innermost first, without their lines."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(filename: str) -> bool:
    """Return whether a file belongs neither to torch, nor onelaunch, nor the standard library."""
    users = _users.get(filename)
    if users is not None:
        return users
    if filename.startswith("<"):  # generated code, unless a notebook or doctest holds its source
        return not filename.startswith(_FX_FILE) and bool(linecache.getline(filename, 1))
    inside = os.path.abspath(filename).startswith((TORCH, *_inductors()))
    inside |= filename.startswith(PACKAGE) or is_standard(os.path.abspath(filename))
    users = _users[filename] = not inside
    return users


def is_standard(file: str) -> bool:
    """Return whether code is of the standard library, and of no package in its folder."""
    inside = (file[len(path) :] for path in STANDARD if file.startswith(path))
    return file.startswith("<frozen") or any(
        name.partition(os.sep)[0] not in PACKAGE_FOLDERS for name in inside
    )


_FX_FILE = "<eval_with_key>"
"""Torch's name for the files of code that it generates from graphs, with their source."""


def _inductors() -> Sequence[str]:
    """Return the folder of Inductor's generated code, if Inductor is in use."""
    caches: Any = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    read = getattr(caches, "cache_dir", None)  # it may be half imported
    return () if read is None else (os.path.abspath(read()) + os.sep,)


_users: dict[str, bool] = {}  # file -> whether it is the user's
