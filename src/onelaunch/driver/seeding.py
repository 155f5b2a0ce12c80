"""Seeding in a capture, watched; and the generators of Python and NumPy, which no replay advances.

The drivers make the numbers that a replay draws.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from onelaunch.beside import is_beside
from onelaunch.call_events import hook, is_profiled, profiling
from onelaunch.driver.refusals import DRAWN
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.source import TORCH, is_users, line_of, loaded_at

_SETTERS = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"})
_GETTERS = frozenset({"get_state", "graphsafe_get_state"})
_DRAWS = frozenset({"random", "getrandbits"})
"""The C methods of a `random.Random` that all other methods use."""
_SEEDS = frozenset({"seed", "setstate"})  # the C methods of a `random.Random` that set its state
_PYTHONS: Any = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
DRAWING = r"\brandom\.|\brng\."
SEEDING = r"seed|set_state|set_rng_state|fork_rng|graphsafe_set_state"


@dataclass
class _HostGenerator:
    """A generator of Python's or NumPy's."""

    name: str
    read: Callable[[], Any]  # of its state
    write: Callable[[Any], object]
    shared: object = None  # the generator, if it is one of the process
    value: object = None  # the generator, if the call reaches it

    def __post_init__(self) -> None:
        self.state = pickle.dumps(self.read())  # the state at the start


class HostGenerators:
    """The states of Python's and NumPy's generators: those of the process, and others. `reached`:
    the objects that a call reaches, by name."""

    def __init__(self, reached: Iterable[tuple[str, object]] = ()) -> None:
        self._others = other_threads()  # before the states are read, and after, in `refuse_drawn`
        self._all = [_HostGenerator("of `random`", random.getstate, random.setstate, _PYTHONS)]
        numpys = _numpys()
        if numpys is not None:
            name, shared = "of `numpy.random`", numpys.get_state.__self__
            self._all.append(_HostGenerator(name, numpys.get_state, numpys.set_state, shared))
        kinds = generator_kinds()
        for name, value in reached:
            access = _access(value, numpys) if issubclass(type(value), kinds) else None
            if access is not None:
                self._all.append(_HostGenerator(f"`{name}`", *access, value=value))

    def _moved(self) -> list[_HostGenerator]:
        return [one for one in self._all if pickle.dumps(one.read()) != one.state]

    def moved(self, reads: Reads | None = None) -> str | None:
        """Name a generator that has been advanced since by the callable with these `reads`; None if
        there is none. See `refuse_drawn`."""
        return next((one.name for one in self._moved_by(reads)), None)

    def _moved_by(self, reads: Reads | None) -> Iterator[_HostGenerator]:
        moved, sure = self._moved(), self._sure()
        return (one for one in moved if sure or _may_draw_from(one.shared, reads))

    def refuse_drawn(
        self, fn: object, reads: Reads | None, words: Callable[[object], Iterable[object]]
    ) -> None:
        """Refuse a call that has advanced a generator, which no replay does. `reads`: the reads of
        its runs; None if they are not known. `words`: returns the names and keys that lead to an
        object, the nearest first. Raises `CaptureError`: OL117. If another thread ran meanwhile,
        the states stay as they are. A generator of the process then counts only if the callable
        reads its module."""
        moved = next(self._moved_by(reads), None)
        if moved is None:
            return
        self.restore()
        what = f"the generator {moved.name} is advanced in the call"
        codes = () if reads is None else reads.codes
        loads = (loaded_at(codes, word) for word in words(moved.value))
        where = next(filter(None, loads), None) or line_of(fn, DRAWING)
        raise CaptureError("OL117", what, where=where, fix=DRAWN)

    def restore(self) -> None:
        """Restore the states from the start: of the process's only if no other thread ran since,
        which would draw its numbers again; none beside calls."""
        if is_beside():
            return
        sure = self._sure()
        for one in self._all:
            if sure or one.shared is None:
                one.write(pickle.loads(one.state))

    def _sure(self) -> bool:
        """Tell whether no other thread can have advanced a generator: none ran since the start."""
        return other_threads() == self._others


def _numpys() -> Any:
    """Return the module of NumPy's generators; None while NumPy is not imported."""
    return getattr(sys.modules.get("numpy"), "random", None)


def generator_kinds() -> tuple[type, ...]:
    """Return the classes of Python's, NumPy's and torch's generators."""
    numpys = _numpys()
    kinds = torch.Generator, random.Random
    if numpys is None:
        return kinds
    return *kinds, numpys.RandomState, numpys.Generator, numpys.BitGenerator


def _may_draw_from(shared: object, reads: Reads | None) -> bool:
    """Return whether runs with these reads may have drawn from a generator of the process."""
    if shared is None or reads is None:
        return True
    for value in reads.alive():
        functions = vars(value).values() if isinstance(value, ModuleType) else ()
        if value is shared or any(getattr(f, "__self__", None) is shared for f in functions):
            return True
    read = (names.get(n) for names, uses in reads.globals.values() for n in uses)
    return any(getattr(value, "__self__", None) is shared for value in read)


