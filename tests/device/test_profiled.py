"""Calls while somebody else's profiler has the interpreter's hook, so that no run is watched."""

from __future__ import annotations

import cProfile
import queue
import random
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, compare, replays

pytestmark = pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")


@contextmanager
def in_python() -> Generator[None]:
    sys.setprofile(lambda *_: None)
    try:
        yield
    finally:
        sys.setprofile(None)


PROFILERS: dict[str, Callable[[], Any]] = {"Python": in_python, "cProfile": cProfile.Profile}


@pytest.mark.parametrize("profiler", PROFILERS)
def test_threads_that_wait_are_woken_after_a_refusal(profiler: str, rand: Rand) -> None:
    """All that a call reaches counts as read, but a lock's waiting threads are not put back."""
    asked, answered = queue.Queue[Any](), queue.Queue[Any]()

    def serve() -> None:
        while (x := asked.get()) is not None:
            answered.put(x * 3)

    def f(x: Tensor) -> Tensor:
        asked.put(x)
        return answered.get(timeout=20) + 1

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with torch.no_grad(), PROFILERS[profiler]():
            compare(fast, lambda x: x * 3 + 1, lambda i: (rand(i, 3),))
    finally:
        asked.put(None)
        thread.join()


@pytest.mark.parametrize("profiler", PROFILERS)
def test_state_that_changes_where_the_profiler_begins_and_ends(profiler: str, rand: Rand) -> None:
    scales = {"a": 1.0, "list": [1.0, 2.0]}

    def f(x: Tensor) -> Tensor:
        return x * scales["a"] + sum(scales["list"])  # type: ignore[arg-type, call-overload]

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for turn in range(4):
            compare(fast, f, lambda i: (rand(i, 3),), 4)
            scales["a"] = turn + 2.0
            with PROFILERS[profiler]():
                compare(fast, f, lambda i: (rand(i, 3),), 4)
            scales["list"].append(1.0)  # type: ignore[attr-defined]
    assert replays(fast) > 0


@pytest.mark.parametrize("profiler", PROFILERS)
def test_numbers_drawn_under_a_profiler_are_refused(profiler: str, rand: Rand) -> None:
    fast = ol.graph(lambda x: x + (random.random() < 2), warmup=1)
    with torch.no_grad(), PROFILERS[profiler]():
        fast(rand(0, 3))
        with pytest.raises(ol.CaptureError, match="OL117"):
            fast(rand(1, 3))
