"""Pools: shared memory, budgets, eviction, and what `stats` says of it all."""

from __future__ import annotations

import copy
import functools
import gc
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.driver.select import select
from onelaunch.runtime import patience

from .drop_in import Rand, Runs, allocated, assert_same, in_threads, on_accelerators, on_cpu


def calls(fast: Any, x: Tensor, expected: Tensor, times: int = 1) -> None:
    for _ in range(times):
        assert_same(fast(x).clone(), expected)


def scaled(k: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * k


def static(pool: ol.Pool, count: int, **options: Any) -> list[Any]:
    """Callables that multiply by 0, 1, ..., with a recording that keeps its result for each."""
    return [ol.graph(scaled(k), pool=pool, outputs="static", **options) for k in range(count)]


def budget_for_two(x: Tensor) -> int:
    """Room for two recordings that keep a result like `x`, and not for three."""
    pool = ol.Pool()
    found: list[int] = []
    for fast in static(pool, 3, warmup=1):
        fast.capture(x)
        found.append(pool.memory_bytes)
    assert found[1] < found[2]
    return (found[1] + found[2]) // 2


def evict_all(pool: ol.Pool) -> None:
    """As where another recording needs all the room that there is."""
    pool._manager._evict_until(bool)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def x(device: torch.device, rand: Rand) -> Tensor:
    """As large as it takes for the allocator to give it a segment of its own."""
    return rand(0, 1 << (22 if device.type == "cuda" else 19))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was evicted is captured again at once, however often."""
    monkeypatch.setattr(patience, "_COST", 0)


# Sharing.


@on_accelerators
def test_smaller_recordings_take_no_memory(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    weight = rand(9, 256, 256)
    fast = ol.graph(lambda x: (x @ weight).relu() @ weight, pool=pool, warmup=1)
    fast.capture(rand(0, 4096, 256))
    largest = pool.memory_bytes
    assert largest >= 4096 * 256 * 4 * 2
    for rows in (2048, 512, 64, 1):
        fast.capture(rand(0, rows, 256))
    # The allocator keeps tensors of up to 1 MiB apart from larger ones, in segments of 2 MiB.
    assert pool.memory_bytes <= largest + (4 << 20)
    assert pool.stats().kept_bytes == 0
    assert [r.pool_bytes >= 8 << 20 for r in fast.stats().recordings] == [False] * 4 + [True]
    for rows in (1, 4096, 512):
        x = rand(rows, rows, 256)
        assert_same(fast(x), (x @ weight).relu() @ weight)


@pytest.mark.cpu
@on_accelerators
def test_a_recording_keeps_nothing_of_the_pool(device: torch.device, rand: Rand) -> None:
    """Not the inputs, however they travel, nor what a slot is rebound to."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.zeros(64, device=device)

        def forward(self, x: Tensor, sparse: Tensor, scale: Tensor) -> Tensor:
            self.last = self.last + x[0] * scale
            return x * scale + sparse.sum() + self.last

    pool = ol.Pool()
    fast = ol.graph(Remembers(), pool=pool, warmup=1)
    eager = Remembers()
    for i in range(5):
        args = rand(i, 8, 64), rand(i, 64, 1024)[:, :8], torch.tensor(float(i))
        assert_same(fast(*args), eager(*args))
    (recording,) = fast.recordings
    assert set(recording.inputs.values()) == {"node", "copy", "fill"}
    assert recording.replays == 4
    if device.type == "tape":
        (part,) = pool._manager._pools.values()
        assert part.arena.allocated_bytes == 0
    else:
        assert active_bytes(pool) == 0


def active_bytes(pool: ol.Pool) -> int:
    """What is allocated in a pool on a GPU."""
    (part,) = pool._manager._pools.values()
    return sum(
        s["active_size"]
        for s in torch.cuda.memory_snapshot()
        if tuple(s["segment_pool_id"]) == part._id
    )


@on_accelerators
def test_static_results_are_kept(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    fast: Any = ol.graph(lambda x: (x + 1, x * 2), pool=pool, warmup=1, outputs="static")
    fast.capture(rand(0, 1 << 20))
    assert fast.stats().kept_bytes == 2 * 4 << 20
    assert pool.stats().kept_bytes == fast.stats().recordings[0].kept_bytes
    fast.reset()
    assert pool.stats().kept_bytes == 0
    assert pool.memory_bytes == 0


def test_a_copy_of_its_users_shares_it() -> None:
    """Lightning copies the options of `torch.compile`."""
    pool = ol.Pool()
    assert copy.deepcopy({"pool": pool})["pool"] is copy.copy(pool) is pool


# Budgets.


def test_the_least_recently_used_goes(device: torch.device, rand: Rand, x: Tensor) -> None:
    pool = ol.Pool(max_bytes=budget_for_two(x))
    fast = static(pool, 3, warmup=1)
    calls(fast[0], x, x * 0, 3)
    calls(fast[1], x, x * 1, 9)
    calls(fast[0], x, x * 0)  # used less often, but later
    calls(fast[2], x, x * 2, 3)
    assert [len(f.recordings) for f in fast] == [1, 0, 1]
    assert [f.stats().evictions for f in fast] == [0, 1, 0]
    assert pool.stats().evictions == 1
    assert 0 < pool.memory_bytes <= (pool.max_bytes or 0)
    for k in (0, 2):
        calls(fast[k], x, x * k, 2)


def test_it_comes_back_without_a_warmup(device: torch.device, rand: Rand, x: Tensor) -> None:
    ran = [Runs(), Runs(), Runs()]

    def counted(k: int) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            ran[k].add()
            return x * k

        return f

    pool = ol.Pool(max_bytes=budget_for_two(x))
    fast = [ol.graph(counted(k), pool=pool, warmup=2, outputs="static") for k in range(3)]
    for k in range(3):
        calls(fast[k], x, x * k, 5)
    assert [one.count for one in ran] == [3, 3, 3]
    assert len(fast[0].recordings) == 0
    calls(fast[0], x, x * 0, 4)
    assert [one.count for one in ran] == [4, 3, 3]
    (recording,) = fast[0].recordings
    assert recording.why == "evicted"
    assert recording.replays == 7  # those before the eviction count
    found = fast[0].stats()
    assert (found.captures, found.evictions, found.replays) == (2, 1, 7)
    assert (found.warmup_calls, found.eager_calls) == (2, 0)


def test_one_captured_ahead_comes_back_without_a_warmup(
    device: torch.device, rand: Rand, x: Tensor
) -> None:
    pool = ol.Pool(max_bytes=budget_for_two(x))
    fast = static(pool, 3)
    for f in fast:
        f.capture(x)
    assert [len(f.recordings) for f in fast] == [0, 1, 1]
    calls(fast[0], x, x * 0, 2)
    assert fast[0].stats().replays == 2
    assert pool.stats().warmup_calls == 0
    assert [len(f.recordings) for f in fast] == [1, 0, 1]


def pointwise(x: Tensor) -> Tensor:
    return ((x + 1) * 2).relu() + x


def budget_for(x: Tensor, **options: Any) -> int:
    """Return what a recording of `pointwise` takes alone."""
    alone = ol.Pool()
    fast = ol.graph(pointwise, pool=alone, **options)
    fast.capture(x)
    return alone.memory_bytes


@on_accelerators
def test_launches_count_on_where_the_pool_is_begun_anew(device: torch.device, rand: Rand) -> None:
    """A recording that fits only into an empty pool is captured twice."""
    top = 22 if device.type == "cuda" else 20
    small, large = rand(0, 1 << (top - 3)), rand(0, 1 << top)
    pool = ol.Pool(max_bytes=budget_for(large) + (1 << 20))
    fast = ol.graph(pointwise, pool=pool, warmup=1)
    for i in range(4):
        calls(fast, small, pointwise(small), 2)
        calls(fast, large, pointwise(large), 2)
        stats = fast.stats()
        assert stats.replays + stats.warmup_calls + stats.eager_calls == 4 * (i + 1)
    assert len(fast.recordings) == 2
    assert fast.stats().evictions >= 1


def test_evictions_are_those_of_a_model(
    device: torch.device, rand: Rand, x: Tensor, at_once: None
) -> None:
    """Random calls of six recordings with room for two, against a list in order of use."""
    dice = random.Random(0)
    pool = ol.Pool(max_bytes=budget_for_two(x))
    fast = static(pool, 6, warmup=1)
    for k in range(6):
        calls(fast[k], x, x * k)
    used: list[int] = []
    for _ in range(60):
        k = dice.randrange(6)
        calls(fast[k], x, x * k)
        used = [*(j for j in used if j != k), k][-2:]
        assert [j for j in range(6) if fast[j].recordings] == sorted(used)
        assert pool.memory_bytes <= (pool.max_bytes or 0)


def test_eviction_leaves_the_others_as_they_are(
    device: torch.device, rand: Rand, x: Tensor
) -> None:
    """Bit for bit, while new captures take the memory that was freed."""
    pool = ol.Pool(max_bytes=budget_for_two(x))
    weight, small = rand(1, 64, 64), rand(2, 64, 64)
    # No product of matrices: cuBLAS takes 32 MiB for itself, which is more than this budget.
    kept: Any = ol.graph(lambda x: (x * weight).tanh().sum(1), pool=pool, warmup=1)
    expected = (small * weight).tanh().sum(1)
    calls(kept, small, expected, 3)
    others = static(pool, 8, warmup=1)
    for k, other in enumerate(others):
        calls(other, x, x * k, 3)
        calls(kept, small, expected)
    assert kept.stats().evictions == 0
    assert pool.stats().evictions >= 5
    for other in others:
        other.reset()
        calls(kept, small, expected)


@on_accelerators
def test_what_cannot_fit_is_not_captured(device: torch.device, rand: Rand, x: Tensor) -> None:
    pool = ol.Pool(max_bytes=2 * x.nbytes)
    ran, of_small = Runs(), Runs()

    def f(x: Tensor) -> Tensor:
        (of_small if x.numel() == 1 << 10 else ran).add()
        return (x * 2).exp() + x

    fast = ol.graph(f, pool=pool, warmup=1)
    small = rand(0, 1 << 10)
    calls(fast, small, (small * 2).exp() + small, 3)
    calls(fast, x, (x * 2).exp() + x)
    said = r"OL304\] this signature runs eagerly: `f`, called with float32.*: \d+ bytes are.* "
    said += f"max_bytes={pool.max_bytes}"
    with pytest.warns(ol.GraphWarning, match=said):
        calls(fast, x, (x * 2).exp() + x)
    calls(fast, x, (x * 2).exp() + x)
    assert ran.count == 3  # and no fourth time, for a capture
    assert len(fast.recordings) == 1
    assert fast.stats().evictions == 0
    assert fast.stats().eager_calls == 2
    ahead = ol.graph(lambda x: (x * 2).exp() + x, pool=pool, warmup=1)
    with pytest.raises(ol.CaptureError, match="OL304"):
        ahead.capture(x)
    assert ahead.stats().captures == 0
    assert pool.stats().eager_calls == 2
    assert len(pool.stats().callables) == 2


def test_a_forward_that_waits_for_its_backward_stays(
    device: torch.device, rand: Rand, x: Tensor
) -> None:
    """What it saved is still to be read; afterwards it goes as any other."""
    eager = nn.Linear(8, 8, device=device)
    model = copy.deepcopy(eager)
    ample = ol.Pool()
    trained: Any = ol.graph(lambda x: model(x).tanh(), pool=ample, warmup=1)
    for i in range(4):
        with torch.enable_grad():
            trained(rand(i, 4, 8)).square().sum().backward()
    model.zero_grad()
    pool = ol.Pool(max_bytes=budget_for_two(x) + ample.memory_bytes)
    fast: Any = ol.graph(lambda x: model(x).tanh(), pool=pool, warmup=1)
    others = static(pool, 4, warmup=1)

    def step(i: int, between: Callable[[], None]) -> None:
        with torch.enable_grad():
            loss = fast(rand(i, 4, 8)).square().sum()
            between()
            loss.backward()
            eager(rand(i, 4, 8)).tanh().square().sum().backward()
        assert_same(model.weight.grad, eager.weight.grad)
        assert_same(model.bias.grad, eager.bias.grad)

    def crowd() -> None:
        with torch.no_grad():
            for k, other in enumerate(others):
                calls(other, x, x * k, 2)

    for i in range(6):
        step(i, lambda: None)
    assert len(fast.recordings) == 1
    step(6, crowd)
    assert len(fast.recordings) == 1
    assert fast.stats().evictions == 0
    crowd()
    assert fast.stats().evictions == 1
    for i in range(7, 10):
        step(i, crowd)


def test_a_recording_waits_for_room_that_a_forward_takes_up(
    device: torch.device, rand: Rand, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs eagerly till then, without a warning, and not for good."""
    monkeypatch.setattr(patience, "_COST", 3)
    weight = torch.ones_like(x, requires_grad=True)
    ample = ol.Pool()
    for outer in (ample, None):
        pool = outer or ol.Pool(max_bytes=ample.memory_bytes + x.nbytes // 2)
        fast: Any = ol.graph(lambda x: (x * weight).tanh(), pool=pool, warmup=1)
        for _ in range(4):
            with torch.enable_grad():
                loss = fast(x).sum()
                loss.backward()
        del loss
    with torch.enable_grad():
        waiting = fast(x)
    other: Any = ol.graph(lambda x: x * 3 + 1, pool=pool, warmup=1)
    for _ in range(4):
        calls(other, x, x * 3 + 1)
    assert len(other.recordings) == 0
    assert len(fast.recordings) == 1
    waiting.backward(torch.ones_like(waiting))
    del waiting
    for _ in range(4):
        calls(other, x, x * 3 + 1)
    assert len(other.recordings) == 1
    assert pool.memory_bytes <= (pool.max_bytes or 0)


@on_accelerators
def test_gaps_between_recordings_are_closed(device: torch.device, rand: Rand) -> None:
    """Smallest first, each takes new memory, until the pool is emptied and begun with a large one.

    The budget has room for all of them, but only if they share."""
    top = 23 if device.type == "cuda" else 21
    sizes = [1 << n for n in range(top - 7, top)]
    ample = ol.Pool()
    loose = ol.graph(pointwise, pool=ample, warmup=1)
    for n in sizes:
        loose.capture(rand(0, n))
    budget = int(budget_for(rand(0, sizes[-1])) * 1.1)
    assert ample.memory_bytes > budget

    pool = ol.Pool(max_bytes=budget)
    fast = ol.graph(pointwise, pool=pool, warmup=1)
    inputs = [rand(n, n) for n in sizes]
    for _ in range(4):
        for x in inputs:
            calls(fast, x, pointwise(x), 2)
            assert pool.memory_bytes <= budget
    assert len(fast.recordings) == len(sizes)
    found = fast.stats()
    assert 0 < found.evictions <= 2 * len(sizes)
    assert found.eager_calls == 0


@pytest.mark.cpu
def test_buckets_under_a_budget(device: torch.device, rand: Rand) -> None:
    """Sizes of all buckets in turn, where the pool has room for some."""
    width = 1 << (20 if device.type == "cuda" else 18)
    buckets = ol.Buckets(dim=0, sizes=(1, 2, 4, 8))
    pool = ol.Pool(max_bytes=budget_for(rand(0, 8, width), buckets=buckets) * 11 // 10)
    fast: Any = ol.graph(pointwise, pool=pool, warmup=1, buckets=buckets)
    inputs = [rand(n, n, width) for n in range(1, 9)]
    for _ in range(4):
        for x in inputs:
            calls(fast, x, pointwise(x))
            assert pool.memory_bytes <= (pool.max_bytes or 0)
    found = fast.stats()
    assert found.evictions > 0
    assert found.sizes == dict.fromkeys(range(1, 9), 4)
    if device.type != "cpu":  # where recordings share, there is room for all in the end
        assert len(fast.recordings) == 4


def test_recordings_that_take_turns_run_eagerly_in_between(
    device: torch.device, rand: Rand, x: Tensor
) -> None:
    """Else each call would be a capture, many times the cost of an eager call."""
    pool = ol.Pool(max_bytes=budget_for_two(x))
    fast = static(pool, 4, warmup=1)
    expected = [x * k for k in range(4)]
    for _ in range(24):
        for k in range(4):
            calls(fast[k], x, expected[k])
    found = pool.stats()
    assert found.captures < 40
    assert found.eager_calls > 24
    assert found.evictions == found.captures - len(found.recordings)


def test_a_budget_is_kept_among_threads(
    device: torch.device, rand: Rand, x: Tensor, at_once: None
) -> None:
    pool = ol.Pool(max_bytes=budget_for_two(x))
    shared: Any = ol.graph(lambda x, k: x * k, pool=pool, warmup=1)

    def work(mine: int) -> None:
        with torch.no_grad():
            own: Any = ol.graph(scaled(mine), pool=pool, warmup=1)
            dice = random.Random(mine)
            for i in range(12):
                calls(own, x, x * mine)
                k = float(dice.randrange(4))
                calls(lambda x, k=k: shared(x, k), x, x * k)
                if i == 6:
                    own.reset()

    in_threads(*(functools.partial(work, k) for k in range(3)))
    assert pool.memory_bytes <= (pool.max_bytes or 0)


@pytest.mark.thorough
def test_nothing_grows_while_recordings_come_and_go(
    device: torch.device, rand: Rand, x: Tensor, at_once: None
) -> None:
    pool = ol.Pool(max_bytes=budget_for_two(x))
    fast = static(pool, 4, warmup=1)

    def turn() -> tuple[int, int]:
        for k in range(4):
            calls(fast[k], x, x * k, 2)
        return allocated(device), pool.memory_bytes

    turn()
    turn()
    start = turn()
    for _ in range(5):
        assert turn() == start
    assert pool.stats().evictions >= 20


# What is told.


def test_stats(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    fast = ol.graph(lambda x: x * 2, pool=pool, warmup=2, max_recordings=2)
    model = ol.graph(nn.Linear(4, 4, device=device), pool=pool, warmup=1)
    assert fast.stats().recordings == pool.stats().callables == ()
    for i in range(5):
        fast(rand(i, 3))
        fast(rand(i, 4))
        model(rand(i, 2, 4))
    with pytest.warns(ol.GraphWarning, match="OL301"):
        fast(rand(0, 5)), fast(rand(1, 5)), fast(rand(2, 5))
    for i in range(2):
        fast(rand(i, 5))
    found = fast.stats()
    assert [r.spec for r in found.recordings] == [r.spec for r in fast.recordings]
    assert [r.replays for r in found.recordings] == [3, 3]
    assert (found.captures, found.replays, found.evictions) == (2, 6, 0)
    assert (found.warmup_calls, found.eager_calls) == (6, 3)
    assert found.capture_seconds == sum(r.capture_seconds for r in fast.recordings) > 0
    assert found.sizes == {}
    assert found.padding == 0.0
    both = pool.stats()
    assert both.memory_bytes == pool.memory_bytes == fast.memory_bytes
    assert both.replays == 6 + 4
    assert {r.callable for r in both.recordings} == {"<lambda>", "Linear"}
    assert both.captures == 3
    with pytest.raises(AttributeError):
        found.replays = 7  # pyright: ignore[reportAttributeAccessIssue]
    fast.reset()
    assert fast.stats().replays == fast.stats().captures == 0
    assert pool.stats().captures == 1
    del model
    assert len(pool.stats().callables) <= 2


def test_a_pool_keeps_no_callable_alive(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()

    def used() -> None:
        fast = ol.graph(lambda x: x * 2, pool=pool, warmup=1)
        for i in range(3):
            fast(rand(i, 4))
        assert pool.stats().captures == 1

    used()
    allocated(device)  # collects
    assert pool.stats().callables == ()
    assert pool.memory_bytes == 0


# What is kept.


def wide(x: Tensor) -> Tensor:
    """Writes to most of a pool on its way."""
    return torch.stack([x + i for i in range(24)]).sum(0)


def test_gradients_that_a_step_keeps_are_its_own(
    device: torch.device, rand: Rand, x: Tensor
) -> None:
    pool = ol.Pool()
    earlier = ol.graph(wide, pool=pool, warmup=1)
    calls(earlier, x, wide(x), 2)
    weight = torch.ones_like(x, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        loss = (weight * x).square().sum()
        loss.backward()
        return loss.detach()

    fast = ol.graph(step, pool=pool, warmup=1)
    with torch.enable_grad():
        for _ in range(3):
            fast(x)
    assert weight.grad is not None
    assert len(fast.recordings) == 1
    expected = weight.grad.clone()
    calls(earlier, x, wide(x))
    assert_same(weight.grad.clone(), expected)


# What is foreseen.


@on_accelerators
def test_a_part_of_a_large_tensor_needs_what_it_touches(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool(max_bytes=32 << 20)
    whole = rand(0, 16 << 20)
    fast = ol.graph(lambda x: x * 2, pool=pool, warmup=1)
    for i in range(4):
        part = whole[100 * i : 100 * i + 100]
        calls(fast, part, part * 2)
    assert fast.stats().replays == 3


@on_accelerators
def test_a_bucket_that_small_calls_warm_up_fits_as_often_as_it_comes(
    device: torch.device, rand: Rand, at_once: None
) -> None:
    """What a call of one row needs says little of a whole bucket, and nothing of the next time."""
    width = 1 << (20 if device.type == "cuda" else 17)
    buckets = ol.Buckets(0, (16,))
    pool = ol.Pool(max_bytes=budget_for(rand(1, 16, width), buckets=buckets) + (2 << 20))
    fast: Any = ol.graph(pointwise, pool=pool, warmup=1, buckets=buckets)
    row = rand(0, 1, width)
    for i in range(3):
        calls(fast, row, pointwise(row), 2)
        assert len(fast.recordings) == 1
        evict_all(pool)
        assert fast.stats().evictions == i + 1
    assert fast.stats().eager_calls == 0


# What is counted of recordings that go.


def test_launches_of_all_recordings_of_a_signature_count_on(
    device: torch.device, rand: Rand
) -> None:
    """Of two that were in flight at once, too."""
    pool = ol.Pool(max_bytes=1 << 30)
    model = nn.Linear(8, 8, device=device)
    fast: Any = ol.graph(lambda x: model(x).tanh(), pool=pool, warmup=1)
    x = rand(0, 4, 8)

    def both() -> None:
        with torch.enable_grad():
            first, second = fast(x), fast(x)
            (first.sum() + second.sum()).backward()

    for i in range(6):
        both()
        if i in (3, 5):
            assert len(fast.recordings) == 2
            before = fast.stats().replays
            evict_all(pool)
            assert fast.stats().replays == before
    for _ in range(9):
        both()
    found = fast.stats()
    assert found.evictions == 4
    assert found.replays + found.warmup_calls + found.eager_calls == 30


def test_calls_are_counted_where_gradients_come_and_go(device: torch.device, rand: Rand) -> None:
    """Which leaves have one is part of what is known of a signature, and so is an eviction."""
    pool = ol.Pool(max_bytes=1 << 30)
    weight = rand(1, 64).requires_grad_()
    x = rand(0, 64)

    def step(x: Tensor) -> Tensor:
        loss = (weight * x).square().sum()
        loss.backward()
        return loss.detach()

    fast = ol.graph(step, pool=pool, warmup=2)
    with torch.enable_grad():
        for i in range(22):
            fast(x)
            if i < 10:
                weight.grad = (None, torch.zeros_like(x), weight.grad)[i % 3]
            if i in (13, 17):
                warmed = fast.stats().warmup_calls
                assert len(fast.recordings) == 1
                evict_all(pool)
    found = fast.stats()
    assert found.evictions == 2
    assert found.warmup_calls == warmed  # they come back without
    assert found.replays + found.warmup_calls + found.eager_calls == 22


def test_a_backward_counts_as_its_recording_s(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    model = nn.Linear(512, 512, device=device)
    fast: Any = ol.graph(lambda x: model(x).tanh(), pool=pool, warmup=1)
    for i in range(5):
        with torch.enable_grad():
            fast(rand(i, 64, 512)).sum().backward()
        model.zero_grad()
    found = pool.stats()
    assert found.recordings[0].pool_bytes == found.memory_bytes > 0
    assert found.kept_bytes == fast.recordings[0].kept_bytes == found.memory_bytes


def test_a_backward_makes_room_for_itself(device: torch.device, rand: Rand, x: Tensor) -> None:
    """As a forward does: what is least used goes."""
    model = nn.Linear(512, 512, device=device)
    rows = rand(0, 64, 512)

    def train(pool: ol.Pool, calls: int) -> Any:
        fast: Any = ol.graph(lambda x: model(x).tanh(), pool=pool, warmup=1)
        for _ in range(calls):
            with torch.enable_grad():
                fast(rows).sum().backward()
            model.zero_grad()
        return fast

    pools = [ol.Pool(), ol.Pool(), ol.Pool()]
    used = [train(pools[0], 2), train(pools[1], 5)]
    used.append(ol.graph(scaled(2), pool=pools[2], outputs="static"))
    used[2].capture(x)
    forward, both, other = (p.memory_bytes for p in pools)
    assert forward < both
    pool = ol.Pool(max_bytes=other + (forward + both) // 2)
    kept = ol.graph(scaled(2), pool=pool, outputs="static")
    kept.capture(x)
    fast = train(pool, 8)
    assert kept.stats().evictions == 1
    assert fast.stats().evictions == 0
    assert fast.stats().kept_bytes == both
    tight = ol.Pool(max_bytes=(forward + both) // 2)
    with pytest.warns(ol.GraphWarning, match=r"OL304.*the backward runs eagerly"):
        fast = train(tight, 8)
    assert len(fast.recordings) == 1
    assert tight.memory_bytes <= (tight.max_bytes or 0)


@pytest.mark.thorough
def test_streams_of_forwards_are_used_again(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device keeps each for ever: those of captures that fail, and of forwards that save
    nothing for their backward."""
    driver, _ = select([rand(0, 1)])
    monkeypatch.setattr("onelaunch.autograd.chain._spares", {})  # of tests before this one
    made: list[object] = []
    new_stream = type(driver).new_stream

    def counted(self: Any, device: torch.device) -> object:
        made.append(None)
        return new_stream(self, device)

    monkeypatch.setattr(type(driver), "new_stream", counted)
    weight = torch.ones(8, device=device, requires_grad=True)

    def refused(x: Tensor) -> Tensor:
        return x * weight * weight.sum().item()

    x = rand(0, 8)
    with torch.enable_grad():
        for i in range(8):
            bad = ol.graph(refused, warmup=1)
            bad(x)
            with pytest.raises(ol.CaptureError):
                bad(x)
            good = ol.graph(lambda x: x + weight, warmup=1)
            for _ in range(4):
                good(x).sum().backward()
            good.reset()
            del good, bad
            gc.collect()  # an error's traceback holds its frames in a cycle
            if i == 1:
                before = len(made)
    assert len(made) <= before + 1


@pytest.mark.thorough
@on_cpu
def test_figures_are_read_while_recordings_come_and_go(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    interval, done = sys.getswitchinterval(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            pool.stats()

    def work() -> None:
        try:
            many = [ol.graph(scaled(k), pool=pool) for k in range(40)]
            for _ in range(3):
                for fast in many:
                    fast.capture(rand(0, 8))
                for fast in many:
                    fast.reset()
        finally:
            done.set()

    sys.setswitchinterval(1e-6)
    try:
        in_threads(work, watch, watch, watch)
    finally:
        sys.setswitchinterval(interval)


def test_results_held_after_the_last_recording_take_up_no_budget(
    device: torch.device, rand: Rand, x: Tensor
) -> None:
    ample = ol.Pool()
    ahead = ol.graph(scaled(2), pool=ample, outputs="static")
    ahead.capture(x)
    pool = ol.Pool(max_bytes=ample.memory_bytes + (1 << 19))
    first, second = (ol.graph(scaled(k), pool=pool, outputs="static", warmup=1) for k in (2, 3))
    calls(first, x, x * 2, 2)
    held = first(x)
    calls(second, x, x * 3, 3)
    assert second.stats().replays == 2
    assert_same(held.clone(), x * 2)


@on_accelerators
def test_a_capture_that_fails_leaves_the_budget(device: torch.device, rand: Rand) -> None:
    """More than its warm-up, of one row, had shown."""
    width = 1 << (20 if device.type == "cuda" else 17)
    pool = ol.Pool(max_bytes=(96 if device.type == "cuda" else 12) << 20)
    small = ol.graph(lambda x: x + 1, pool=pool, warmup=1)
    row = rand(0, 1, width)
    calls(small, row, row + 1, 2)

    def f(x: Tensor) -> Tensor:
        y = (x * 2).relu() + x.exp() + x
        if capturing():
            raise ValueError("no")
        return y

    capturing = select([row])[0].capturing
    fast: Any = ol.graph(f, pool=pool, warmup=1, buckets=ol.Buckets(0, (16,)))
    fast(row)
    with pytest.raises(ValueError, match="no"):
        fast(row)
    assert pool.memory_bytes <= (pool.max_bytes or 0)
    calls(small, row, row + 1, 2)


@on_accelerators
def test_what_never_fits_does_not_wait_for_room(
    device: torch.device, rand: Rand, x: Tensor
) -> None:
    weight = torch.ones(8, device=device, requires_grad=True)
    pool = ol.Pool(max_bytes=2 * x.nbytes + (4 << 20))
    forward: Any = ol.graph(lambda x: (x * weight).tanh(), pool=pool, warmup=1)
    with torch.enable_grad():
        for i in range(2):
            waiting = forward(rand(i, 8))
    assert len(forward.recordings) == 1
    large = ol.graph(wide, pool=pool, warmup=1)
    calls(large, x, wide(x))
    with pytest.warns(ol.GraphWarning, match="OL304"):
        calls(large, x, wide(x))
    assert waiting.grad_fn is not None
