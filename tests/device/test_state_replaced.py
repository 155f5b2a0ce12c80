"""Data in the state that each call replaces by other data: as in eager, or refused."""

from __future__ import annotations

import pathlib
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from .states import World, as_eager

Step = Callable[[Any], object]


def replaced(by: Callable[[Any], Any]) -> Step:
    def step(s: Any) -> None:
        s.v = by(s.v)

    return step


def added(s: Any) -> None:
    s.v += 1


def counts(s: Any) -> None:
    s.v["a"] += 1
    s.v["b"] += 0.5


class InnerPath(pathlib.PurePosixPath):
    """A path as of Python 3.13, whose class is of `pathlib._local`."""

    __slots__ = ()
    __module__ = "pathlib._local"


STEPS: dict[str, tuple[Step, Callable[[], Any]]] = {
    "a longer list": (replaced(lambda v: [*v, 1]), lambda: [1]),
    "a sum of lists": (replaced(lambda v: v + [1]), lambda: [1]),  # noqa: RUF005
    "a window": (replaced(lambda v: [*v, 1][-3:]), lambda: [0]),
    "a window of a deque": (
        replaced(lambda v: deque([*v, 1], maxlen=3)),
        lambda: deque([0], maxlen=3),
    ),
    "a turned list": (replaced(lambda v: v[1:] + v[:1]), lambda: [1, 2, 3]),
    "a dict": (replaced(lambda v: {**v, "n": len(v)}), lambda: {"a": 1}),
    "a fraction": (added, lambda: Fraction(1, 3)),
    "a path": (replaced(lambda v: v / "b"), lambda: pathlib.PurePosixPath("a")),
    "a path of a module inside": (replaced(lambda v: v / "b"), lambda: InnerPath("a")),
    "a namespace": (replaced(lambda v: SimpleNamespace(n=v.n + 1)), lambda: SimpleNamespace(n=1)),
    "counts": (counts, Counter),
    "the same list": (replaced(lambda v: [*v[:2]]), lambda: [1, 2]),
}


SERVED = ("counts", "the same list", "a dict")  # the third call leaves what it finds


@pytest.mark.cpu
@pytest.mark.parametrize("step", STEPS)
def test_as_eager_or_refused(device: torch.device, step: str) -> None:
    move, start = STEPS[step]

    def world() -> World:
        s = SimpleNamespace(v=start())

        def f(x: Tensor) -> Tensor:
            move(s)
            return x * 2

        return s, f

    fast = as_eager(device, world, calls=10, code=None if step in SERVED else "OL118")
    assert step not in SERVED or any(recording.replays >= 5 for recording in fast.recordings)


FRESH: dict[str, tuple[Callable[[], Any], Callable[[Any, int], object]]] = {
    "set": (lambda: {0}, lambda v, i: v.add(i)),
    "counter": (lambda: Counter("aab"), lambda v, i: v.update([i])),
    "array": (lambda: np.zeros(2), lambda v, i: v.__setitem__(0, i)),
    "bytes": (lambda: bytearray(b"ab"), lambda v, i: v.append(i)),
    "list": (lambda: [0], lambda v, i: v.append(i)),
}


@pytest.mark.cpu
@pytest.mark.parametrize("kind", FRESH)
def test_data_that_each_call_makes_anew(device: torch.device, kind: str) -> None:
    """What is added to it after a call is gone after the next."""
    make, add = FRESH[kind]
    seen: dict[int, list[Any]] = {}

    def world() -> World:
        s = SimpleNamespace(v=None)

        def f(x: Tensor) -> Tensor:
            s.v = make()
            return x * 2

        return s, f

    def between(s: Any, i: int) -> None:
        if i:
            assert all(s.v is not v for v in seen.setdefault(id(s), []))
            seen[id(s)].append(s.v)
            add(s.v, i)

    fast = as_eager(device, world, between, calls=9)
    assert fast.recordings[0].replays == 8


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("asks_more", [False, True])
def test_an_object_that_comes_and_goes(device: torch.device, asks_more: bool) -> None:
    """A replay deletes nothing, so no recording of a deletion fits a call."""
    mark = object()

    def world() -> World:
        s = SimpleNamespace()

        def f(x: Tensor) -> Tensor:
            if hasattr(s, "mark"):
                del s.mark
            else:
                s.mark = mark
            return x * (3 if asks_more and getattr(s, "other", None) else 2)

        return s, f

    as_eager(device, world, warmup=3, grad=True, on_refusal="eager")