def other_threads() -> dict[threading.Thread, tuple[object, ...]]:
    """Return how far each other thread has come: its frame, the instruction there, and its CPU
    time. Threads of autograd's engine draw only while a backward waits for them."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)  # in a cycle with its own locals
    threads: dict[threading.Thread, tuple[object, ...]] = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or isinstance(thread, threading._DummyThread):
            continue
        frame = frames.get(thread.ident or 0)
        spent = None if frame is None else _cpu_seconds(thread)
        threads[thread] = frame, frame and frame.f_lasti, spent
    return threads


def _cpu_seconds(thread: threading.Thread) -> float | None:
    """Return the CPU time of a thread; None of one that has ended, and where it is unknown."""
    if not sys.platform.startswith("linux") or thread.native_id is None:
        return None
    clock = ~thread.native_id << 3 | 6  # Linux's number; Python's takes an ended thread's memory
    with suppress(OSError):
        return time.clock_gettime(clock)
    return None


def _access(value: object, numpys: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Find the functions that read and write the state of a generator; None for other objects."""
    one: Any = value
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return one.getstate, one.setstate
    if numpys is None:
        return None
    if isinstance(value, numpys.RandomState):
        return one.get_state, one.set_state
    source = one.bit_generator if isinstance(value, numpys.Generator) else one
    if isinstance(source, numpys.BitGenerator):
        return partial(getattr, source, "state"), partial(setattr, source, "state")
    return None


class _Watch(NamedTuple):
    refusal: Callable[[str], BaseException] | None
    methods: frozenset[str]
    saved: list[object]  # the last place where the state of Python's own generator was read
    draw: Callable[[str], BaseException] | None = None
    take: Callable[[set[Any]], BaseException | None] | None = None

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        owner = getattr(called, "__self__", None)
        if isinstance(owner, set):
            taken = self.take(owner) if self.take and called.__name__ == "pop" else None
            if taken is not None:
                raise taken
            return
        if owner is _PYTHONS:
            # A call that seeds it as the last call did leaves its state as it was.
            seeds = self.refusal if self.draw is not None and called.__name__ in _SEEDS else None
            error = self.draw if called.__name__ in _DRAWS else seeds
            if called.__name__ == "getstate":
                self.saved[:] = _place(frame)
            elif error is not None and not (_is_compiling(frame) or self._undoes(frame, called)):
                raise error(called.__name__)
            return
        watched = called.__name__ in self.methods
        if not (watched and isinstance(owner, torch.Generator)):
            return
        # A read is a checkpoint's, which Dynamo only steps around.
        steps_around = called.__name__ not in _GETTERS and _is_compiling(frame)
        if self.refusal is not None and not steps_around:
            raise self.refusal(called.__name__)

    def _undoes(self, frame: FrameType, called: Any) -> bool:
        """Return whether Dynamo, from torch 2.14 on in C++, sets the state that it has read around
        a frame. It does so within one instruction, and here nothing was drawn in between."""
        if called.__name__ != "setstate" or self.saved != _place(frame):
            return False
        compiled = any(f.f_code.co_filename == _EVAL_FRAME for f, _ in walk_stack(frame))
        return compiled and frame.f_locals.get("state") == random.getstate()


def _place(frame: FrameType) -> list[object]:
    by = frame.f_back
    return [] if by is None else [id(by), by.f_code, by.f_lasti]


_DYNAMO = os.path.join(TORCH, "_dynamo", "")


_EVAL_FRAME = _DYNAMO + "eval_frame.py"
_TRACING = tuple(_DYNAMO + name for name in ("convert_frame.py", "symbolic_convert.py"))


def _files_to_user(frame: FrameType) -> Iterator[str]:
    """List the files of a frame and its callers, up to the user's code."""
    files = (caller.f_code.co_filename for caller, _ in walk_stack(frame))
    return itertools.takewhile(lambda file: not is_users(file), files)


def is_tracing(frame: FrameType) -> bool:
    """Tell whether Dynamo traces the code that a frame runs for. A function around which Dynamo is
    turned off comes through its modules, too."""
    return any(file in _TRACING for file in _files_to_user(frame))


def _is_compiling(frame: FrameType) -> bool:
    # Dynamo puts the state back to where it was when it has traced a function.
    return any(file.startswith(_DYNAMO) for file in _files_to_user(frame))


@contextmanager
def watching_seeds(
    refusal: Callable[[str], BaseException] | None,
    *,
    reads: bool = False,
    draw: Callable[[str], BaseException] | None = None,
    take: Callable[[set[Any]], BaseException | None] | None = None,
    frames: FrameWatch | None = None,
) -> Generator[None]:
    """Raise `refusal(method)` where this thread calls a generator's method that sets its state. It
    finds the line, also of calls that leave the state as it was. It slows calls down (by about 0.1
    us each), and does nothing while a profiler has the interpreter's hook.

    Args:
        refusal: None to watch for `draw` only.
        reads: raise also where it reads the state: for a backward that draws the numbers again.
        draw: ``draw(method)`` is raised where Python's own generator draws a number, and
            ``refusal(method)`` where it is seeded.
        take: ``take(of)`` is raised, if it is an error, where `set.pop` takes an element. A set
            chooses one by a place that nothing reads or puts back.
        frames: watches the functions that run, too.
    """
    if is_profiled():
        yield
        return
    watch = _Watch(refusal, _SETTERS | _GETTERS if reads else _SETTERS, [], draw, take)
    owners = (torch.Generator, random.Random, *((set,) if take is not None else ()))
    if frames is None:
        watcher = hook(methods=watch, owners=owners)
    else:
        watcher = hook(frames, frames.matters, frames.leaves, watch, owners)
    with profiling(watcher):
        try:
            yield
        finally:
            watcher.end()
