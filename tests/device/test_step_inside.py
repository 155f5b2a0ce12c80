"""Optimizers that a callable makes for itself, as an inner loop does."""

from __future__ import annotations

import copy
import gc
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import onelaunch as ol

from .drop_in import assert_same, compare, replays

Make = Callable[[list[Tensor]], Optimizer]

MADE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: ol.capturable(torch.optim.Adam(p, lr=0.1)),
}


def fitted(model: nn.Module, make: Make) -> Callable[[Tensor], Tensor]:
    """A callable that fits a latent to its argument, by an optimizer of its own."""

    def fit(x: Tensor) -> Tensor:
        latent = torch.zeros_like(x, requires_grad=True)
        optimizer = make([latent])
        for _ in range(2):
            optimizer.zero_grad()
            (model(latent) - x).square().mean().backward()
            optimizer.step()
        return latent.detach()

    return fit


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_that_each_call_makes_is_captured(device: torch.device, name: str) -> None:
    model = nn.Linear(4, 4, device=device)
    fast, eager = ol.graph(fitted(model, MADE[name])), fitted(model, MADE[name])
    for i in range(8):
        x = torch.full((2, 4), 0.25 * i, device=device)
        assert_same(fast(x), eager(x))
    assert len(fast.recordings) == 1
    assert fast.recordings[0].replays == 5
    gc.collect()
    alive = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    assert not [o for o in alive if o.param_groups[0]["params"][0].shape == (2, 4)]


def test_first_order_meta_learning(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, device=device)
    other = copy.deepcopy(model)

    def step_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def step(x: Tensor, query: Tensor) -> Tensor:
            copied = copy.deepcopy(model)
            inner = torch.optim.SGD(copied.parameters(), lr=0.1)
            copied(x).square().mean().backward()
            inner.step()
            inner.zero_grad()
            loss = copied(query).square().mean()
            gradients = torch.autograd.grad(loss, list(copied.parameters()))
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p.sub_(gradient, alpha=0.1)
            return loss.detach()

        return step

    fast, eager = ol.graph(step_of(model)), step_of(other)
    for _ in range(8):
        x, query = torch.randn(2, 3, 4).to(device)
        assert_same(fast(x, query), eager(x, query))
    assert_same(model.state_dict(), other.state_dict())
    assert replays(fast) == 5


def test_its_numbers_are_those_that_it_is_made_with(device: torch.device) -> None:
    """From an attribute, which is guarded: a recording for each value."""
    model, config = nn.Linear(4, 4, device=device), types.SimpleNamespace(lr=0.1)
    f = fitted(model, lambda p: torch.optim.SGD(p, lr=config.lr))
    fast = ol.graph(f)
    x = torch.ones(2, 4, device=device)
    for i in range(18):
        config.lr = (0.1, 0.5)[i % 12 >= 6]
        assert_same(fast(x), f(x))
    assert len(fast.recordings) == 2


def test_a_number_that_moves_in_python_is_refused(device: torch.device) -> None:
    model, count = nn.Linear(4, 4, device=device), itertools.count(1)
    other = itertools.count(1)
    fast = ol.graph(fitted(model, lambda p: torch.optim.SGD(p, lr=1 / next(count))))
    eager = fitted(model, lambda p: torch.optim.SGD(p, lr=1 / next(other)))
    x = torch.ones(2, 4, device=device)

    def calls() -> None:
        compare(fast, eager, lambda _: (x,), 9, torch.enable_grad)

    with pytest.raises(ol.CaptureError, match=r"OL117.*add_"):
        calls()


def test_an_optimizer_to_which_nothing_leads_is_turned_as_others(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, device=device)
    other = copy.deepcopy(model)

    def job(model: nn.Module) -> tuple[Optimizer, Callable[[Tensor], Any]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers = iter(lambda: optimizer, None)

        def step(x: Tensor) -> Tensor:
            found = next(optimizers)
            found.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            found.step()
            return loss.detach()

        return optimizer, step

    (optimizer, step), (expected, eager) = job(model), job(other)
    fast = ol.graph(step)
    for i in range(12):
        optimizer.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = 0.1 / (1 + i)
        x = torch.randn(2, 4).to(device)
        assert_same(fast(x), eager(x))
    assert_same(model.state_dict(), other.state_dict())
    assert len(fast.recordings) == 1
