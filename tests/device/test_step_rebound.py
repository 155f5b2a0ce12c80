"""Gradients that a whole step edits in place and then puts others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same
from .steps import Training, as_eager, batch, training


def job(device: torch.device, how: str) -> Training:
    made = training(device, lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer, parameters = made.optimizers[0], list(made.model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        if how == "zeroed":
            optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(made.model(x), y)
        found = torch.autograd.grad(loss, parameters)
        for p, g in zip(parameters, found, strict=True):
            if how == "averaged" and p.grad is not None:
                g = p.grad.mul_(0.9) * 0.5 + g
            elif how == "doubled" and p.grad is not None:
                p.grad.mul_(2)
            p.grad = g
        optimizer.step()
        return loss.detach()

    made.step = step
    return made


@pytest.mark.parametrize("how", ["zeroed", "averaged", "doubled"])
def test_edited_and_replaced(device: torch.device, how: str) -> None:
    as_eager(lambda: job(device, how), device)


def test_what_is_kept_is_as_in_eager(device: torch.device) -> None:
    """The old gradient is edited, and not the one that takes its place."""
    jobs = job(device, "doubled"), job(device, "doubled")
    fast = ol.graph(jobs[1].step)
    kept: list[Any] = []
    for i in range(7):
        for made, step in zip(jobs, (jobs[0].step, fast), strict=True):
            step(*batch(i, device))
            kept.append([p.grad for p in made.model.parameters()])
    for expected, got in zip(kept[::2], kept[1::2], strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("drop", [lambda i: i % 2, lambda i: i in (4, 6)])
def test_dropped_at_some_calls(device: torch.device, drop: Callable[[int], Any]) -> None:
    """A call that finds gradients and one that finds none differ, and nothing moves in Python."""

    def between(i: int, made: Training) -> None:
        if drop(i):
            made.optimizers[0].zero_grad()

    options: dict[str, Any] = {"recordings": None, "min_replays": 2, "warmup": 1}
    as_eager(lambda: job(device, "zeroed"), device, calls=16, between=between, **options)
