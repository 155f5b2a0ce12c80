"""Tensors that the callable returns or stores, and no operation of it made or read."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import assert_same, replays

Rand = Callable[..., Tensor]
pytestmark = pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")


@pytest.fixture
def served() -> Iterator[Callable[[Tensor], Tensor]]:
    """A function whose result another thread computes: three times its argument."""
    asked, answered = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()

    def serve() -> None:
        while (x := asked.get()) is not None:
            answered.put(x * 3)

    def ask(x: Tensor) -> Tensor:
        asked.put(x)
        return answered.get(timeout=20)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield ask
    asked.put(None)
    thread.join(timeout=20)
    assert not thread.is_alive()


def graphed(f: Callable[..., Any]) -> Any:
    return ol.graph(f, warmup=1, on_refusal="eager")


def test_a_result_of_another_thread(rand: Rand, served: Callable[[Tensor], Tensor]) -> None:
    alone, beside = graphed(served), graphed(lambda x: (x + 1, served(x)))
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 4)
            assert_same(alone(x), x * 3)
            assert_same(beside(x), (x + 1, x * 3))


def test_a_result_of_another_thread_is_stored(
    rand: Rand, served: Callable[[Tensor], Tensor]
) -> None:
    kept: dict[str, Any] = {"last": None}

    def f(x: Tensor) -> Tensor:
        kept["last"] = served(x)
        return x + 1

    fast = graphed(f)
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 4)
            assert_same(fast(x), x + 1)
            assert_same(kept["last"], x * 3)


def test_the_items_of_an_iterator(rand: Rand) -> None:
    batches = [rand(i, 4) for i in range(8)]
    items = iter(batches)
    fast = graphed(lambda x: next(items))
    with torch.no_grad():
        for i in range(8):
            assert_same(fast(rand(100 + i, 4)), batches[i])


def test_batches_that_a_thread_puts_into_a_queue(rand: Rand) -> None:
    """What is taken is replaced at once, so that the queue looks as before."""
    batches: queue.Queue[Any] = queue.Queue(2)
    taken = {"number": -1}

    def produce() -> None:
        for i in range(14):
            batches.put((i, rand(i, 4)))

    def f(x: Tensor) -> Tensor:
        taken["number"], batch = batches.get(timeout=20)
        return x + batch

    fast = graphed(f)
    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    with torch.no_grad():
        for i in range(12):
            while not batches.full():  # so that only one of the two threads is at the queue
                pass
            x = rand(50 + i, 4)
            got = fast(x)
            assert_same(got, x + rand(taken["number"], 4))
    for _ in range(2):
        batches.get(timeout=20)
    thread.join(timeout=20)


def test_a_table_that_a_cache_of_c_holds(rand: Rand) -> None:
    @functools.lru_cache
    def table(n: int) -> Tensor:
        return rand(n, 4)

    kept: dict[str, Any] = {"last": None}

    def f(x: Tensor) -> Tensor:
        kept["last"] = table(5)
        return x + 1

    returned, stored = graphed(lambda x: table(4)), graphed(f)
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 4)
            assert returned(x) is table(4)
            assert_same(stored(x), x + 1)
            assert kept["last"] is table(5)
    assert replays(returned) > 4
    assert replays(stored) > 4
