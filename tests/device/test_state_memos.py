"""A memo that the caller replaces by an empty one, as `parametrize.cached()` does after its block.

The first call that finds it empty fills it, and the calls after it read it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

STEPS = 16
Step = Callable[[Any, nn.Module, Callable[[], Tensor]], list[Tensor]]
"""One step of the caller, given the callable, its cell, and what makes the next input."""


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w + w.T


def cell(device: torch.device, spectral: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(4, 4)
    if spectral:
        parametrizations.spectral_norm(made)
    else:
        parametrize.register_parametrization(made, "weight", Symmetric())
    return made.to(device)


def around_one(f: Any, of: nn.Module, x: Callable[[], Tensor]) -> list[Tensor]:
    with parametrize.cached():
        return [f(x())]


def around_several(f: Any, of: nn.Module, x: Callable[[], Tensor]) -> list[Tensor]:
    with parametrize.cached():
        return [f(x()) for _ in range(3)]


def in_turn(f: Any, of: nn.Module, x: Callable[[], Tensor]) -> list[Tensor]:
    return [*around_one(f, of, x), f(x())]


def read_after_it(f: Any, of: nn.Module, x: Callable[[], Tensor]) -> list[Tensor]:
    """The weight in the cache is the one that the call left there."""
    with parametrize.cached():
        y = f(x())
        w: Any = of.weight
        assert w is of.weight
        return [y, w * 2]


def read_before_it(f: Any, of: nn.Module, x: Callable[[], Tensor]) -> list[Tensor]:
    with parametrize.cached():
        w: Any = of.weight
        y = f(x())
        assert of.weight is w
        return [y, w * 2]


def changed_inside(f: Any, of: nn.Module, x: Callable[[], Tensor]) -> list[Tensor]:
    """The cache keeps the weight of before the change."""
    with parametrize.cached():
        first = f(x())
        with torch.no_grad():
            of.bias.add_(1.0)
            of.parametrizations["weight"].original.mul_(0.5)  # pyright: ignore
        return [first, f(x())]


def nested(f: Any, of: nn.Module, x: Callable[[], Tensor]) -> list[Tensor]:
    with parametrize.cached():
        return [*around_one(f, of, x), f(x())]


CACHED: dict[str, tuple[Step, int]] = {
    step.__name__: (step, calls)
    for step, calls in {
        around_one: 1,
        around_several: 3,
        in_turn: 2,
        read_after_it: 1,
        read_before_it: 1,
        changed_inside: 2,
        nested: 2,
    }.items()
}


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_cached(device: torch.device, rand: Rand, name: str, spectral: bool, grad: bool) -> None:
    step, calls = CACHED[name]
    cells = [cell(device, spectral) for _ in range(2)]
    eager, fast = (nn.Sequential(c, nn.Tanh(), c) for c in cells)
    graphed = ol.graph(fast)
    for i in range(STEPS):
        found: list[Any] = []
        gradients: list[list[Tensor]] = []
        for f, of in zip((eager, graphed), cells, strict=True):
            seeds = iter(range(10 * i, 10 * i + 10))
            with contextlib.nullcontext() if grad else torch.no_grad():
                results = step(f, of, lambda s=seeds: rand(next(s), 3, 4))
            of.zero_grad()
            if grad and name != "changed_inside":  # autograd refuses the backward of that one
                torch.stack([y.square().sum() for y in results]).sum().backward()
            gradients.append([p.grad for p in of.parameters() if p.grad is not None])
            found.append([[y.detach() for y in results], dict(of.state_dict())])
        assert_same(found[1], found[0], f"step {i}")
        torch.testing.assert_close(*gradients)  # those of several calls are added in another order
    if not (grad and name == "changed_inside"):  # there forwards wait for backwards
        assert replays(graphed) >= (STEPS - 8) * calls, graphed.stats()


MEMO: dict[str, Any] = {}


def compare(
    f: Callable[[Tensor], Tensor], rand: Rand, calls: int, first: Callable[[int], Any]
) -> Any:
    """Compare results, and what the memo holds, where each step begins with another memo."""
    global MEMO
    fast = ol.graph(f)
    for i in range(2 * STEPS):
        found: list[Any] = []
        for each in (f, fast):
            MEMO = first(i)
            found.append([[each(rand(i + n, 3, 4)) for n in range(calls)], dict(MEMO)])
        assert_same(found[1], found[0], f"step {i}")
    return fast


@pytest.mark.parametrize("calls", [1, 3])
def test_a_memo_of_the_users(device: torch.device, rand: Rand, calls: int) -> None:
    weight = rand(1, 4, 4)

    def f(x: Tensor) -> Tensor:
        if "w" not in MEMO:
            MEMO["w"], MEMO["b"] = weight + weight.T, weight.sum()
        return x @ MEMO["w"] + MEMO["b"]

    fast = compare(f, rand, calls, lambda i: {})
    assert replays(fast) >= STEPS * calls


def test_a_memo_that_gets_more_than_tensors(device: torch.device, rand: Rand) -> None:
    weight = rand(1, 4, 4)

    def f(x: Tensor) -> Tensor:
        if "w" not in MEMO:
            MEMO["w"], MEMO["shape"] = weight + weight.T, (4, 4)
        return x @ MEMO["w"] + len(MEMO["shape"])

    with pytest.raises(ol.CaptureError, match=r"OL118.*MEMO"):
        compare(f, rand, 1, lambda i: {})


def test_a_memo_that_is_not_always_empty(device: torch.device, rand: Rand) -> None:
    """A key that somebody else put there is another build."""
    weight = rand(1, 4, 4)

    def f(x: Tensor) -> Tensor:
        if "w" not in MEMO:
            MEMO["w"] = weight + weight.T
        return x @ MEMO["w"] * len(MEMO)

    fast = compare(f, rand, 1, lambda i: {} if i % 3 else {"other": rand(i, 2)})
    assert replays(fast) >= STEPS


@pytest.mark.parametrize("cached", [functools.cache, functools.lru_cache], ids=["all", "some"])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_number_behind_a_cleared_cache(rand: Rand, cached: Any, by_key: bool) -> None:
    """A user caches a number that is computed from settings, and clears the cache with each change.
    Captures tried other numbers, and the cache kept what was computed from those: NaN."""
    settings = {"scale": 2.0}

    @cached
    def doubled(_: float = 0.0) -> float:
        return settings["scale"] * 2

    def f(x: Tensor) -> Tensor:
        return x * (doubled(settings["scale"]) if by_key else doubled())

    fast = ol.graph(f)
    for i in range(20):
        if i in (2, 5, 8, 11, 14):
            settings["scale"] = i + 3.0
            doubled.cache_clear()
        assert_same(fast(rand(i, 3)), rand(i, 3) * (settings["scale"] * 2), f"call {i}")
    assert type(doubled(*([settings["scale"]] if by_key else []))) is float
