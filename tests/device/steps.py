"""A training step twice, eager and graphed, and what the two must have in common.

A *job* is a function that builds a `Training`, equal each time that it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, random_tensor, replays


@dataclass
class Training:
    """What a training step changes, and the step."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    step: Callable[..., Any]
    others: dict[str, Any] = field(default_factory=dict)
    """Whatever else it changes: schedulers, averaged models, scalers."""


Job = Callable[[], Training]


def small_model(device: torch.device, *more: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 8), nn.Tanh(), *more, nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(device)


def batch(i: int, device: torch.device, rows: int = 5) -> tuple[Tensor, Tensor]:
    return (
        random_tensor(i, rows, 4, device=device),
        random_tensor(i + 500, rows, 3, device=device),
    )


def training(
    device: torch.device,
    make: Callable[[Any], torch.optim.Optimizer],
    *more: nn.Module,
) -> Training:
    """The standard step over a small model."""
    model = small_model(device, *more)
    return training_of(model, make(model.parameters()))


def training_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """The standard step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, [optimizer], step)


class Own(torch.optim.Optimizer):
    """An optimizer whose class says what is done with a parameter."""

    update: Callable[..., None]

    def __init__(self, params: Any, numbers: dict[str, Any]) -> None:
        super().__init__(params, numbers)
        self.kept: dict[str, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for p in group["params"]:
                self.update(group, p)

    def descend(self, group: Any, p: Tensor, factor: float = 1.0) -> None:
        p.sub_(p.grad, alpha=group["lr"] * factor)


def own(update: Callable[..., None], **numbers: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """The function is one of the class: what the optimizer itself reads is not the callable's."""
    kind = type("Own", (Own,), {"update": update})
    return lambda params: kind(params, numbers)


def step_over(model: Any, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """A step without targets, of one argument."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Randomness:
    """The random state of one of two worlds."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        torch.manual_seed(7)
        self._state = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._cuda else [])]

    def __enter__(self) -> None:
        torch.set_rng_state(self._state[0])
        if self._cuda:
            torch.cuda.set_rng_state(self._state[1])

    def __exit__(self, *error: object) -> None:
        self._state = self._read()

    def draw(self, device: torch.device) -> Tensor:
        """The next number, which tells where the state is."""
        with self:
            return torch.rand(1, device=device if self._cuda else None)


def assert_same_training(got: Training, expected: Training, at: str, grads: bool = True) -> None:
    assert_same(dict(got.model.state_dict()), dict(expected.model.state_dict()), f"{at}, model")
    if grads:
        assert_same(
            [p.grad for p in got.model.parameters()],
            [p.grad for p in expected.model.parameters()],
            f"{at}, gradients",
        )
    for a, b in zip(got.optimizers, expected.optimizers, strict=True):
        assert_same(a.state_dict(), b.state_dict(), f"{at}, {type(a).__name__}")


def as_eager(
    job: Job,
    device: torch.device,
    *,
    calls: int = 8,
    rows: Callable[[int], int] = lambda i: 5,
    between: Callable[[int, Training], None] | None = None,
    recordings: int | None = 1,
    min_replays: int | None = None,
    **options: Any,
) -> tuple[Any, Training]:
    """Train both ways, and compare after every call: the result, parameters, gradients, the
    optimizers' state, and at the end the random state.

    Args:
        rows: the batch size of call i.
        between: runs before call i in both worlds.
        min_replays: 3 less than the calls by default.
    """
    eager, graphed = job(), job()
    fast = ol.graph(graphed.step, **options)
    random = Randomness(device), Randomness(device)
    for i in range(calls):
        with random[0]:
            if between is not None:
                between(i, eager)
            expected = eager.step(*batch(i, device, rows(i)))
        with random[1]:
            if between is not None:
                between(i, graphed)
            got = fast(*batch(i, device, rows(i)))
        assert_same(got, expected, f"call {i}")
        assert_same_training(graphed, eager, f"call {i}")
    assert_same(random[1].draw(device), random[0].draw(device), "random state")
    if recordings is not None:
        assert len(fast.recordings) == recordings, [r.why for r in fast.recordings]
    at_least = calls - 3 if min_replays is None else min_replays
    assert replays(fast) >= at_least, (replays(fast), [r.why for r in fast.recordings])
    return fast, graphed
