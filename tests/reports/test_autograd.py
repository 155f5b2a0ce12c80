"""Forwards whose backward the caller runs, and backwards inside: checkpoints, functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.device.drop_in import on_cpu_and_cuda
from tests.device.steps import small_model

from .side_by_side import refused, right_or_refused, side_by_side

Rand = Callable[..., Tensor]


def grads(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class Square(torch.autograd.Function):
    """Its backward works in place on what its forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (twice,) = ctx.saved_tensors
        return twice.mul_(g)


def test_a_backward_in_place_on_what_is_saved(device: torch.device, rand: Rand) -> None:
    """https://github.com/unslothai/unsloth/issues/5002

    A cross entropy writes its gradient into the saved logits: "modified by an inplace operation".
    """

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(lambda x: Square.apply(model(x)))
        for i in range(8):
            model.zero_grad()
            fast(rand(i, 5, 4)).sum().backward()
            yield grads(model)

    side_by_side(program, device)


def test_such_a_backward_in_a_whole_step(device: torch.device, rand: Rand) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/272

    The same within one graph, where Python comes first in the backward."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)

        @graph
        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = Square.apply(model(x).mean())
            loss.backward()
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 5, 4)), grads(model)

    side_by_side(program, device)


@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpoint(device: torch.device, rand: Rand, whole: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/83148

    "Cannot call current_seed during CUDA graph capture", of a module with checkpoints."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)

        def forward(x: Tensor) -> Tensor:
            return checkpoint(model, x, use_reentrant=False)

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            return loss.detach()

        if whole:
            step = graph(step)
        else:
            forward = graph(forward)
        for i in range(7):
            yield step(rand(i, 5, 4)), grads(model)

    side_by_side(
        program, device, captures=2
    )  # of a whole step on CUDA, too: it learns in the first


@on_cpu_and_cuda
@pytest.mark.parametrize("whole", [False, True])
def test_dropout_in_a_checkpoint(device: torch.device, rand: Rand, whole: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/162504

    A recomputation must draw the numbers of its forward, and a capture cannot set the state."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device, nn.Dropout(0.4))

        def forward(x: Tensor) -> Tensor:
            return checkpoint(model, x, use_reentrant=False, preserve_rng_state=True)

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            return loss.detach()

        if whole:
            step = graph(step)
        else:
            forward = graph(forward)
        for i in range(7):
            yield step(rand(i, 5, 4)), grads(model)

    side_by_side(program, device)


def test_a_reentrant_checkpoint_in_a_step(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/170535

    Graphed checkpoints with a backward of their own inside the backward."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device, nn.Linear(8, 8), nn.Tanh())

        @graph
        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            y = checkpoint_sequential(model, 2, x.detach().requires_grad_(), use_reentrant=True)
            loss = y.square().mean()
            loss.backward()
            return loss.detach()

        for i in range(7):
            yield step(rand(i, 5, 4)), grads(model)

    side_by_side(program, device)


def test_a_backward_that_asks_the_host(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/15623

    A backward that cannot be captured raises from inside the engine, with no line of one's own."""

    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            if g.isnan().any():  # asks
                raise FloatingPointError
            return g * 2

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)

        @graph
        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = Checked.apply(model(x)).mean()
            loss.backward()
            return loss.detach()

        for i in range(6):
            yield step(rand(i, 5, 4))

    refused(program, device, "OL101", "# asks")


def test_no_parameters_and_no_gradients(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/128483

    A module without parameters, whose inputs need a gradient in some calls only."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(nn.Softmax(-1))
        for i in range(12):
            x = rand(i, 3, 4).requires_grad_(i % 3 != 0)
            y = fast(x)
            if x.requires_grad:
                y.square().sum().backward()
            yield y.detach(), y.requires_grad, x.grad

    side_by_side(program, device)


def test_a_parameter_that_a_branch_leaves_out(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/73276

    Which parameters take part changes from step to step; the others keep `.grad` None."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor, which: str) -> Tensor:
            return self.first(x) if which == "first" else self.second(x)

    def program(graph: Any) -> Iterator[Any]:
        model = Two().to(device)
        fast = graph(model)
        for i in range(14):
            model.zero_grad()
            fast(rand(i, 3, 4), "first" if i % 3 else "second").sum().backward()
            yield grads(model)

    side_by_side(program, device)


def test_frozen_and_thawed_layers(device: torch.device, rand: Rand) -> None:
    """https://github.com/ace-step/ACE-Step-1.5/pull/172

    Layers that are frozen for a while, as in fine-tuning of adapters, after the capture."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i in range(15):
            model[0].requires_grad_(not 5 <= i < 10)
            model.zero_grad()
            x = rand(i, 5, 4)
            fast(x).square().sum().backward()
            yield grads(model)

    side_by_side(program, device)


def test_two_losses_of_one_forward(device: torch.device, rand: Rand) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/14213

    Manual optimization: two backwards of one forward, the first with `retain_graph`."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i in range(8):
            model.zero_grad()
            y = fast(rand(i, 5, 4))
            y.square().mean().backward(retain_graph=True)
            first = grads(model)
            y.abs().sum().backward()
            yield first, grads(model)

    side_by_side(program, device)


def test_gradients_of_some_parameters(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/422

    `torch.autograd.grad` of some parameters, and `backward(inputs=...)`, of a graphed layer."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i in range(8):
            model.zero_grad()
            loss = fast(rand(i, 5, 4)).square().mean()
            some = torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
            loss.backward(inputs=[model[2].bias])
            yield list(some), grads(model)

    side_by_side(program, device)


def test_a_target_in_another_backward(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/148439

    Several forwards, as of a pipeline's micro-batches, before the first backward."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i in range(6):
            model.zero_grad()
            losses = [F.mse_loss(fast(rand(9 * i + j, 5, 4)), rand(j, 5, 3)) for j in range(3)]
            for loss in [losses[2], losses[0], losses[1]]:
                loss.backward()
                yield loss.detach(), grads(model)

    side_by_side(program, device)


def test_a_gradient_penalty(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/physicsnemo-sym/issues/279

    Derivatives of the network inside the loss, as of a physics-informed one: a double backward."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)

        @graph
        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            x = x.detach().requires_grad_()
            u = model(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            loss = du.square().mean() + u.square().mean()
            loss.backward()
            return loss.detach()

        for i in range(7):
            yield step(rand(i, 5, 4)), grads(model)

    side_by_side(program, device, captures=1)


def test_direct_gradients_and_inputs(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/181723

    A backward that writes `.grad` itself, and a caller that asks for other gradients."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i in range(8):
            model.zero_grad()
            fast(rand(i, 5, 4)).square().mean().backward(inputs=[model[0].weight])
            yield grads(model)

    right_or_refused(program, device, gradients="direct")


def test_direct_gradients_of_a_chain(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/148439

    Two forwards of one layer in a chain, of which `autograd.grad` asks for the whole gradient."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        layer = nn.Linear(4, 4).to(device)
        fast = graph(layer)
        for i in range(8):
            layer.zero_grad()
            y = fast(fast(rand(i, 5, 4)))
            yield list(torch.autograd.grad(y.square().mean(), list(layer.parameters())))

    right_or_refused(program, device, gradients="direct")
