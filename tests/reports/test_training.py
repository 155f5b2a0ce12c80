"""Whole steps and loops: optimizers, scalers, accumulation, hooks, what is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from tests.device.drop_in import on_cpu_and_cuda
from tests.device.steps import small_model

from .side_by_side import side_by_side

Rand = Callable[..., Tensor]


def state_of(model: nn.Module) -> list[Any]:
    """Copies of parameters, buffers and gradients."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [[t.clone() for t in model.state_dict().values()], grads]


def test_a_scaler_around_the_step(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/55562

    `GradScaler.update` made its scale anew, which a captured backward does not see."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=2)

        @graph
        def forward_backward(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            return loss.detach()

        for i in range(10):
            x = rand(i, 5, 4)
            if i == 6:
                x = x / 0  # an overflow: the step is left out, the scale halved
            yield forward_backward(x).isnan(), state_of(model)[0]
            scaler.step(optimizer)
            scaler.update()
            yield scaler.get_scale()

    side_by_side(program, device)


@on_cpu_and_cuda
def test_weights_of_bfloat16_and_fp32_masters(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3076

    The copy from master weights to the model is left out of the first replay: zero gradients."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device).to(torch.bfloat16)
        masters = [p.detach().float().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)

        @graph
        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = model(x.bfloat16()).float().square().mean()
            loss.backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, model.parameters(), strict=True):
                    p.copy_(master)
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 5, 4)), [m.clone() for m in masters], state_of(model)

    side_by_side(program, device)


def test_the_loss_is_shown(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/61880

    The loss of a captured step is printed after a replay: its value, and that it has a graph, which
    the backward in the step used up (docs/limits.md)."""
    model = small_model(device)

    @ol.graph
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for i in range(6):
        with torch.no_grad():
            expected = model(rand(i, 5, 4)).square().mean()
        loss = step(rand(i, 5, 4))
    assert repr(loss.detach()) == repr(expected)
    assert loss.grad_fn is not None


def grads(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_the_step_of_an_optimizer_inside_the_backward(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/76464

    A hook after each accumulation steps an optimizer for the parameter, and drops its gradient."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def update(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        fast = graph(model)
        for i in range(8):
            fast(rand(i, 5, 4)).square().mean().backward()
            yield grads(model), [p.detach().clone() for p in model.parameters()]

    side_by_side(program, device)


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


def turn_options(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 5:
        optimizer.param_groups[0]["nesterov"] = True
    if i == 9:
        optimizer.param_groups[0]["maximize"] = True


def forget(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 7:
        optimizer.state.clear()


@pytest.mark.parametrize("between", [turn_options, forget])
def test_an_optimizer_that_is_changed(device: torch.device, rand: Rand, between: Between) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/3871

    After a checkpoint is loaded, or options change, a captured step goes on with the old ones."""
    side_by_side(stepping(device, rand, sgd, between), device)


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
