"""What the callable returns or stores, and no operation of it made or read."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, replays

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
    alike(graphed(served), lambda x: x * 3, rand, 4, calls=8)
    beside = graphed(lambda x: (x + 1, served(x)))
    alike(beside, lambda x: (x + 1, x * 3), rand, 4, calls=8)


def test_a_result_of_another_thread_is_stored(
    rand: Rand, served: Callable[[Tensor], Tensor]
) -> None:
    kept: dict[str, Any] = {"last": None}

    def f(x: Tensor) -> Tensor:
        kept["last"] = served(x)
        return x + 1

    fast = graphed(f)
    alike(lambda x: (fast(x), kept["last"]), lambda x: (x + 1, x * 3), rand, 4, calls=8)


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
    taken, over = {"number": -1}, threading.Event()

    def produce() -> None:
        for i in itertools.count():
            batch = rand(i, 4)
            while not over.is_set():
                with contextlib.suppress(queue.Full):
                    batches.put((i, batch), timeout=0.1)
                    break
            if over.is_set():
                return

    def f(x: Tensor) -> Tensor:
        taken["number"], batch = batches.get(timeout=20)
        return x + batch

    fast = graphed(f)
    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        with torch.no_grad():
            for i in range(12):
                x = rand(50 + i, 4)
                got = fast(x)
                assert_same(got, x + rand(taken["number"], 4))
    finally:
        over.set()
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


def numbers_of_a_generator() -> Iterator[int]:
    yield from itertools.count()


def test_a_gradient_from_an_iterator(device: torch.device, rand: Rand) -> None:
    """No operation of the backward reads it."""
    items = (torch.full((4,), float(i), device=device) for i in range(80))
    batches = iter(list(items))

    class Replaced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return next(batches)

    fast = graphed(lambda x: Replaced.apply(x) * 2)
    found: list[float] = []
    for i in range(8):
        x = rand(i, 4).requires_grad_()
        fast(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad[0].item())
    assert found == sorted(set(found))  # a rehearsal takes items, too


PLAIN: dict[str, Callable[[], Callable[[], object]]] = {
    "counter": lambda: itertools.count().__next__,
    "iterator": lambda: iter(range(20)).__next__,
    "generator": lambda: numbers_of_a_generator().__next__,
    "cycle": lambda: itertools.cycle([0, 1, 2]).__next__,
    "clock": lambda: time.perf_counter_ns,
}


def moves_on(kind: str, rand: Rand, call: Callable[[Tensor], tuple[Tensor, object]]) -> None:
    """A call of x gives `x + 1`, and the next value."""
    values = list[object]()
    with torch.no_grad():
        for i in range(10):
            y, value = call(rand(i, 4))
            assert_same(y, rand(i, 4) + 1)
            values.append(value)
    if kind == "clock":
        assert len(set(values)) == len(values)
    else:
        eagers = PLAIN[kind]()
        assert values == [eagers() for _ in values]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_value_beside_a_tensor(kind: str, rand: Rand) -> None:
    """A training step that returns its loss with the time, or with the number of the batch."""
    ours = PLAIN[kind]()
    fast = graphed(lambda x: {"loss": x + 1, "value": ours()})
    moves_on(kind, rand, lambda x: tuple(fast(x).values()))


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_value_that_is_only_stored(kind: str, rand: Rand) -> None:
    """A module that notes the time of its last call, or the number of the batch."""
    ours, kept = PLAIN[kind](), dict[str, Any]()

    def f(x: Tensor) -> Tensor:
        kept["last"] = ours()
        return x + 1

    fast = ol.graph(f, on_refusal="eager")
    moves_on(kind, rand, lambda x: (fast(x), kept["last"]))


def test_a_value_of_an_object_that_the_call_makes(rand: Rand) -> None:
    class Result:
        def __init__(self, loss: Tensor, step: int) -> None:
            self.loss, self.step = loss, step

    ticks = itertools.count()
    fast = graphed(lambda x: Result(x + 1, next(ticks)))
    with torch.no_grad():
        for i in range(8):
            got = fast(rand(i, 4))
            assert_same(got.loss, rand(i, 4) + 1)
            assert got.step == i


def test_a_plain_value_that_changes_is_named(rand: Rand) -> None:
    ticks = itertools.count()
    fast = ol.graph(lambda x: (x + 1, {"step": next(ticks)}), warmup=1)

    def calls() -> None:
        for i in range(6):
            fast(rand(i, 4))

    named = r"OL117.*`result\[1\]\['step'\]`"
    with torch.no_grad(), pytest.raises(ol.CaptureError, match=named):
        calls()


def test_plain_values_that_follow_from_the_call_are_replayed(rand: Rand) -> None:
    """The size, a number of the state, a number that the call moves on."""

    class State:
        scale, count = 2.0, 0

    state = State()

    def f(x: Tensor) -> tuple[Tensor, int, float, int]:
        state.count += 1
        return x * state.scale, x.shape[0], state.scale, state.count

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(16):
            if i == 8:
                state.scale = 3.0
            x = rand(i, 4 + i % 2)
            y, size, scale, count = fast(x)
            assert_same(y, x * state.scale)
            assert (size, scale, count) == (4 + i % 2, state.scale, i + 1)
