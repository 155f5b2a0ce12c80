"""What torch's own tests ask of a whole training step in a CUDA graph, asked of onelaunch.

The behaviours are those of pytorch/test/test_cuda.py (graph_grad_scaling) and of the notes on CUDA
graphs (whole-network capture), against the same steps in eager. In tests/device test_step_whole.py
has dropout, norms and scalers inside, and test_step_optimizers.py each optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import onelaunch as ol
from tests.device.drop_in import assert_same, random_tensor, replays

STEPS = 10

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_both = pytest.mark.parametrize("device", ["cpu", CUDA])

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Training:
    """A network, its optimizer and a step that trains it."""

    model: nn.Module
    optimizer: Optimizer
    step: Step

    def state(self) -> list[Tensor]:
        """All that a step changes."""
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *(m for m in moments if m is not None)]


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    return nn.Sequential(*layers).to(device)


def fused(parameters: Any) -> Optimizer:
    """Adam as it can be captured on either device."""
    parameters = list(parameters)
    options: dict[str, Any] = {"capturable": True} if parameters[0].is_cuda else {}
    return torch.optim.Adam(parameters, lr=1e-2, fused=True, **options)


def batch(i: int, device: str) -> tuple[Tensor, Tensor]:
    return random_tensor(i, 8, 16, device=device), torch.arange(8, device=device) % 4


def plain(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def assert_trains_alike(step_of: Callable[[nn.Module, Optimizer], Step], device: str) -> None:
    """The same losses, parameters, moments, gradients and random numbers as eager's."""

    def make() -> Training:
        model = network(device)
        optimizer = fused(model.parameters())
        return Training(model, optimizer, step_of(model, optimizer))

    eager, ours = make(), make()
    fast: Any = ol.graph(ours.step)
    torch.manual_seed(3)
    expected = [eager.step(*batch(i, device)) for i in range(STEPS)]
    after = torch.rand(4, device=device)
    torch.manual_seed(3)
    losses = [fast(*batch(i, device)) for i in range(STEPS)]
    assert_same(torch.rand(4, device=device), after)
    assert_same(losses, expected)
    assert_same(ours.state(), eager.state())
    for p, q in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        assert_same(p.grad, q.grad)
    assert replays(fast) == STEPS - 3


@on_both
@pytest.mark.parametrize("cache", [True, False], ids=["weight cache", "no cache"])
def test_amp(device: str, cache: bool) -> None:
    """A forward in autocast inside the step, with its cache of weights as people have it."""

    def step_of(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, cache_enabled=cache):
                loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    assert_trains_alike(step_of, device)


@on_both
def test_grad_scaler_outside(device: str) -> None:
    """Forward and scaled backward in the recording, the scaler's step outside."""

    def run(graphed: bool) -> tuple[list[Tensor], float]:
        model = network(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)

        def forward_backward(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            return loss.detach()

        call: Any = ol.graph(forward_backward) if graphed else forward_backward
        for i in range(STEPS):
            call(*batch(i, device))
            scaler.step(optimizer)
            scaler.update()
        if graphed:
            assert replays(call) > 0
        return list(model.state_dict().values()), scaler.get_scale()

    assert_same(run(True), run(False))


@on_both
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for loop"])
def test_clip_grad_norm(device: str, foreach: bool) -> None:
    def step_of(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            optimizer.step()
            return norm

        return step

    assert_trains_alike(step_of, device)


@on_both
def test_two_networks_share_a_pool(device: str) -> None:
    """Steps of two networks in turn, as of a generator and its critic, in one pool."""

    def run(wrap: Callable[[Step], Any]) -> list[Any]:
        found: list[Any] = []
        steps: list[tuple[nn.Module, Any]] = []
        for _ in range(2):
            model = network(device)
            steps.append((model, wrap(plain(model, fused(model.parameters())))))
        for i in range(STEPS):
            for _model, step in steps:
                found.append(step(*batch(i, device)))
        return [*found, *(list(model.state_dict().values()) for model, _ in steps)]

    pool = ol.Pool()
    assert_same(run(lambda step: ol.graph(step, pool=pool)), run(lambda step: step))
