"""Further buckets: what the warm-ups of the first have shown is not shown again, but checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

SIZES = (1, 2, 4, 8)


def until_replayed(fast: Any, f: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Compare calls until one is a replay, and return their number."""
    before, calls = replays(fast), 0
    while replays(fast) == before:
        calls += 1
        assert calls < 20
        assert_same(fast(x), f(x))
    return calls


@torch.no_grad()
def test_one_warm_up_is_enough(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).to(device).eval()
    fast = ol.graph(model, buckets=ol.Buckets(dim=0, sizes=SIZES))
    calls = [until_replayed(fast, model, rand(n, n, 3)) for n in (8, 4, 2, 1)]
    assert calls == [4, 2, 2, 2]
    assert fast.stats().captures == len(SIZES)


def test_in_training(device: torch.device, rand: Rand) -> None:
    eager, module = (nn.Linear(3, 3).to(device) for _ in range(2))
    module.load_state_dict(eager.state_dict())
    fast = ol.graph(module, buckets=ol.Buckets(dim=0, sizes=SIZES))
    for i, n in enumerate((8, 8, 8, 8, 8, 4, 4, 4, 2, 2, 2, 7, 3, 8, 4)):
        for f in (eager, fast):
            f(rand(i, n, 3)).square().sum().backward()
        assert_same([p.grad for p in module.parameters()], [p.grad for p in eager.parameters()])
    assert fast.stats().warmup_calls == 3 + 1 + 1
    assert replays(fast) == 10


def test_another_mode_warms_up_as_the_first(device: torch.device, rand: Rand) -> None:
    """Its recordings are others, and so may be what it reads."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)).to(device)
    fast = ol.graph(module, buckets=ol.Buckets(dim=0, sizes=SIZES))
    with torch.no_grad():
        assert until_replayed(fast, module, rand(0, 8, 3)) == 4
        module.eval()
        assert until_replayed(fast, module, rand(0, 4, 3)) == 4
        assert until_replayed(fast, module, rand(0, 2, 3)) == 2
    with torch.inference_mode():
        assert until_replayed(fast, module, rand(0, 2, 3)) == 4


class Plain:
    """An object with a number."""

    factor = 1.0


class Other:
    """An object of another class, whose number is an instance's."""

    def __init__(self) -> None:
        self.factor = 1.0


class Tables(nn.Module):
    """Reads a number of the size's own, by code that ran before for another size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.large = dict.fromkeys(range(100), 1.0)
        self.objects = {n: Other() if n % 8 else Plain() for n in range(9)}
        for n in range(9):
            setattr(self, f"of_{n}", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor(x.shape[0], f"of_{x.shape[0]}")

    def factor(self, n: int, name: str) -> float:
        if self.how == "item":
            return self.large[n]
        return getattr(self, name) if self.how == "attribute" else self.read(self.objects[n])

    def read(self, one: Any) -> float:
        return one.factor

    def change(self, n: int, factor: float) -> None:
        self.large[n] = factor
        self.objects[n].factor = factor
        setattr(self, f"of_{n}", factor)


@torch.no_grad()
@pytest.mark.parametrize("how", ["item", "attribute", "object"])
@pytest.mark.parametrize("sizes", [(8, 4, 2, 1), (1, 2, 4, 8)])
def test_what_only_one_size_reads(
    device: torch.device, rand: Rand, how: str, sizes: tuple[int, ...]
) -> None:
    for changed in sizes:
        tables = Tables(how)
        buckets = ol.Buckets(dim=0, sizes=range(1, 9))
        fast = ol.graph(lambda x, t=tables: t(x), buckets=buckets)
        for n in sizes:
            until_replayed(fast, tables, rand(n, n, 3))
        tables.change(changed, 3.0)
        for n in (*sizes, *sizes):
            assert_same(fast(rand(n, n, 3)), tables(rand(n, n, 3)))


@torch.no_grad()
@pytest.mark.parametrize("warmup", [1, 3])
def test_a_size_that_settles_late(device: torch.device, rand: Rand, warmup: int) -> None:
    """Its capture is refused after one warm-up, and is made after all of them."""
    seen: dict[int, list[float]] = {n: [] for n in range(1, 5)}

    def f(x: Tensor) -> Tensor:
        known = seen[x.shape[0]]
        if len(known) < warmup:
            known.append(float(x.sum()))  # a host read, which no graph can hold
        return x * 2

    fast = ol.graph(f, buckets=ol.Buckets(dim=0, sizes=range(1, 5)), warmup=warmup)
    for n in (4, 1, 3, 2):
        for _ in range(8):
            assert_same(fast(rand(n, n, 3)), rand(n, n, 3) * 2)
        assert fast.recordings[0].replays > 0


@torch.no_grad()
def test_a_size_read_where_a_smaller_call_was_watched(device: torch.device, rand: Rand) -> None:
    """A bucket is captured by a call that is smaller, whose warm-up has read another item."""
    tables = Tables("item")
    buckets = ol.Buckets(dim=0, sizes=(4, 8))
    fast = ol.graph(lambda x: tables(x), buckets=buckets, on_refusal="eager")
    for _ in range(6):
        assert_same(fast(rand(1, 3, 3)), tables(rand(1, 3, 3)))
    assert replays(fast) > 0
    tables.change(4, 3.0)
    with pytest.warns(ol.GraphWarning, match="OL140"):  # the number changes with the size
        calls = [fast(rand(1, 4, 3)) for _ in range(6)]
    assert_same(calls, [tables(rand(1, 4, 3))] * 6)
