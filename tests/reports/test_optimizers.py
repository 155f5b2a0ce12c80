"""Optimizers: what they keep, count and read, of torch's and of one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.device.drop_in import on_accelerators
from tests.device.steps import small_model

from .side_by_side import right_or_refused, side_by_side

Rand = Callable[..., Tensor]
Between = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def stepping(
    device: torch.device,
    rand: Rand,
    make: Callable[[Any], torch.optim.Optimizer],
    between: Between | None = None,
) -> Callable[[Any], Iterator[Any]]:
    """A program that steps an optimizer; `between` comes before each step."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = make(model.parameters())

        @graph
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(14):
            if between is not None:
                between(i, model, optimizer)
            yield step(rand(i, 5, 4)), [p.detach().clone() for p in model.parameters()]

    return program


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class AggMo(torch.optim.Optimizer):
    """Keeps its buffers by its own numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.0, 0.9)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update((beta, torch.zeros_like(p)) for beta in group["betas"])
                for beta in group["betas"]:
                    p.sub_(state[beta].mul_(beta).add_(p.grad), alpha=group["lr"])


class Lion(torch.optim.Optimizer):
    """Counts its steps in its group, and computes nothing with the count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


class Ramped(torch.optim.Optimizer):
    """Computes its rate from a count that it keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / (1 - 0.9 ** state["step"]))


@pytest.mark.parametrize("make", [AggMo, Lion, Ramped])
def test_optimizers_of_ones_own(device: torch.device, rand: Rand, make: Any) -> None:
    """https://github.com/tracel-ai/burn/issues/5779

    Host numbers of an optimizer are frozen into the graph: counts, rates, keys."""
    program = stepping(device, rand, make)
    if make is Ramped:
        right_or_refused(program, device, "OL120")
    else:
        side_by_side(program, device)


@pytest.mark.cpu
@pytest.mark.parametrize("capturable", [False, True])
def test_complex_parameters(device: torch.device, rand: Rand, capturable: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/118018

    Adam of complex parameters, where no fused kernel is."""

    def program(graph: Any) -> Iterator[Any]:
        weight = nn.Parameter(torch.ones(3, dtype=torch.cfloat, device=device))
        optimizer = torch.optim.Adam([weight], lr=0.1, capturable=device.type != "cpu")

        @graph
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (weight * x).abs().square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 3)), weight.detach().clone()

    right_or_refused(program, device, "OL120", capturable=capturable)


def add_a_group(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 6:
        more = nn.Parameter(torch.ones(3, device=next(model.parameters()).device))
        optimizer.add_param_group({"params": [more], "lr": 0.5})


def load_the_state(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 3:
        model.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))  # type: ignore
    if i == 8:
        state, steps = model.saved  # type: ignore[misc]
        model.load_state_dict(state)
        optimizer.load_state_dict(steps)


def move_the_momentum(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i > 4:
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.02 * i


def move_the_decay(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i in (5, 8):
        optimizer.param_groups[0]["weight_decay"] = 0.01 * i


def turn_options(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 5:
        optimizer.param_groups[0]["nesterov"] = True
    if i == 9:
        optimizer.param_groups[0]["maximize"] = True


def forget(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 7:
        optimizer.state.clear()


def freeze(i: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(not 5 <= i < 9)


@pytest.mark.parametrize(
    "between",
    [
        add_a_group,
        load_the_state,
        move_the_momentum,
        move_the_decay,
        turn_options,
        forget,
        freeze,
    ],
)
def test_an_optimizer_that_is_changed(device: torch.device, rand: Rand, between: Between) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/3871

    After a checkpoint is loaded, or options change, a captured step goes on with the old ones."""
    side_by_side(stepping(device, rand, sgd, between), device)


@on_accelerators
@pytest.mark.parametrize(
    "make", [torch.optim.Adamax, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Adadelta]
)
def test_options_that_torch_captures(device: torch.device, rand: Rand, make: Any) -> None:
    """https://github.com/NVIDIA/apex/pull/1522

    A step that reads nothing on the host, and so may be captured: which optimizers have it?"""
    side_by_side(stepping(device, rand, lambda ps: make(ps, lr=0.05, capturable=True)), device)


def test_gradients_in_one_buffer(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/153404

    Gradients are views of one flat bucket, which is zeroed and scaled as a whole."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        params = list(model.parameters())
        flat, at = torch.zeros(sum(p.numel() for p in params), device=device), 0
        for p in params:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        optimizer = torch.optim.SGD(params, lr=0.1)

        @graph
        def step(x: Tensor) -> Tensor:
            flat.zero_()
            loss = model(x).square().mean()
            loss.backward()
            flat.mul_(0.5)
            optimizer.step()
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 5, 4)), flat.clone(), [p.detach().clone() for p in params]

    side_by_side(program, device, captures=1)


def test_a_step_that_looks_ahead(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/183313

    Weights are moved away, a gradient is taken there, and they come back before the update."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = sgd(model.parameters())
        kept = [p.detach().clone() for p in model.parameters()]

        @graph
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                for k, p in zip(kept, model.parameters(), strict=True):
                    k.copy_(p)
                    p.add_(p.grad, alpha=0.05)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for k, p in zip(kept, model.parameters(), strict=True):
                    p.copy_(k)
            optimizer.step()
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 5, 4)), [p.detach().clone() for p in model.parameters()]

    side_by_side(program, device, captures=1)
