"""Objects that each request makes anew, and numbers that they count: one recording serves all."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import onelaunch as ol
from onelaunch.runtime.requests import exchange

from .drop_in import assert_same, in_threads

WINDOW = 6


class Layer:
    """A part of a cache, as transformers has it: memory of its own, and a count in Python."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # equal in each request, and another
        self.keys = torch.zeros(8, 4, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.count = 0

    def update(self, row: Tensor) -> Tensor:
        full = self.count >= WINDOW
        self.count += 1
        if full:
            self.keys.copy_(self.keys.roll(-1, 0))
            self.keys[-1:] = row
        else:
            self.keys.index_copy_(0, self.length.reshape(1), row)
            self.length.add_(1)
        return self.keys.to(self.device)


class Cache:
    def __init__(self, device: torch.device, layers: int = 2) -> None:
        self.layers = [Layer(device) for _ in range(layers)]


def step(row: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
    """Positions come from the count, as a decoder's rotary embedding has them."""
    position = torch.arange(1, device=row.device) + cache.layers[0].count
    row = row + position
    for layer in cache.layers:
        row = row + layer.update(row).sum(0, keepdim=True)
    return row, cache


def run(fn: Any, cache: Cache, rows: Tensor) -> Tensor:
    made = []
    for row in rows.split(1):
        result, same = fn(row, cache)
        assert same is cache
        made.append(result)
    return torch.cat(made)


def rows_of(device: torch.device, seed: int, count: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-3, 4, (count, 4), generator=generator) / 8).to(device)


def served(device: torch.device, fast: Any, seed: int, count: int = 12) -> Cache:
    """Run a request eagerly and graphed; return its cache."""
    rows, ours, theirs = rows_of(device, seed, count), Cache(device), Cache(device)
    got, expected = run(fast, ours, rows), run(step, theirs, rows)
    assert torch.equal(got, expected)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.length, b.length)
        assert a.count == b.count
    return ours


def test_recordings_serve_every_request_and_count(device: torch.device) -> None:
    fast = ol.graph(step)
    with torch.no_grad():
        for seed in range(3):
            served(device, fast, seed)
        settled = fast.stats()
        assert len(fast.recordings) == 2  # the window is full, or not
        for seed in range(3, 15):
            served(device, fast, seed)
    stats = fast.stats()
    assert stats.captures == settled.captures
    assert stats.warmup_calls == settled.warmup_calls
    assert stats.eager_calls == 0


def test_a_later_request_is_checked_as_fast(device: torch.device) -> None:
    """In C, whatever the new objects hold at that moment."""
    fast = ol.graph(step)
    rows = torch.randn(12, 4).to(device)
    for _ in range(3):
        run(fast, Cache(device), rows)
    guards = [entry.captured.guard for entry in fast._table.entries]
    assert fast.stats().captures < 3 * 12
    assert all(guard.check != guard._python_check for guard in guards)


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_settings_that_only_some_requests_share(device: torch.device) -> None:
    """The third request brings its own where the first two had the same object."""

    def f(x: Tensor, cache: Cache) -> Tensor:
        return cache.layers[0].update(x * cache.settings.scale).sum(0)

    fast = ol.graph(f)
    shared, other = Settings(2.0), Settings(2.0)
    for request, settings in enumerate((shared, shared, other, shared, other, Settings(3.0))):
        for call in range(5):
            cache, same = Cache(device, 1), Cache(device, 1)
            cache.settings = same.settings = settings
            for i in range(4):
                x = torch.full((1, 4), float(request + call + i)).to(device)
                assert torch.equal(fast(x, cache), f(x, same))
    shared.scale = 5.0
    assert torch.equal(fast(x, cache), f(x, same))
    assert fast.stats().replays > 80


def test_requests_that_alternate_get_recordings_of_their_own(device: torch.device) -> None:
    fast = ol.graph(step)
    pairs = [(Cache(device), Cache(device), rows_of(device, seed, 20)) for seed in range(3)]
    with torch.no_grad():
        for i in range(20):
            for ours, theirs, rows in pairs:
                assert torch.equal(fast(rows[i : i + 1], ours)[0], step(rows[i : i + 1], theirs)[0])
    for ours, theirs, _ in pairs:
        assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
        assert ours.layers[0].count == 20


