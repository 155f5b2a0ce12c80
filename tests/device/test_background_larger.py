"""`capture="background"` with buckets: a larger bucket serves until the own one is recorded."""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.driver.select import driver_of
from onelaunch.runtime.worker import _end_all

from .drop_in import Rand, in_threads
from .test_background import held_up, holding


@pytest.fixture(autouse=True)
def ended() -> Generator[None]:
    """Nothing is captured after a test."""
    yield
    _end_all()


def doubled(x: Tensor) -> Tensor:
    return x * 2 + 1


def until(done: Callable[[], bool], call: Callable[[], object] = lambda: None) -> None:
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        call()
        time.sleep(0.002)
    assert done()


def served(fast: Any) -> list[tuple[int, ...]]:
    """Return the buckets that serve smaller ones' calls, too."""
    found = [entry.captured.bucket for entry in fast._table.entries]
    return sorted(bucket.sizes for bucket in found if bucket.below is not None)


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device).eval()


@contextmanager
def blocked(fast: Any) -> Generator[None]:
    """Let nothing be captured meanwhile, as if another capture took long."""
    captures, own = fast._captures, fast._captures.worker._next
    until(lambda: not captures.worker.busy)
    captures.worker._next = lambda: None
    try:
        yield
    finally:
        captures.worker._next = own
        with captures.worker.changed:
            captures.worker.wake()


def close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sizes", [(2, 4, 8), (1, 4, 8)], ids=["2", "1"])
def test_until_its_own_is_there(device: torch.device, rand: Rand, sizes: tuple[int, ...]) -> None:
    net = network(device)
    fast: Any = ol.graph(net, buckets=ol.Buckets(sizes=sizes), capture="background").__graphed__
    with torch.inference_mode():
        until(
            lambda: served(fast) == [(8,)], lambda: close(fast(rand(0, 7, 4)), net(rand(0, 7, 4)))
        )
        before = fast.stats()
        with blocked(fast):
            for seed in range(3):
                for rows in (3, 4, 2):
                    x = rand(seed, rows, 4)
                    close(fast(x), net(x))
        now = fast.stats()
        assert now.larger_calls == 9
        assert now.replays == before.replays + 9
        assert now.warmup_calls == before.warmup_calls
        assert now.eager_reasons == before.eager_reasons
        assert {n: now.sizes[n] for n in (2, 3, 4)} == {2: 3, 3: 3, 4: 3}
        assert now.bucket_rows == before.bucket_rows + 9 * 8
        real = 7 * before.sizes[7] + 3 * (2 + 3 + 4)
        assert math.isclose(now.padding, 1 - real / now.bucket_rows)
        until(lambda: len(fast.recordings) >= 2)
        until(lambda: not fast._captures.worker.busy)
        before = fast.stats()
        for rows in (3, 4):
            close(fast(rand(9, rows, 4)), net(rand(9, rows, 4)))
        assert fast.stats().larger_calls == before.larger_calls
        assert fast.stats().warmup_calls == before.warmup_calls


def test_two_dimensions(device: torch.device, rand: Rand) -> None:
    """The smallest recorded bucket that is as large in every dimension."""
    buckets = ol.Buckets(dim=(0, 1), sizes=((2, 4, 8), (3, 6, 12)))
    fast: Any = ol.graph(doubled, buckets=buckets, capture="background")
    expected = {
        (3, 2): (4, 6),
        (2, 5): (4, 6),
        (3, 8): (8, 12),
        (7, 2): (8, 12),
        (1, 8): (8, 12),
    }
    with torch.no_grad():
        for size in ((4, 6), (8, 12)):
            until(lambda size=size: size in served(fast), lambda size=size: fast(rand(0, *size)))
        with blocked(fast):
            before = set(fast._counts_at_larger)
            for size in expected:
                close(fast(rand(1, *size)), doubled(rand(1, *size)))
        assert {*fast._counts_at_larger} - before == {*expected.items()}


