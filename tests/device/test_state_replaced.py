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

import onelaunch as ol

from .drop_in import assert_same

Step = Callable[[Any], object]


def a_longer_list(s: Any) -> None:
    s.v = [*s.v, 1]


def a_sum_of_lists(s: Any) -> None:
    s.v = s.v + [1]  # noqa: RUF005


def a_window(s: Any) -> None:
    s.v = ([*s.v, 1])[-3:]


def a_window_of_a_deque(s: Any) -> None:
    s.v = deque([*s.v, 1], maxlen=3)


def a_turned_list(s: Any) -> None:
    s.v = s.v[1:] + s.v[:1]


def a_dict(s: Any) -> None:
    s.v = {**s.v, "n": len(s.v)}


def a_fraction(s: Any) -> None:
    s.v += 1


def a_path(s: Any) -> None:
    s.v = s.v / "b"


def a_namespace(s: Any) -> None:
    s.v = SimpleNamespace(n=s.v.n + 1)


def counts(s: Any) -> None:
    s.v["a"] += 1
    s.v["b"] += 0.5


def the_same_list(s: Any) -> None:
    s.v = [*s.v[:2]]


STEPS: dict[str, tuple[Step, Callable[[], Any]]] = {
    "a longer list": (a_longer_list, lambda: [1]),
    "a sum of lists": (a_sum_of_lists, lambda: [1]),
    "a window": (a_window, lambda: [0]),
    "a window of a deque": (a_window_of_a_deque, lambda: deque([0], maxlen=3)),
    "a turned list": (a_turned_list, lambda: [1, 2, 3]),
    "a dict": (a_dict, lambda: {"a": 1}),
    "a fraction": (a_fraction, lambda: Fraction(1, 3)),
    "a path": (a_path, lambda: pathlib.PurePosixPath("a")),
    "a namespace": (a_namespace, lambda: SimpleNamespace(n=1)),
    "counts": (counts, Counter),
    "the same list": (the_same_list, lambda: [1, 2]),
}
SERVED = ("counts", "the same list")


@pytest.mark.cpu
@pytest.mark.parametrize("step", STEPS)
def test_as_eager_or_refused(device: torch.device, step: str) -> None:
    move, start = STEPS[step]

    def world() -> tuple[Any, Callable[[Tensor], Tensor]]:
        s = SimpleNamespace(v=start())

        def f(x: Tensor) -> Tensor:
            move(s)
            return x * 2

        return s, f

    (mine, f), (theirs, eager) = world(), world()
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(10):
            x = torch.full((3,), i + 0.5, device=device)
            try:
                got = fast(x)
            except ol.CaptureError as error:
                assert error.code == "OL118", error  # noqa: PT017
                assert step not in SERVED
                return
            assert_same(got, eager(x))
            assert repr(mine.v) == repr(theirs.v), f"call {i}"
    assert step in SERVED
    assert any(recording.replays >= 5 for recording in fast.recordings)


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

    def world() -> tuple[Any, Callable[[Tensor], Tensor]]:
        s = SimpleNamespace(v=None)

        def f(x: Tensor) -> Tensor:
            s.v = make()
            return x * 2

        return s, f

    (mine, f), (theirs, eager) = world(), world()
    fast = ol.graph(f, warmup=1)
    seen: list[Any] = []
    with torch.no_grad():
        for i in range(8):
            x = torch.full((3,), i + 0.5, device=device)
            assert_same(fast(x), eager(x))
            assert repr(mine.v) == repr(theirs.v), f"call {i}"
            assert all(mine.v is not v for v in seen)
            seen.append(mine.v)
            for s in (mine, theirs):
                add(s.v, i + 1)
    assert fast.recordings[0].replays == 7


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("asks_more", [False, True])
def test_an_object_that_comes_and_goes(device: torch.device, asks_more: bool) -> None:
    """A replay deletes nothing, so no recording of a deletion fits a call."""

    def world() -> tuple[Any, Callable[[Tensor], Tensor]]:
        s, mark = SimpleNamespace(), object()

        def f(x: Tensor) -> Tensor:
            if hasattr(s, "mark"):
                del s.mark
            else:
                s.mark = mark
            return x * (3 if asks_more and getattr(s, "other", None) else 2)

        return s, f

    (mine, f), (theirs, eager) = world(), world()
    fast = ol.graph(f, on_refusal="eager")
    for i in range(12):
        x = torch.full((3,), i + 0.5, device=device)
        assert_same(fast(x), eager(x))
        assert hasattr(mine, "mark") == hasattr(theirs, "mark"), f"call {i}"
