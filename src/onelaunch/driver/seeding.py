"""Seeding in a capture: watched, and undone afterwards; and the generators of Python and NumPy,
which no replay advances.

The numbers that a replay draws are the driver's affair: `cuda/graph.py` and `tape/graph.py`.
"""

from __future__ import annotations

import functools
import linecache
import os
import pickle
import random
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from onelaunch.call_events import hook, is_profiled, set_profile
from onelaunch.frames.watch import FrameWatch
from onelaunch.source import Place, is_users

_SETTERS = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"})
_GETTERS = frozenset({"get_state", "graphsafe_get_state"})
_DRAWS = frozenset({"random", "getrandbits"})
"""The C methods of a `random.Random` on which all its others are built."""
_PYTHONS: Any = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
DRAWING = r"\brandom\.|\brng\."
SEEDING = r"seed|set_state|set_rng_state|fork_rng|graphsafe_set_state"


class _HostGenerator(NamedTuple):
    """A generator of Python's or NumPy's.

    Attributes:
        name: the name in a message.
        read, write: functions for its state.
        state: the state at the start, as bytes.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    state: bytes

    @classmethod
    def of(cls, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> Self:
        return cls(name, read, write, pickle.dumps(read()))


class HostGenerators:
    """The states of Python's and NumPy's generators: those of the process, and others.

    Args:
        reached: the objects that a call reaches, by name.
    """

    def __init__(self, reached: Iterable[tuple[str, object]] = ()) -> None:
        self._all = [_HostGenerator.of("of `random`", random.getstate, random.setstate)]
        numpys: Any = getattr(sys.modules.get("numpy"), "random", None)
        if numpys is not None:
            made = _HostGenerator.of("of `numpy.random`", numpys.get_state, numpys.set_state)
            self._all.append(made)
        kinds: tuple[type, ...] = (random.Random,)
        if numpys is not None:
            kinds += numpys.RandomState, numpys.Generator, numpys.BitGenerator
        for name, value in reached:
            access = _access(value, numpys) if issubclass(type(value), kinds) else None
            if access is not None:
                self._all.append(_HostGenerator.of(f"`{name}`", *access))

    def moved(self) -> str | None:
        """Name one that has been advanced since, or None."""
        moved = (one.name for one in self._all if pickle.dumps(one.read()) != one.state)
        return next(moved, None)

    def restore(self) -> None:
        """Put them back to where they were."""
        for one in self._all:
            one.write(pickle.loads(one.state))

    def sure(self) -> bool:
        """Tell whether no other thread can have advanced one."""
        return not any(map(_may_draw, threading.enumerate()))


def _may_draw(thread: threading.Thread) -> bool:
    """Return whether a thread may draw numbers by itself. The engine's draw only while a backward
    waits for them; those of torch's compiler, and of the progress bar that it shows, never do."""
    if thread is threading.current_thread() or isinstance(thread, threading._DummyThread):
        return False
    runs = getattr(thread, "_target", None) or type(thread)
    return getattr(runs, "__module__", "").partition(".")[0] not in ("torch", "tqdm")


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
        return functools.partial(getattr, source, "state"), functools.partial(
            setattr, source, "state"
        )
    return None


class RandomState:
    """The generators that a capture may advance: the default one, and those given."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = [torch.default_generator, *generators]
        self._before = self._read()
        self._now = self._before

    def _read(self) -> list[Tensor]:
        return [g.get_state() for g in self._generators]

    def moved(self) -> bool:
        """Tell whether a generator changed since `accept`, by something else than an operation."""
        return not all(map(torch.equal, self._read(), self._now))

    def accept(self) -> None:
        """Take the present state as the one that the recorded operations left."""
        self._now = self._read()

    def restore(self) -> None:
        """Put every generator back to where it was when this object was made."""
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)


def seeding_line(before: Place | None, after: Place | None) -> Place | None:
    """Find the line that changed the random state, between the operations on either side of it.

    Args:
        before: the line of the last operation that saw the old state, or None.
        after: the line of the first operation that saw the new one, or None.
    """
    place = after or before
    if place is None:
        return None
    first = before.lineno if before and before.filename == place.filename else 1
    last = after.lineno if after else first + 40
    for lineno in range(last, min(first, last) - 1, -1):
        source = linecache.getline(place.filename, lineno).strip()
        if re.search(SEEDING, source):
            return Place(place.filename, lineno, source)
    return place


@dataclass(frozen=True)
class _Watch:
    refusal: Callable[[str], BaseException]
    methods: frozenset[str]
    draw: Callable[[str], BaseException] | None = None

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if self.draw is not None and called.__name__ in _DRAWS:
            if getattr(called, "__self__", None) is _PYTHONS and not _is_compiling(frame):
                raise self.draw(called.__name__)
            return
        watched = called.__name__ in self.methods
        ours = watched and isinstance(getattr(called, "__self__", None), torch.Generator)
        # A read is a checkpoint's, which Dynamo only steps around.
        if ours and (called.__name__ in _GETTERS or not _is_compiling(frame)):
            raise self.refusal(called.__name__)


def _is_compiling(frame: FrameType | None) -> bool:
    # Dynamo puts the state back to where it was when it has traced a function.
    while frame is not None and not is_users(frame.f_code.co_filename):
        if os.path.join("torch", "_dynamo") + os.sep in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@contextmanager
def watching_seeds(
    refusal: Callable[[str], BaseException],
    *,
    reads: bool = False,
    draw: Callable[[str], BaseException] | None = None,
    frames: FrameWatch | None = None,
) -> Generator[None]:
    """Raise `refusal(method)` where this thread calls a generator's method that sets its state.

    It finds the line, and calls that leave the state as it was too. It slows calls down (by about
    0.1 us each), and does nothing while a profiler has the interpreter's hook.

    Args:
        reads: raise also where it reads the state: for a backward that draws the numbers again.
        draw: ``draw(method)`` is raised where Python's own generator draws a number.
        frames: watches the functions that run, too.
    """
    before = sys.getprofile()
    if is_profiled():
        yield
        return
    watch = _Watch(refusal, _SETTERS | _GETTERS if reads else _SETTERS, draw)
    owners = (torch.Generator, random.Random)
    if frames is None:
        made = hook(methods=watch, owners=owners)
    else:
        made = hook(frames, frames.skipped, frames.leaves, watch, owners)
    made.begin()
    try:
        yield
    finally:
        made.end()
        if sys.getprofile() is made:  # not where an interrupt has this end long after the run
            set_profile(before)


@contextmanager
def seeded_once(
    refusal: Callable[[], BaseException], redraw: Callable[[], None]
) -> Generator[None]:
    """Raise `refusal` if the host's default generator is seeded meanwhile.

    `torch.manual_seed` runs where Dynamo has turned the interpreter's hooks off, so
    `watching_seeds` does not see it; but it leaves another state than `redraw`, which repeats what
    was drawn, even where it sets the seed of last time, for a number is drawn before. For devices
    with generators of their own, whose graphs cannot repeat a seeding. The state is put back.
    """
    state = torch.get_rng_state()
    torch.rand((), device="cpu")  # whatever the default device is
    drawn = torch.get_rng_state()
    try:
        yield
        left = torch.get_rng_state()
        torch.set_rng_state(drawn)
        redraw()
        kept = torch.equal(torch.get_rng_state(), left)
    finally:
        torch.set_rng_state(state)
    if not kept:
        raise refusal()
