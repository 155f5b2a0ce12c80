"""Table of concurrency: shared pools, resets, and memory that comes back."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch import gc_pause

from .drop_in import Rand, alike, allocated, assert_same, drop_in, replays


def test_recordings_of_one_pool_in_turn(rand: Rand) -> None:
    """They share memory, so each must finish with it before the next begins."""
    pool = ol.Pool()
    first = ol.graph(lambda x: (x * 2).sum(0) + x, warmup=1, pool=pool)
    second = ol.graph(lambda x: (x * 3).sum(0) - x, warmup=1, pool=pool)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for i in range(10):
            x = rand(i, 4, 4 + i % 2)
            kept.append((first(x), (x * 2).sum(0) + x))
            kept.append((second(x), (x * 3).sum(0) - x))
    for got, expected in kept:
        assert_same(got, expected)
    assert replays(first) >= 6
    assert replays(second) >= 6
    assert pool.memory_bytes > 0


def test_a_chain_of_recordings_in_one_pool(rand: Rand) -> None:
    """The output of one is the input of the next; fresh outputs are the caller's own memory."""
    pool = ol.Pool()
    two, three, five = (ol.graph(lambda x, k=k: x * k + 1, warmup=1, pool=pool) for k in (2, 3, 5))
    chain = lambda x: ((x * 2 + 1) * 3 + 1) * 5 + 1  # noqa: E731
    alike(lambda x: five(three(two(x))), chain, rand, 8, calls=6)


def test_static_outputs_of_one_fed_to_another_in_the_same_pool(rand: Rand) -> None:
    pool = ol.Pool()
    first = ol.graph(lambda x: x * 2, warmup=1, pool=pool, outputs="static")
    second = ol.graph(lambda x: x + 1, warmup=1, pool=pool, outputs="static")
    alike(lambda x: second(first(x)), lambda x: x * 2 + 1, rand, 8, calls=6)


def test_resetting_one_recording_leaves_the_others(rand: Rand) -> None:
    pool = ol.Pool()
    weight = rand(9, 8, 8)
    fast = [ol.graph(lambda x, k=k: (x @ weight) * k, warmup=1, pool=pool) for k in range(1, 5)]
    with torch.no_grad():
        for i in range(3):
            for k, f in enumerate(fast, 1):
                assert_same(f(rand(i, 3, 8)), (rand(i, 3, 8) @ weight) * k)
        before = [f(rand(7, 3, 8)) for f in fast]
        for gone in range(4):
            fast[gone].reset()
            assert len(fast[gone].recordings) == 0
            for k in range(gone + 1, 4):
                assert_same(fast[k](rand(7, 3, 8)), before[k])
            # New captures take the freed memory.
            again = ol.graph(lambda x: (x @ weight).relu().sum(), warmup=1, pool=pool)
            for i in range(3):
                again(rand(i, 16, 8))
            for k in range(gone + 1, 4):
                assert_same(fast[k](rand(7, 3, 8)), before[k])
        for k, y in enumerate(before, 1):
            assert_same(y, (rand(7, 3, 8) @ weight) * k)


def test_reset_and_record_again(rand: Rand) -> None:
    fast = drop_in(lambda x: x * 2, lambda i: (rand(i, 4),))
    kept = None
    with torch.no_grad():
        for _ in range(3):
            kept = fast(rand(0, 4))
            fast.reset()
            fast.reset()
            assert len(fast.recordings) == 0
            assert fast.memory_bytes == 0
            alike(fast, lambda x: x * 2, rand, 4, calls=4)
            assert len(fast.recordings) == 1
    assert kept is not None
    assert_same(kept, rand(0, 4) * 2)


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_outputs_outlive_their_recording(
    device: torch.device, rand: Rand, outputs: Literal["fresh", "static"]
) -> None:
    fast = ol.graph(lambda x: (x * 2, x.sum() * 3), warmup=1, outputs=outputs)
    with torch.no_grad():
        kept = [fast(rand(i, 64)) for i in range(6)]
        fast.reset()
        del fast
        gc.collect()
        for _ in range(8):
            torch.full((64,), float("nan"), device=device)
        for i in range(0 if outputs == "fresh" else 5, 6):
            assert_same(kept[i], (rand(i, 64) * 2, rand(i, 64).sum() * 3))


