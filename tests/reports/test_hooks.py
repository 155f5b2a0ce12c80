"""Hooks of gradients: their order, and when they are put on."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks

from tests.device.steps import small_model

from .side_by_side import right_or_refused, side_by_side

Rand = Callable[..., Tensor]


def grads(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_the_first_gradient_of_several(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/131949

    A hook on many gradients runs at the first: which one that is tells the order."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast, seen = graph(model), list[Any]()
        register_multi_grad_hook(
            list(model.parameters()), lambda g: seen.append(list(g.shape)), mode="any"
        )
        for i in range(7):
            model.zero_grad()
            fast(rand(i, 5, 4)).sum().backward()
            yield list(seen)

    side_by_side(program, device)


def test_all_gradients_of_several(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/131949

    The hook that runs once all gradients of its tensors are there."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast, seen = graph(model), list[Any]()
        register_multi_grad_hook(
            list(model.parameters()), lambda gs: seen.append([g.sum() for g in gs])
        )
        for i in range(7):
            model.zero_grad()
            fast(rand(i, 5, 4)).sum().backward()
            yield list(seen)

    side_by_side(program, device)


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


@pytest.mark.filterwarnings(r"ignore:\[OL308\]")
def test_a_hook_on_the_node_that_accumulates(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6021

    Hooks on AccumulateGrad nodes, which DDP keeps: put on after the step was captured."""

    def program(graph: Any) -> Iterator[Any]:
        weight, handle = nn.Parameter(torch.ones(3, device=device)), None

        def step(x: Tensor) -> None:
            weight.grad = None
            (weight * x).sum().backward()

        fast = graph(step)
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        for i in range(12):
            if i == 6:
                handle = node.register_hook(lambda *_: weight.grad.mul_(10) is None or None)
            if i == 10:
                handle.remove()
            fast(rand(i, 3))
            yield weight.grad.clone()

    if device.type == "cuda":  # the node keeps the stream that it was made on
        right_or_refused(program, device, "OL109")
    else:
        side_by_side(program, device)


def test_a_hook_on_the_output_of_a_graphed_module(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/126914

    Results that are cached between replays gather the hooks of all calls."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast, count = graph(model), itertools.count()
        for i in range(8):
            model.zero_grad()
            y = fast(rand(i, 5, 4))
            y.register_hook(lambda g: [next(count), g * 2][1])
            y.square().sum().backward()
            yield grads(model), repr(count)

    side_by_side(program, device)


@pytest.mark.parametrize("kind", ["offload", "pack"])
def test_saved_tensors_are_packed(device: torch.device, rand: Rand, kind: str) -> None:
    """https://github.com/pytorch/pytorch/issues/150711

    Activations that hooks move away between forward and backward."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i in range(6):
            model.zero_grad()
            hooks = (
                save_on_cpu()
                if kind == "offload"
                else saved_tensors_hooks(lambda t: t + 0, lambda t: t * 1)
            )
            with hooks:
                loss = fast(rand(i, 5, 4)).square().mean()
            loss.backward()
            yield loss.detach(), grads(model)

    side_by_side(program, device, replayed=0)


@pytest.mark.parametrize("kind", ["parameter", "accumulated"])
def test_the_order_of_gradients(device: torch.device, rand: Rand, kind: str) -> None:
    """https://github.com/pytorch/pytorch/pull/107063

    Hooks of parameters run as their gradients come, the last layer first."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast, seen = graph(model), list[Any]()
        for name, p in model.named_parameters():
            if kind == "parameter":
                p.register_hook(lambda g, name=name: seen.append(name))
            else:
                p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
        for i in range(6):
            seen.clear()
            fast(rand(i, 5, 4)).square().mean().backward()
            yield list(seen)

    side_by_side(program, device)


@pytest.mark.parametrize("kind", ["full", "pre"])
def test_a_backward_hook_of_a_layer(device: torch.device, rand: Rand, kind: str) -> None:
    """https://github.com/pytorch/pytorch/issues/38951

    Backward hooks of modules inside of a captured forward do not fire, without a word."""

    def program(graph: Any) -> Iterator[Any]:
        model, seen = small_model(device), list[Any]()
        if kind == "full":
            model[2].register_full_backward_hook(lambda m, i, o: seen.append(o[0].sum()))
        else:
            model[2].register_full_backward_pre_hook(lambda m, o: seen.append(o[0].sum()))
        fast = graph(model)
        for i in range(6):
            fast(rand(i, 5, 4)).square().mean().backward()
            yield list(seen)

    right_or_refused(program, device, "OL112")


def test_a_hook_of_the_loss_in_a_step(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/126914

    Python comes first in a backward: a hook of the loss, in a step that is one graph."""

    def program(graph: Any) -> Iterator[Any]:
        weight = nn.Parameter(torch.ones(3, device=device))

        @graph
        def step(x: Tensor) -> Tensor:
            weight.grad = None
            loss = (weight * x).sum()
            loss.register_hook(lambda g: g * 2)
            loss.backward()
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 3)), weight.grad.clone()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*OL308")  # the hook is repeated, as it says
        side_by_side(program, device)