def test_what_is_recorded_replays_during_a_capture(device: torch.device, rand: Rand) -> None:
    """New sizes of a recorded bucket, too: they wait for nothing."""
    inside, go = threading.Lock(), threading.Lock()
    f = holding(inside, go, 8)
    fast: Any = ol.graph(f, buckets=ol.Buckets(sizes=(4, 8)), capture="background")
    with torch.no_grad():
        until(lambda: len(fast.recordings) == 1, lambda: fast(rand(0, 4, 4)))
        with held_up(fast, rand(0, 8, 4), inside, go):
            before = fast.stats()
            for rows in (3, 4, 3, 4):
                close(fast(rand(rows, rows, 4)), f(rand(rows, rows, 4)))
            after = fast.stats()
        assert after.replays == before.replays + 4
        assert after.eager_reasons == before.eager_reasons


def by_size(x: Tensor) -> Tensor:
    return x * 3 if x.shape[0] > 4 else x * 2


def hidden(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask[..., None] == 0, -1e9).amax(1)


def test_a_branch_between_the_sizes(device: torch.device, rand: Rand) -> None:
    fast: Any = ol.graph(by_size, buckets=ol.Buckets(sizes=(4, 8)), capture="background")
    with torch.no_grad():
        until(lambda: len(fast.recordings) == 1, lambda: fast(rand(0, 7, 4)))
        with blocked(fast):
            for seed in range(4):
                close(fast(rand(seed, 3, 4)), by_size(rand(seed, 3, 4)))
        assert fast.stats().larger_calls == 0
        assert fast.stats().eager_reasons["background"] >= 3
        assert fast.stats().sizes[3] == 4
        assert not served(fast)


def test_a_number_that_hides_padding(device: torch.device, rand: Rand) -> None:
    """Each call would check it at its own bucket alone."""
    buckets = ol.Buckets(dim=1, sizes=(4, 8), pad={"mask": 0})
    fast: Any = ol.graph(hidden, buckets=buckets, capture="background")

    def call(seed: int, length: int) -> None:
        x, mask = rand(seed, 2, length, 3), torch.ones(2, length, device=device)
        close(fast(x, mask), hidden(x, mask))

    with torch.no_grad():
        until(lambda: len(fast.recordings) == 1, lambda: call(0, 7))
        with blocked(fast):
            for seed in range(4):
                call(seed, 3)
        assert fast.stats().larger_calls == 0
        assert not served(fast)


