"""Gradients, and other tensors from before, that a callable stores or returns."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

WAYS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda g: g,
    "a view": lambda g: g.view(-1),
    "in a list": lambda g: [g],
    "in a tuple": lambda g: (g, 1),
    "a view in a list": lambda g: [g.view(-1)],
    "detached in a list": lambda g: [g.detach()],
    "a row in a dict": lambda g: {"row": g[0]},
}


def world_of(device: torch.device, kept: Any = None) -> SimpleNamespace:
    torch.manual_seed(3)
    return SimpleNamespace(model=nn.Linear(4, 2).to(device), kept=kept)


def tensor_in(kept: Any) -> Tensor:
    while not isinstance(kept, Tensor):
        kept = next(iter(kept.values() if isinstance(kept, dict) else kept))
    return kept


def check(fast: Any, worlds: list[SimpleNamespace], i: int) -> None:
    """What is kept is the same, and a write to the gradient is seen there where eager sees it."""
    found: list[Any] = []
    for world in worlds:
        kept, grad = tensor_in(world.kept), world.model.weight.grad
        row: list[Any] = [kept is grad, kept.detach().clone()]
        if grad is not None:
            grad.mul_(2)
            row += [kept.data_ptr() == grad.data_ptr(), grad.clone(), kept.clone()]
        found.append(row)
    assert_same(found[1], found[0], f"call {i}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("zeroed", ["never", "inside", "before", "to zeros"])
def test_a_whole_step_keeps_a_gradient(
    device: torch.device, rand: Rand, way: str, zeroed: str
) -> None:
    """In every call, with the call that captures: a gradient made anew is in no other memory."""

    def world() -> SimpleNamespace:
        made = world_of(device)

        def step(x: Tensor) -> Tensor:
            if zeroed == "inside":
                made.model.zero_grad()
            loss = made.model(x).square().sum()
            loss.backward()
            made.kept = WAYS[way](made.model.weight.grad)
            return loss.detach()

        made.step = step
        return made

    worlds = [world(), world()]
    fast = ol.graph(worlds[1].step, warmup=1)
    for i in range(6):
        for one, step in zip(worlds, (worlds[0].step, fast), strict=True):
            if zeroed in ("before", "to zeros"):
                one.model.zero_grad(set_to_none=zeroed == "before")
            step(rand(i, 3, 4))
        check(fast, worlds, i)
    assert replays(fast) > 1


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_keeps_the_gradient_that_is_there(
    device: torch.device, rand: Rand, way: str
) -> None:
    """No kernel may read it, and it is another after a `zero_grad`."""

    def world() -> SimpleNamespace:
        made = world_of(device, torch.zeros(1))

        def forward(x: Tensor) -> Any:
            grad = made.model.weight.grad
            if grad is not None:
                made.kept = WAYS[way](grad)
            return made.model(x), grad

        made.forward = forward
        return made

    worlds = [world(), world()]
    fast = ol.graph(worlds[1].forward, warmup=1)
    for i in range(10):
        for one, forward in zip(worlds, (worlds[0].forward, fast), strict=True):
            if i % 4 == 3:
                one.model.zero_grad()
            y, grad = forward(rand(i, 3, 4))
            assert grad is one.model.weight.grad
            y.square().sum().backward()
        check(fast, worlds, i)


def test_a_tensor_is_stored_where_it_is_already(device: torch.device, rand: Rand) -> None:
    """The capture sees no change; the caller has put another there since."""
    state = SimpleNamespace(bank=rand(0, 3), current=None)

    def f(x: Tensor) -> Tensor:
        state.current = state.bank
        return x * 2

    fast = ol.graph(f)
    for i in range(12):
        if i in (5, 8):
            state.current = rand(i, 3)
        assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
        assert state.current is state.bank
    assert replays(fast) > 1