@pytest.mark.thorough
def test_memory_is_back_after_reset(device: torch.device, rand: Rand) -> None:
    def cycle(shared: bool) -> None:
        pool = ol.Pool() if shared else None
        weight = rand(9, 16, 16)
        fast = ol.graph(lambda x: (x @ weight).relu(), warmup=1, pool=pool)
        with torch.no_grad():
            for n in (8, 16, 32):
                for i in range(3):
                    fast(rand(i, n, 16))
        assert fast.memory_bytes > 0
        assert all(r.pool_bytes >= 0 for r in fast.recordings)
        fast.reset()
        assert fast.memory_bytes == 0

    cycle(False)
    cycle(True)
    start = allocated(device)
    for shared in (False, True, False, True):
        cycle(shared)
    assert allocated(device) == start


@pytest.mark.thorough
def test_memory_is_back_when_the_callable_is_gone(device: torch.device, rand: Rand) -> None:
    def cycle() -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(device)
        fast = ol.graph(model, warmup=1)
        with torch.no_grad():
            for i in range(4):
                fast(rand(i, 8, 16))
        assert replays(fast) > 0

    cycle()
    start = allocated(device)
    for _ in range(4):
        cycle()
    assert allocated(device) == start


@pytest.mark.thorough
def test_calls_do_not_accumulate_memory(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x, y: (x.mul_(2) + y, y[1:]), warmup=1)
    with torch.no_grad():
        for i in range(4):
            fast(rand(i, 64), rand(i, 64))
        start = allocated(device)
        for i in range(50):
            fast(rand(i, 64), rand(i, 64))
    assert allocated(device) == start


@pytest.mark.thorough
def test_arguments_and_results_are_not_kept_alive(rand: Rand) -> None:
    fast = ol.graph(lambda x: {"y": x * 2}, warmup=1)
    with torch.no_grad():
        for i in range(6):
            x = rand(i, 8)
            y = fast(x)["y"]
            refs = weakref.ref(x), weakref.ref(y)
            del x, y
            gc.collect()
            assert refs[0]() is None, f"call {i} keeps its argument"
            assert refs[1]() is None, f"call {i} keeps its result"


def test_a_dropped_model_is_freed(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 4, device=device)
    ref = weakref.ref(model)
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(4):
            fast(rand(i, 3, 4))
    del model, fast
    gc.collect()
    assert ref() is None


def test_a_dropped_step_is_freed(device: torch.device, rand: Rand) -> None:
    """A thread of the engine keeps nothing of it."""
    model = nn.Linear(4, 4, device=device)
    ref = weakref.ref(model)
    scope: dict[str, Any] = {"model": model}  # the globals of the step
    source = "def step(x):\n    model(x).square().mean().backward()"
    exec(compile(source, "<a step>", "exec", dont_inherit=True), scope)
    fast = ol.graph(scope["step"], warmup=1)
    for i in range(4):
        fast(rand(i, 3, 4))
    assert replays(fast) == 3
    del model, fast, scope
    gc.collect()
    assert ref() is None


@pytest.mark.thorough
def test_what_many_captures_leave_is_collected(rand: Rand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes all garbage old, and old garbage is rarely collected."""
    monkeypatch.setattr(gc_pause, "MOST_FREEZES", 8)
    models: list[weakref.ref[nn.Module]] = []
    gc.unfreeze()  # what the tests' process froze; captures freeze nothing then
    gc.collect()
    for i in range(100):
        model = nn.Sequential(nn.ReLU())
        model.me = [model]  # only the collector frees it
        models.append(weakref.ref(model))
        fast = ol.graph(model, warmup=1)
        with torch.no_grad():
            for _ in range(2):
                fast(rand(i, 3))
    assert sum(ref() is not None for ref in models) < 80


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_a_thread_that_takes_the_memory_it_had_before(rand: Rand) -> None:
    """What a capture reads of it was computed from stand-ins, though older memory lay there."""
    asked, answered = queue.Queue[Any](), queue.Queue[Any]()
    first = rand(99, 3)

    def serve() -> None:
        last = [first * 1]
        while (x := asked.get()) is not None:
            last.clear()
            last.append(x * 3)
            answered.put(last[0])

    def f(x: Tensor) -> Tensor:
        asked.put(x)
        return answered.get(timeout=20) + 1

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        alike(fast, lambda x: x * 3 + 1, rand, 3, calls=8)
    finally:
        asked.put(None)
        thread.join(timeout=20)
    assert not thread.is_alive()  # a rollback has not taken it out of those that wait
