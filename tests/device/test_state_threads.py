"""State that each thread has for itself: thread-local objects, and the thread as a fact."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

Workers = list[ThreadPoolExecutor]


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Three threads that go on from call to call."""
    new = functools.partial(torch.set_grad_enabled, False)
    made = [ThreadPoolExecutor(1, initializer=new) for _ in range(3)]
    yield made
    for worker in made:
        worker.shutdown()


class Settings(threading.local):
    scale = 4.0

    def __init__(self) -> None:
        self.other = 1.0


class Box:
    def __init__(self, scale: float) -> None:
        self.scale = scale


READS: dict[str, Callable[[Any], float]] = {
    "attribute": lambda local: local.scale,
    "getattr": lambda local: getattr(local, "scale", 3.0),
    "hasattr": lambda local: 2.0 if hasattr(local, "late") else 3.0,
    "vars": lambda local: vars(local)["scale"],
    "all values": lambda local: sum(vars(local).values()),
    "length": lambda local: len(vars(local)),
}


def put(local: Any, name: str, value: object) -> None:
    setattr(local, name, value)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", [threading.local, Settings])
def test_a_setting_of_the_thread_that_calls(
    device: torch.device, rand: Rand, workers: Workers, kind: Any, read: str
) -> None:
    """The first call is another thread's, whose settings stay."""
    local, of = kind(), READS[read]
    fast = ol.graph(lambda x: x * of(local))

    def call(i: int) -> None:
        assert_same(fast(rand(i, 3)), rand(i, 3) * of(local))

    first, second, _ = workers
    for worker in (first, second):
        worker.submit(put, local, "scale", 1.0).result()
    first.submit(call, 0).result()
    for i in range(4):
        second.submit(call, i).result()
    assert replays(fast) > 0
    second.submit(put, local, "scale", 5.0).result()
    second.submit(call, 0).result()
    second.submit(put, local, "late", 5.0).result()
    for i in range(4):
        second.submit(call, i).result()
        first.submit(call, i).result()


def test_an_object_behind_a_setting(device: torch.device, rand: Rand, workers: Workers) -> None:
    local: Any = threading.local()
    fast = ol.graph(lambda x: x * local.box.scale)
    boxes = [Box(float(k)) for k in range(2)]
    for worker, box in zip(workers, boxes, strict=False):
        worker.submit(put, local, "box", box).result()
    for change in (1.0, 3.0):
        for i in range(5):
            for worker, box in zip(workers, boxes, strict=False):
                assert_same(worker.submit(fast, rand(i, 3)).result(), rand(i, 3) * box.scale)
        assert replays(fast) > 0
        boxes[1].scale += change


def test_a_setting_that_calls_store(device: torch.device, rand: Rand, workers: Workers) -> None:
    local: Any = threading.local()

    def f(x: Tensor) -> Tensor:
        local.calls += 1
        local.last = x * 2
        return local.last + 1

    fast = ol.graph(f)

    def calls(start: int) -> None:
        local.calls = start
        for i in range(5):
            assert_same(fast(rand(i, 3)), rand(i, 3) * 2 + 1)
            assert local.calls == start + i + 1
            assert_same(local.last, rand(i, 3) * 2)

    for k, worker in enumerate(workers):
        worker.submit(calls, 10 * k).result()
    assert replays(fast) > 0


IN_TURN = pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "one by one"])


def order(in_turn: bool) -> list[int]:
    return [0, 1, 2] * 12 if in_turn else [0] * 5 + [1] * 5 + [2] * 5 + [0]


@IN_TURN
def test_each_setting_has_its_recording(
    device: torch.device, rand: Rand, workers: Workers, in_turn: bool
) -> None:
    local: Any = threading.local()
    fast = ol.graph(lambda x: x * local.scale)
    for k, worker in enumerate(workers):
        worker.submit(put, local, "scale", float(k % 2)).result()
    for i, k in enumerate(order(in_turn)):
        assert_same(workers[k].submit(fast, rand(i, 3)).result(), rand(i, 3) * (k % 2))
    assert len(fast.recordings) == 2
    assert all(recording.replays > 0 for recording in fast.recordings)


ASKED: dict[str, Callable[[], object]] = {
    "get_ident": lambda: threading.get_ident(),
    "get_native_id": lambda: threading.get_native_id(),
    "current_thread": lambda: threading.current_thread(),
    "name": lambda: threading.current_thread().name,
}


@IN_TURN
@pytest.mark.parametrize("name", ASKED)
def test_the_thread_that_calls(
    device: torch.device, rand: Rand, workers: Workers, name: str, in_turn: bool
) -> None:
    """As a key of what each thread keeps."""
    asked = ASKED[name]
    scales = {worker.submit(asked).result(): float(k) for k, worker in enumerate(workers)}
    fast = ol.graph(lambda x: x * scales[asked()])
    for i, k in enumerate(order(in_turn)):
        assert_same(workers[k].submit(fast, rand(i, 3)).result(), rand(i, 3) * k)
    assert len(fast.recordings) == 3
    assert all(recording.replays > 0 for recording in fast.recordings)


def test_a_thread_that_is_not_asked_for(device: torch.device, rand: Rand, workers: Workers) -> None:
    fast = ol.graph(lambda x: x * 2)
    for i in range(9):
        assert_same(workers[i % 3].submit(fast, rand(i, 3)).result(), rand(i, 3) * 2)
    assert len(fast.recordings) == 1
