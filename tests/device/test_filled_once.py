"""State that one call fills, and the calls after it read: caches, tables, hooks, lazy buffers.

The call that fills it may be the one that is captured. Then it is one more warm-up, and the next is
captured. What changes in the next capture too is refused.
"""

from __future__ import annotations

import collections
import functools
import itertools
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

CALLS = 10
CAPTURED = 3
"""The call that is captured, after three warm-ups."""


class Filled(nn.Module):
    """A layer with state that `fill` fills once it is asked to, and `use` applies."""

    def __init__(self, fill: Callable[..., object], use: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.fill, self.use = fill, use
        self.asked = False
        self.known: dict[Any, Any] = {}
        self.items: list[Any] = []
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.asked:
            self.fill(self, x)
        return self.use(self, self.layer(x))


def number_by_size(m: Any, x: Tensor) -> None:
    if x.shape not in m.known:
        m.known[x.shape] = 2.0


def one_item(m: Any, x: Tensor) -> None:
    if not m.items:
        m.items.append("made")


def one_tensor(m: Any, x: Tensor) -> None:
    if not m.items:
        m.items.append(x.mean(0))


def buffer(m: Any, x: Tensor) -> None:
    if not hasattr(m, "scale"):
        m.register_buffer("scale", x.abs().amax(0))


def parameters(m: Any, x: Tensor) -> None:
    """An ActNorm that makes its parameters of the first batch."""
    if not hasattr(m, "shift"):
        m.shift = nn.Parameter(-x.mean(0))


def weight(m: Any, x: Tensor) -> None:
    if not m.known:
        m.known["done"] = True
        m.layer.weight = nn.Parameter(m.layer.weight.detach() * 2)


def data(m: Any, x: Tensor) -> None:
    if m.table is None:
        m.table = 1
        m.layer.weight.data = m.layer.weight.data * 2


def hook(m: Any, x: Tensor) -> None:
    if not m.layer._forward_hooks:
        m.layer.register_forward_hook(lambda layer, args, y: y * 2)


def recorder(m: Any, x: Tensor) -> None:
    if not m.layer._forward_hooks:
        m.layer.register_forward_hook(lambda layer, args, y: m.known.update(last=y.detach()))


def of_the_values(m: Any, x: Tensor) -> None:
    """It reads the device, which no capture may."""
    if m.table is None:
        m.table = x.abs().max().item()


def layer_made_on_the_host(m: Any, x: Tensor) -> None:
    if m.table is None:
        made = nn.Linear(4, 4)
        for p in made.parameters():
            nn.init.ones_(p)
        m.table = made.to(x.device)


def weight_norm(m: Any, x: Tensor) -> None:
    if not hasattr(m.layer, "parametrizations"):
        nn.utils.parametrizations.weight_norm(m.layer)


FILLS: dict[str, tuple[Callable[..., object], Callable[..., Tensor]]] = {
    "a number by size": (number_by_size, lambda m, y: y * m.known.get(y.shape, 1.0)),
    "an item": (one_item, lambda m, y: y * (1 + len(m.items))),
    "a tensor": (one_tensor, lambda m, y: y + sum(m.items)),
    "a buffer": (buffer, lambda m, y: y * getattr(m, "scale", 1)),
    "parameters": (parameters, lambda m, y: y + getattr(m, "shift", 0)),
    "a weight": (weight, lambda m, y: y),
    "data": (data, lambda m, y: y),
    "a hook": (hook, lambda m, y: y),
    "a recorder": (recorder, lambda m, y: y + m.known.get("last", 0)),
    "a value": (of_the_values, lambda m, y: y * (m.table or 1)),
    "a layer": (layer_made_on_the_host, lambda m, y: y if m.table is None else m.table(y)),
    "weight norm": (weight_norm, lambda m, y: y),
}


def shown(m: Filled) -> Any:
    return [dict(m.state_dict()), m.known, m.items, len(m.layer._forward_hooks)]


def compare(
    fast: Any, mine: Filled, theirs: Filled, rand: Rand, asked: Callable[[int], bool]
) -> None:
    for i in range(CALLS):
        mine.asked = theirs.asked = asked(i)
        with torch.no_grad():
            assert_same(fast(rand(i, 3, 4)), theirs(rand(i, 3, 4)), f"call {i}")
        assert_same(shown(mine), shown(theirs), f"state after call {i}")


@pytest.mark.filterwarnings("ignore:.*OL308")
@pytest.mark.parametrize("at", [0, 2, CAPTURED, 4, 5])
@pytest.mark.parametrize("name", FILLS)
def test_state_that_one_call_fills(device: torch.device, rand: Rand, name: str, at: int) -> None:
    mine, theirs = (Filled(*FILLS[name]).to(device) for _ in range(2))
    fast = ol.graph(mine)
    compare(fast, mine, theirs, rand, lambda i: i >= at)
    assert fast.recordings
    assert replays(fast) >= CALLS - (CAPTURED + 1 if at <= CAPTURED else at + 3)
    assert fast.stats().warmup_calls <= (4 if at <= CAPTURED else 6)


@pytest.mark.parametrize("options", [{"warmup": 1}, {"outputs": "static"}, {"on_refusal": "eager"}])
def test_options(rand: Rand, device: torch.device, options: dict[str, Any]) -> None:
    mine, theirs = (Filled(*FILLS["an item"]).to(device) for _ in range(2))
    fast = ol.graph(mine, **options)
    at = options.get("warmup", CAPTURED)
    compare(fast, mine, theirs, rand, lambda i: i >= at)
    assert replays(fast) == CALLS - at - 1
    assert not fast.stats().eager_reasons


def test_with_a_backward(device: torch.device, rand: Rand) -> None:
    mine, theirs = (Filled(*FILLS["an item"]).to(device) for _ in range(2))
    fast = ol.graph(mine)
    for i in range(CALLS):
        mine.asked = theirs.asked = i >= CAPTURED
        for f in (fast, theirs):
            f(rand(i, 3, 4)).square().sum().backward()
        assert_same(mine.layer.weight.grad, theirs.layer.weight.grad, f"call {i}")
    assert mine.items == ["made"]
    assert replays(fast) == CALLS - CAPTURED - 1


def test_with_buckets(device: torch.device, rand: Rand) -> None:
    """Each bucket fills its own entry in the call that is captured for it."""
    mine, theirs = (Filled(*FILLS["an item"]).to(device) for _ in range(2))
    fast = ol.graph(mine, buckets=ol.Buckets(dim=0, sizes=(4, 8)), warmup=1)
    with torch.no_grad():
        for i in range(CALLS):
            mine.asked = theirs.asked = i >= 1
            x = rand(i, 3 + 4 * (i > 5), 4)
            torch.testing.assert_close(fast(x), theirs(x))
            assert mine.items == theirs.items
    assert len(fast.recordings) == 2


@pytest.mark.parametrize("each", [True, False])
def test_what_grows_at_each_call_is_refused_with_its_line(
    device: torch.device, rand: Rand, each: bool
) -> None:
    """`each`: also in the warm-ups. The call that is refused changes nothing."""
    seen: list[int] = []
    grows = [each]

    def f(x: Tensor) -> Tensor:
        if grows[0]:
            seen.append(1)  # grows here
        return x * len(seen)

    fast = ol.graph(f)
    for i in range(CAPTURED + 1):
        grows[0] |= i == CAPTURED
        expected = rand(i, 3) * (i + 1 if each else int(i == CAPTURED))
        assert_same(fast(rand(i, 3)), expected)
    with pytest.raises(ol.CaptureError) as caught:
        fast(rand(0, 3))
    assert caught.value.code == "OL118"
    assert "# grows here" in str(caught.value.where)
    assert len(seen) == (CAPTURED + 1 if each else 1)


def test_another_fill_after_a_recording(device: torch.device, rand: Rand) -> None:
    """The caller empties the cache again and again, perhaps just before a capture."""
    mine, theirs = (Filled(*FILLS["a number by size"]).to(device) for _ in range(2))
    fast = ol.graph(mine, warmup=1)
    for i in range(6 * CALLS):
        mine.asked = theirs.asked = True
        if i % CALLS == 1:
            mine.known, theirs.known = {}, {}
        with torch.no_grad():
            assert_same(fast(rand(i, 3, 4)), theirs(rand(i, 3, 4)), f"call {i}")
        assert mine.known == theirs.known
    assert replays(fast) >= 4 * CALLS


# The run that was dropped is undone. Where it cannot be, no other run takes its place.


@pytest.mark.parametrize("argument", [False, True])
def test_a_tensor_that_is_kept_out_of_sight(
    device: torch.device, rand: Rand, argument: bool
) -> None:
    """The tensor in the queue is memory of the capture: the next run would compute with it."""
    held: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    known: dict[str, int] = {}
    asked = [False]

    def f(x: Tensor) -> Tensor:
        y = x * (1 + len(known))
        if asked[0]:
            if held.empty():
                held.put(x if argument else x + 1)
                known["n"] = 1  # grows here
            t = held.get()
            held.put(t)
            y = y + t
        return y

    fast = ol.graph(f)
    for i in range(CAPTURED):
        fast(rand(i, 3))
    asked[0] = True
    with pytest.raises(ol.CaptureError, match="OL118") as caught:
        fast(rand(0, 3))
    assert "# grows here" in str(caught.value.where)


@pytest.mark.parametrize("size", [None, 4])
def test_a_cache_of_functools_beside_a_dict(
    device: torch.device, rand: Rand, size: int | None
) -> None:
    """Its tensor of the dropped run goes, and is computed again."""

    def world() -> tuple[Any, list[bool]]:
        known: dict[str, int] = {}
        asked = [False]

        @functools.lru_cache(size)
        def table(n: int) -> Tensor:
            return torch.arange(n, device=device) + 1.0

        def f(x: Tensor) -> Tensor:
            y = x * (1 + len(known))
            if asked[0]:
                known["n"] = 1
                y = y + table(3)
            return y

        return f, asked

    (f, asked), (eager, theirs) = world(), world()
    fast = ol.graph(f)
    for i in range(CALLS):
        asked[0] = theirs[0] = i >= CAPTURED
        assert_same(fast(rand(i, 3)), eager(rand(i, 3)), f"call {i}")
    assert replays(fast) == CALLS - CAPTURED - 1


ITERATORS: dict[str, Callable[[], Any]] = {
    "a count": lambda: itertools.count(3),
    "a list's": lambda: iter([3, 4, 5, 6]),
    "a generator": lambda: (n for n in (3, 4, 5, 6)),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_a_number_that_is_drawn_once_from_an_iterator(
    device: torch.device, rand: Rand, kind: str
) -> None:
    """The dropped run has drawn it, and the next run would draw another."""
    drawn: dict[str, int] = {}
    numbers, asked = ITERATORS[kind](), [False]

    def f(x: Tensor) -> Tensor:
        if asked[0] and "n" not in drawn:
            drawn["n"] = next(numbers)
        return x * drawn.get("n", 1)

    fast = ol.graph(f)
    for i in range(CAPTURED):
        fast(rand(i, 3))
    asked[0] = True
    with pytest.raises(ol.CaptureError, match="OL118"):
        fast(rand(0, 3))


@pytest.mark.parametrize("kind", ["a list's", "a generator"])
def test_a_number_that_an_attempt_at_the_capture_draws(
    device: torch.device, rand: Rand, kind: str
) -> None:
    """State that the callable replaces costs an attempt, which drew the number before this one."""
    state: dict[str, Any] = {"mean": rand(0, 3), "n": None}
    numbers, asked = ITERATORS[kind](), [False]

    def f(x: Tensor) -> Tensor:
        state["mean"] = state["mean"] * 0.5 + x
        if asked[0] and state["n"] is None:
            state["n"] = next(numbers)
        return x + state["mean"] * (state["n"] or 1)

    fast = ol.graph(f)
    for i in range(CAPTURED):
        fast(rand(i, 3))
    asked[0] = True
    with pytest.raises(ol.CaptureError, match=r"OL117.*iterator"):
        fast(rand(0, 3))


def test_what_a_dropped_run_took_is_there_again(device: torch.device, rand: Rand) -> None:
    taken: dict[str, int] = {}
    left = collections.deque([2, 3, 4])
    asked = [False]

    def f(x: Tensor) -> Tensor:
        y = x * len(left)
        if asked[0] and "n" not in taken:
            taken["n"] = left.popleft()
        return y * taken.get("n", 1)

    fast = ol.graph(f)
    for i in range(CALLS):
        asked[0] = i >= CAPTURED
        times = 3 if i < CAPTURED else 6 if i == CAPTURED else 4
        assert_same(fast(rand(i, 3)), f_of(rand(i, 3), times), f"call {i}")
    assert list(left) == [3, 4]
    assert replays(fast) == CALLS - CAPTURED - 1


def f_of(x: Tensor, times: int) -> Tensor:
    return x * (times // 2) * 2 if times > 3 else x * times