def test_an_earlier_request_keeps_its_contents(device: torch.device) -> None:
    fast = ol.graph(step)
    with torch.no_grad():
        first = served(device, fast, 0)
        kept = [layer.keys.clone() for layer in first.layers]
        served(device, fast, 1)
        for layer, keys in zip(first.layers, kept, strict=True):
            assert torch.equal(layer.keys, keys)
        # It goes on where it was, and so does the other.
        expected = Cache(device)
        run(step, expected, rows_of(device, 0))
        more = rows_of(device, 7)
        assert torch.equal(run(fast, first, more), run(step, expected, more))


def test_a_view_of_an_earlier_request_stays_as_it_is(device: torch.device) -> None:
    fast = ol.graph(step)
    with torch.no_grad():
        first = served(device, fast, 0)
        prefix = first.layers[0].keys[:3]
        kept = prefix.clone()
        del first
        served(device, fast, 1)
        assert torch.equal(prefix, kept)


def test_a_view_of_the_new_request_sees_what_is_written(device: torch.device) -> None:
    fast = ol.graph(step)
    with torch.no_grad():
        served(device, fast, 0)
        cache, rows = Cache(device), rows_of(device, 1)
        view = cache.layers[0].keys[:3]
        run(fast, cache, rows)
        assert torch.equal(view, cache.layers[0].keys[:3])
        assert view.any()


def test_earlier_requests_are_freed(device: torch.device) -> None:
    fast = ol.graph(step)
    with torch.no_grad():
        caches = [weakref.ref(served(device, fast, seed)) for seed in range(6)]
    gc.collect()
    assert sum(cache() is not None for cache in caches) <= 1


def test_a_request_that_is_built_otherwise_is_recorded_anew(device: torch.device) -> None:
    fast = ol.graph(step)
    with torch.no_grad():
        served(device, fast, 0)
        before = fast.stats().captures
        ours, theirs = Cache(device, layers=3), Cache(device, layers=3)
        rows = rows_of(device, 1)
        assert torch.equal(run(fast, ours, rows), run(step, theirs, rows))
    assert fast.stats().captures > before


def test_threads_with_requests_of_their_own(device: torch.device) -> None:
    fast = ol.graph(step)

    def serve(seed: int, requests: int = 3) -> None:
        with torch.no_grad():
            for i in range(requests):
                served(device, fast, 10 * seed + i)

    serve(9)
    in_threads(*(functools.partial(serve, seed) for seed in range(3)))


