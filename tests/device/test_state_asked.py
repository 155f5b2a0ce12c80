"""What a callable asks its parameters, and itself, and no kernel tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, compare


class Asking(nn.Module):
    """Does one thing or another, as `ask` says of it."""

    def __init__(self, ask: Callable[[Any], bool]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * 2 if self.ask(self) else x + 1


def frozen(m: Any) -> None:
    m.requires_grad_(False)


def gradient(m: Any) -> None:
    m.weight.grad = torch.ones_like(m.weight)


def flag(m: Any) -> None:
    m.flag = True


ASKED: dict[str, tuple[Callable[[Any], bool], Callable[[Any], None]]] = {
    "requires_grad": (lambda m: m.weight.requires_grad, frozen),
    "requires_grad of any": (lambda m: any(p.requires_grad for p in m.parameters()), frozen),
    "requires_grad by name": (lambda m: getattr(m.weight, "requires_grad"), frozen),  # noqa: B009
    "whether there is a gradient": (lambda m: m.weight.grad is None, gradient),
    "a name in the dict": (lambda m: "flag" in m.__dict__, flag),
    "a name in vars": (lambda m: "flag" in vars(m), flag),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_may_change(device: torch.device, rand: Rand, name: str) -> None:
    ask, change = ASKED[name]
    model, eager = Asking(ask).to(device), Asking(ask).to(device)
    fast = ol.graph(model, warmup=1)
    for _ in range(2):
        compare(fast, eager, lambda i: (rand(i, 3),), 6)
        change(model)
        change(eager)
    assert len(fast.recordings) == 2
    assert fast.stats().replays >= 6


def test_a_gradient_that_goes(device: torch.device, rand: Rand) -> None:
    model = Asking(lambda m: m.weight.grad is None).to(device)
    fast = ol.graph(model, warmup=1)
    for there in (True, False, True):
        model.weight.grad = torch.ones_like(model.weight) if there else None
        compare(fast, model, lambda i: (rand(i, 3),), 5)
    assert len(fast.recordings) == 2


def test_what_is_not_asked_may_change(device: torch.device, rand: Rand) -> None:
    model = Asking(lambda m: True).to(device)
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(12):
            model.requires_grad_(i % 2 == 0)
            model.weight.grad = torch.ones_like(model.weight) if i % 3 else None
            assert_same(fast(rand(i, 3)), model(rand(i, 3)))
    assert len(fast.recordings) == 1


class Untold:
    """An object that cannot be shown: its text reads what is not there yet."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __repr__(self) -> str:
        return f"scaled by {self.missing}"  # type: ignore[attr-defined]  # pyright: ignore


def test_objects_that_cannot_be_shown(device: torch.device, rand: Rand) -> None:
    """No message asks a class of the user's for its text."""
    first = Untold(2.0)
    held: dict[Any, Any] = {"a": first, "b": [first], first: 5.0, "c": (first, 1)}

    def f(x: Tensor, given: dict[Any, Any]) -> Tensor:
        return x * held["a"].scale + held["b"][0].scale * held[first] - sum(given.values())

    fast = ol.graph(f, warmup=1)
    for step in range(6):
        if step == 1:
            held["a"] = Untold(3.0)
        elif step == 2:
            held["b"][0] = Untold(4.0)
        elif step == 3:
            held[first] = 7.0
        elif step == 4:
            first.scale, held["c"] = 8.0, (Untold(1.0), 2)
        key = Untold(1.0) if step == 5 else first
        for i in range(3):
            assert_same(fast(rand(i, 3), {key: 1}), f(rand(i, 3), {key: 1}))
    assert fast.stats().replays >= 6
    assert all(r.why for r in fast.recordings)