def test_written_arguments(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x.mul_(2).sum(1)

    fast: Any = ol.graph(f, buckets=ol.Buckets(sizes=(4, 8)), capture="background")
    with torch.no_grad():
        until(lambda: served(fast) == [(8,)], lambda: fast(rand(0, 7, 4)))
        with blocked(fast):
            for seed in range(3):
                mine, theirs = rand(seed, 3, 4), rand(seed, 3, 4)
                close(fast(mine), f(theirs))
                close(mine, theirs)
        assert fast.stats().larger_calls == 3


def test_ragged(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, edges: Tensor) -> Tensor:
        return x.index_select(0, edges[0]) + x.index_select(0, edges[1])

    def graph(nodes: int, count: int) -> tuple[Tensor, Tensor]:
        edges = (torch.arange(2 * count) * 7 % nodes).view(2, count).to(device)
        return rand(nodes, nodes, 4), edges

    sizes = ol.Ragged(
        {"nodes": (8, 16), "edges": (8, 32)},
        {"x": "nodes", "edges": (None, "edges")},
        index={"edges": "nodes"},
    )
    fast: Any = ol.graph(f, buckets=sizes, capture="background")
    with torch.no_grad():
        until(
            lambda: served(fast) == [(16, 32)], lambda: close(fast(*graph(9, 20)), f(*graph(9, 20)))
        )
        with blocked(fast):
            for call in ((3, 4), (7, 30), (12, 6), (1, 2)):
                close(fast(*graph(*call)), f(*graph(*call)))
        assert {size for size, _ in fast._counts_at_larger} == {(3, 4), (7, 30), (12, 6), (1, 2)}


def test_a_bucket_that_was_captured_ahead(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast: Any = ol.graph(net, buckets=ol.Buckets(sizes=(2, 4, 8)), capture="background").__graphed__
    with torch.inference_mode():
        fast.capture(rand(0, 8, 4))
        close(fast(rand(0, 3, 4)), net(rand(0, 3, 4)))  # watched
        until(lambda: served(fast) == [(8,)], lambda: fast(rand(0, 3, 4)))
        until(lambda: len(fast.recordings) == 2, lambda: fast(rand(0, 3, 4)))
        until(lambda: not fast._captures.worker.busy)
        with blocked(fast):
            close(fast(rand(0, 2, 4)), net(rand(0, 2, 4)))  # at 8, which is proven
        assert ((2,), (8,)) in fast._counts_at_larger
        assert fast.stats().warmup_calls == 1


def test_state_is_checked(device: torch.device, rand: Rand) -> None:
    """A recording that relies on former weights serves no smaller bucket either."""
    net = network(device)
    fast: Any = ol.graph(net, buckets=ol.Buckets(sizes=(4, 8)), capture="background").__graphed__
    with torch.no_grad():
        until(lambda: served(fast) == [(8,)], lambda: fast(rand(0, 7, 4)))
        with blocked(fast):
            close(fast(rand(0, 3, 4)), net(rand(0, 3, 4)))
            net[0].weight.data = net[0].weight.data * 2  # pyright: ignore
            for seed in range(3):
                close(fast(rand(seed, 3, 4)), net(rand(seed, 3, 4)))
        until(lambda: len(fast.recordings) >= 1, lambda: fast(rand(0, 3, 4)))
        close(fast(rand(0, 3, 4)), net(rand(0, 3, 4)))


def test_a_size_that_cannot_be_captured_beside_calls(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is captured in a call: the larger bucket does not serve it for ever."""
    fast: Any = ol.graph(doubled, buckets=ol.Buckets(sizes=(4, 8)), capture="background")
    with torch.no_grad():
        until(lambda: served(fast) == [(8,)], lambda: fast(rand(0, 7, 4)))

        def refused(*args: Any) -> None:
            raise ol.CaptureError("OL109", "not here")

        monkeypatch.setattr(fast, "capture", refused)
        for _ in range(3):
            close(fast(rand(0, 3, 4)), doubled(rand(0, 3, 4)))
        assert fast.stats().larger_calls >= 1
        until(lambda: len(fast.recordings) == 2, lambda: fast(rand(0, 3, 4)))


def test_while_another_callable_is_captured(device: torch.device, rand: Rand) -> None:
    """Its own size is asked for once that capture is over."""
    fast: Any = ol.graph(doubled, buckets=ol.Buckets(sizes=(4, 8)), capture="background")
    lock, held, go = driver_of(device.type).lock, threading.Event(), threading.Event()

    def capture() -> None:
        with lock:
            held.set()
            go.wait(60)

    with torch.no_grad():
        until(lambda: served(fast) == [(8,)], lambda: fast(rand(0, 7, 4)))
        until(lambda: not fast._captures.worker.busy)
        other = threading.Thread(target=capture)
        other.start()
        held.wait(60)
        for _ in range(3):
            close(fast(rand(0, 3, 4)), doubled(rand(0, 3, 4)))
        assert fast.stats().larger_calls == 3
        go.set()
        other.join()
        until(lambda: len(fast.recordings) == 2, lambda: fast(rand(0, 3, 4)))


def test_threads_call_all_sizes(device: torch.device, rand: Rand) -> None:
    net = network(device)
    buckets = ol.Buckets.powers_of_two(16)
    fast: Any = ol.graph(net, buckets=buckets, capture="background").__graphed__

    def body(seed: int) -> None:
        order = random.Random(seed)
        with torch.inference_mode():
            for _ in range(80):
                x = rand(seed, order.randint(1, 16), 4)
                close(fast(x), net(x))

    in_threads(*(functools.partial(body, seed) for seed in range(3)))
    assert set(fast.stats().sizes) == set(range(1, 17))
    fast.reset()
    assert fast.stats().larger_calls == 0