def test_an_earlier_request_has_its_contents_at_any_time(device: torch.device) -> None:
    """Another thread may read it while it changes places with the next one."""
    earlier, later = torch.ones(3, device=device), torch.zeros(3, device=device)
    expected = earlier.clone()
    seen: list[bool] = []

    class Reader(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            seen.append(torch.equal(earlier, expected))
            return result

    with Reader():
        exchange([(earlier, later)])
    assert len(seen) > 3
    assert all(seen)
    assert torch.equal(earlier, expected)
    assert not later.any()


class Counter:
    def __init__(self, use: Any) -> None:
        self.n = 2
        self.use = use

    def __call__(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.use(x, self.n)


def counted(device: torch.device, use: Any, calls: int) -> Any:
    """Compare a callable that counts, and return it graphed."""
    mine, theirs = Counter(use), Counter(use)
    fast = ol.graph(mine.__call__)
    x = torch.ones(3, device=device)
    for i in range(calls):
        assert_same(fast(x), theirs(x), f"call {i}")
        assert mine.n == theirs.n
    return fast


EACH_VALUE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "repeats": lambda x, n: x.repeat(n),
    "is divided": lambda x, n: x * (n / 2),
    "is odd": lambda x, n: x * 2 if n % 2 else x * 3,
    "is a key": lambda x, n: x + {3: 1.0, 4: 2.0}.get(n, 3.0),
    "fills": lambda x, n: x + torch.full((), float(n), device=x.device),
}


@pytest.mark.parametrize("use", EACH_VALUE)
def test_a_number_used_otherwise_has_a_recording_for_each_value(
    device: torch.device, use: str
) -> None:
    fast = counted(device, EACH_VALUE[use], 9)
    with pytest.raises(ol.CaptureError, match="OL118"):  # noqa: PT012
        for _ in range(20):
            fast(torch.ones(3, device=device))


def added_on_the_device(x: Tensor, n: int) -> Tensor:
    places = torch.arange(3, device=x.device)
    return torch.stack([places + n, n + places, places - n, n - places, (places < n - 20).long()])


def decides(how: str) -> Callable[[Tensor, int], Tensor]:
    return lambda x, n: x * 2 if getattr(n - 1, f"__{how}__")(12) else x + 1


USES: dict[str, Callable[[Tensor, int], Any]] = {
    "on the device": added_on_the_device,
    "its type": lambda x, n: x * 5 if type(n) is int and n > 7 else x + 1,
    "a 0-dim tensor": lambda x, n: x[0].to(torch.int32) + n,
    "an array": lambda x, n: (x + 1, str(np.array([n, 1]).dtype)),
    **{how: decides(how) for how in ("lt", "le", "gt", "ge", "eq", "ne")},
}


@pytest.mark.parametrize("use", USES)
def test_a_number_that_is_used(device: torch.device, use: str) -> None:
    calls = {"on the device": 30, "its type": 10, "a 0-dim tensor": 8, "an array": 8}
    fast = counted(device, USES[use], calls.get(use, 24))
    assert len(fast.recordings) == 1 or use != "on the device"


class Ring:
    """A decoder's own cache: memory of a fixed size, and the place of the next token."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros(2, 12, 4, device=device)
        self.n = 0


def at_a_place(x: Tensor, cache: Ring) -> Tensor:
    cache.rows[:, cache.n] = x[:, 0]
    seen = torch.arange(12, device=x.device) <= cache.n
    cache.n += 1
    return (cache.rows * seen[None, :, None]).sum(1)


def at_a_slice(x: Tensor, cache: Ring) -> Tensor:
    cache.rows[:, cache.n : cache.n + 1] = x
    cache.n += 1
    return cache.rows.sum(1)


def at_a_slice_of_a_row(x: Tensor, cache: Ring) -> Tensor:
    n = cache.n
    cache.rows[1, n : n + 1, None] = x[:1]
    cache.n = n + 1
    return cache.rows.sum(1) + torch.tensor(n, device=x.device, dtype=torch.float32)


def by_an_index(x: Tensor, cache: Ring) -> Tensor:
    place = torch.tensor([cache.n], device=x.device)
    cache.rows.index_copy_(1, place, x)
    cache.n += x.shape[1]
    return cache.rows.sum(1)


def a_number_at_a_place(x: Tensor, cache: Ring) -> Tensor:
    cache.rows[..., cache.n, :] = 3.5
    cache.n += 1
    return cache.rows.sum(1) + x[:, 0]


@pytest.mark.parametrize(
    "use", [at_a_place, at_a_slice, at_a_slice_of_a_row, by_an_index, a_number_at_a_place]
)
def test_a_number_that_is_a_place(device: torch.device, use: Any) -> None:
    """Of the memory that a call writes: one recording serves all places, and none beyond."""
    fast = ol.graph(use)
    with torch.no_grad():
        for _ in range(4):
            mine, theirs = Ring(device), Ring(device)
            for i in range(12):
                x = torch.full((2, 1, 4), float(i + 1)).to(device)
                assert torch.equal(fast(x, mine), use(x, theirs))
                assert mine.n == theirs.n
                assert torch.equal(mine.rows, theirs.rows)
        assert len(fast.recordings) <= 4
        assert fast.stats().replays >= 30
        if use in (at_a_slice, at_a_slice_of_a_row):  # which is empty beyond the end
            assert torch.equal(fast(x, mine), use(x, theirs))
        elif use is not by_an_index:  # whose error ends a GPU's process
            for fn, cache in ((fast, mine), (use, theirs)):
                cache.n = 12
                with pytest.raises((IndexError, RuntimeError)):
                    fn(x, cache)


@dataclass
class Filled:
    rows: Tensor
    count: int = 0


@dataclass(eq=False)
class Batch:
    x: Tensor
    scale: float = 2.0


def test_a_dataclass_that_the_callable_changes(device: torch.device) -> None:
    """It is then what any object is; one that it only reads is taken apart, new at each call."""

    def f(batch: Batch, cache: Filled) -> Tensor:
        cache.rows[cache.count] = batch.x * batch.scale
        cache.count += 1
        return cache.rows.sum(0)

    fast = ol.graph(f)
    with torch.no_grad():
        for request in range(4):
            mine = Filled(torch.zeros(8, 4, device=device))
            theirs = Filled(torch.zeros(8, 4, device=device))
            for i in range(8):
                x = torch.full((4,), float(request + i)).to(device)
                assert torch.equal(fast(Batch(x), mine), f(Batch(x), theirs))
                assert mine.count == theirs.count
                assert torch.equal(mine.rows, theirs.rows)
    assert len(fast.recordings) <= 3
    assert fast.stats().replays >= 20


def test_a_number_that_is_kept_elsewhere(device: torch.device) -> None:
    class Kept(Counter):
        def __call__(self, x: Tensor) -> tuple[Tensor, int]:
            self.n += 1
            self.last = self.n
            return x + 1, self.n

    mine, theirs = Kept(None), Kept(None)
    fast = ol.graph(mine.__call__)
    x = torch.ones(3, device=device)
    for _ in range(7):
        assert_same(fast(x), theirs(x))
        assert (mine.n, mine.last) == (theirs.n, theirs.last)


@pytest.mark.parametrize("last", [6, 8, 9])
def test_an_error_that_depends_on_a_number(device: torch.device, last: int) -> None:
    """A run with a count that raises may be the count's fault, and is made once more."""

    def use(x: Tensor, n: int) -> Tensor:
        if n == last:
            raise ValueError(n)
        return x + n

    def run_all(fn: Any, counter: Counter) -> list[object]:
        seen: list[object] = []
        for _ in range(10):
            try:
                seen.append(fn(x).tolist())
            except ValueError as error:
                seen.append(str(error))
            seen.append(counter.n)
        return seen

    fast, eager = Counter(use), Counter(use)
    x = torch.ones(3, device=device)
    assert run_all(ol.graph(fast.__call__), fast) == run_all(eager, eager)


def test_the_storage_of_an_earlier_request_stays_as_it_is(device: torch.device) -> None:
    fast = ol.graph(step)
    with torch.no_grad():
        first = served(device, fast, 0)
        storage = first.layers[0].keys.untyped_storage()
        kept = first.layers[0].keys.clone()
        for seed in range(1, 4):
            served(device, fast, seed)
    assert torch.equal(torch.empty(0, device=device).set_(storage, 0, (8, 4), (4, 1)), kept)


def test_a_flag_that_only_some_calls_store(device: torch.device) -> None:
    """A ring buffer: no call reads `full`, and the one that fills the buffer sets it."""

    class Ring:
        def __init__(self) -> None:
            self.rows, self.at, self.full = torch.zeros(3, 4, device=device), 0, False

        def add(self, row: Tensor) -> Tensor:
            self.rows[self.at] = row
            self.at += 1
            if self.at >= 3:
                self.at, self.full = 0, True
            return row * 2

    ring = Ring()
    fast = ol.graph(ring.add)
    for call in range(15):
        fast(torch.ones(4, device=device))
        assert (ring.at, ring.full) == ((call + 1) % 3, call >= 2)
    ring.full = False
    fast(torch.ones(4, device=device))
    assert not ring.full


def test_a_prompt_before_its_tokens_runs_as_it_is(device: torch.device) -> None:
    """Each cache gets one call with a prompt: it would be the first warm-up for ever."""
    fast = ol.graph(step)

    def prompted(fn: Any, seed: int) -> Tensor:
        rows, cache = rows_of(device, seed, 8), Cache(device)
        first = fn(rows[:2].t().contiguous().t()[:1], cache)[0]  # of other strides
        return torch.cat([first, run(fn, cache, rows[2:])])

    with torch.no_grad():
        for seed in range(8):
            assert torch.equal(prompted(fast, seed), prompted(step, seed))
    assert fast.stats().eager_calls == 6  # from the third request on


@pytest.mark.thorough
def test_caches_of_short_requests_are_freed(device: torch.device) -> None:
    """Too short to be recorded: nothing of theirs can come again."""

    def f(x: Tensor, cache: Any) -> Tensor:
        cache.rows[cache.length : cache.length + 1] = x[:1]
        cache.length += 1
        return cache.rows.sum() + x

    class Counted:
        def __init__(self) -> None:
            self.rows, self.length = torch.zeros(16, 3, device=device), 0

    fast, made = ol.graph(f), []
    with torch.no_grad():
        for i in range(20):
            cache, own = Counted(), Counted()
            made.append(weakref.ref(cache))
            for k in range(2):
                x = torch.full((2, 3), float(i + k), device=device)
                assert torch.equal(fast(x, cache), f(x, own))
            del cache
            gc.collect()
    assert sum(ref() is not None for ref in made) < 8
