"""Training side by side: one program with an eager model and with its graphed twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

Program = Callable[[Any, int], Any]
"""One step with a model: what it returns is compared."""


def state_of(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers, and the gradients of each, None where there is none."""
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return {**model.state_dict(), **grads}


def train(
    model: nn.Module,
    program: Program,
    *,
    steps: int = 6,
    recordings: int | None = 1,
    warmup: int = 1,
    seeds: bool = True,
    **options: Any,
) -> Any:
    """Run both, compare results and state after each step, and return the graphed twin.

    Args:
        model: the eager one; the graphed twin is of a copy.
        recordings: how many must exist at the end; None for any number.
        seeds: seed before each step, so that both draw the same numbers.
    """
    other = copy.deepcopy(model)
    fast = ol.graph(other, warmup=warmup, **options)
    kept: list[tuple[Any, Any]] = []
    for i in range(steps):
        results: list[Any] = []
        for m in (model, fast):
            if seeds:
                torch.manual_seed(100 + i)
            results.append(program(m, i))
        assert_same(results[1], results[0], f"step {i}")
        assert_same(state_of(other), state_of(model), f"step {i}, state")
        kept.append((results[1], results[0]))
    for i, (got, expected) in enumerate(kept):
        assert_same(got, expected, f"result of step {i}, after all steps")
    if recordings is not None:
        assert len(fast.recordings) == recordings, [r.why for r in fast.recordings]
        assert replays(fast) > 0 or recordings == 0
    return fast


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def descend(model: Any, x: Tensor) -> Tensor:
    """Gradients of a loss alone; the result."""
    model.zero_grad()
    y = model(x)
    loss_of(y).backward()
    return y.detach()


def trained(model: nn.Module, rand: Rand, **options: Any) -> Any:
    """Graph it, and record a forward and its backward."""
    fast = ol.graph(model, warmup=1, **options)
    for i in range(3):
        fast(rand(i, 5, 4)).sum().backward()
    assert replays(fast) > 0
    return fast


class Optimized:
    """A program that steps an optimizer of its own for each model."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], step: Any) -> None:
        self._make = make
        self._step = step
        self._of: dict[int, torch.optim.Optimizer] = {}

    def __call__(self, model: Any, i: int) -> Any:
        key = id(next(model.parameters()))
        if key not in self._of:
            self._of[key] = self._make(model.parameters())
        return self._step(model, self._of[key], i)


class Net(nn.Module):
    """Linear, BatchNorm, dropout, and an activation that saves its result."""

    def __init__(self, device: torch.device, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, 3)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(torch.tanh(self.norm(self.inner(x)))))


class Made(nn.Module):
    """A module of a function of itself and its arguments; tensors become parameters."""

    def __init__(self, of: Callable[..., Any], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self._of = of
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *args: Any) -> Any:
        return self._of(self, *args)


class Two(nn.Module):
    """Two heads with parameters of their own over a shared part."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.shared = nn.Linear(4, 4)
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)
        self.to(device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.shared(x))
        return self.first(h), self.second(h)
