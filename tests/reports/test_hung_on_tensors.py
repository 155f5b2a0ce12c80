"""What people hang on parameters and tensors: scales, buffers of gradients, flags."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.device.steps import small_model

from .side_by_side import right_or_refused, side_by_side

Rand = Callable[..., Tensor]


@pytest.mark.parametrize("place", ["attribute", "list", "dict", "partial", "closure", "object"])
def test_derived_tensors_of_a_layer(device: torch.device, rand: Rand, place: str) -> None:
    """https://github.com/vllm-project/vllm/pull/49140

    Tensors that are derived from weights at loading, outside of parameters and buffers."""

    class Layer(nn.Module):
        apply_scale: Any

        def __init__(self) -> None:
            super().__init__()
            self.kept: Any = None
            self.load(0)

        def load(self, i: int) -> None:
            self.weight = nn.Parameter(rand(90 + i, 4, 4), requires_grad=False)
            scale = rand(95 + i, 4)
            match place:
                case "attribute":
                    self.kept = scale
                case "list":
                    self.kept = [scale]
                case "dict":
                    self.kept = {"scale": scale}
                case "partial":
                    self.kept = functools.partial(torch.mul, scale)
                case "closure":
                    self.kept = lambda y: y * scale
                case _:
                    self.kept = SimpleNamespace(config=SimpleNamespace(scale=scale))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)
            match place:
                case "attribute":
                    return y * self.kept
                case "list" | "dict":
                    return y * self.kept[0 if place == "list" else "scale"]
                case "partial" | "closure":
                    return self.kept(y)
                case _:
                    return y * self.kept.config.scale

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        layer = Layer()
        fast = graph(layer)
        for i in range(14):
            if i in (5, 9):
                layer.load(i)
            yield fast(rand(i, 5, 4))

    side_by_side(program, device)


@pytest.mark.parametrize("kind", ["tensor", "number", "object"])
def test_a_scale_on_a_weight(device: torch.device, rand: Rand, kind: str) -> None:
    """https://github.com/vllm-project/vllm/issues/48941

    The scale of a quantized weight hangs on the parameter, and a reload hangs on another."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        weight: Any = nn.Parameter(rand(90, 4, 4), requires_grad=False)

        def load(i: int) -> None:
            weight.copy_(rand(90 + i, 4, 4))
            scale = rand(95 + i, 4)
            weight.scale = {
                "tensor": scale,
                "number": 1.0 + i,
                "object": SimpleNamespace(absmax=scale),
            }[kind]

        def forward(x: Tensor) -> Tensor:
            scale = weight.scale
            return F.linear(x, weight) * (scale.absmax if kind == "object" else scale)

        load(0)
        fast = graph(forward)
        for i in range(14):
            if i in (5, 9):
                load(i)
            yield fast(rand(i, 5, 4))

    right_or_refused(program, device)


def test_a_mark_on_an_argument(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/issues/48312

    A tensor that is passed carries a mark that decides what is done with it."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x: x * 2 if getattr(x, "doubled", False) else x * 3)
        for i in range(12):
            x: Any = rand(i, 3)
            if i % 3 == 2 or i == 5:
                x.doubled = True
            yield fast(x)

    right_or_refused(program, device)


class MainGrad(torch.autograd.Function):
    """Adds the gradient of a weight to a buffer that hangs on it, and says so on the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.addmm_(x.mT, g)
        ctx.weight.grad_added_to_main_grad = True
        return g @ ctx.weight.mT, None


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_that_go_elsewhere(device: torch.device, rand: Rand, whole: bool) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/1204

    A backward adds to `weight.main_grad` and sets a flag on the weight; a replay sets none."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        weight: Any = nn.Parameter(rand(90, 3, 3))
        weight.main_grad = torch.zeros(3, 3, device=device)

        def forward(x: Tensor) -> Tensor:
            return MainGrad.apply(model(x), weight)

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            return loss.detach()

        if whole:
            step = graph(step)
        else:
            forward = graph(forward)
        for i in range(12):
            weight.grad_added_to_main_grad = False
            if i == 8:
                weight.main_grad = torch.zeros(3, 3, device=device)
            yield step(rand(i, 5, 4)), weight.main_grad.clone(), weight.grad_added_to_main_grad

    right_or_refused(program, device)


def test_a_view_of_a_dict(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/issues/48312

    Layers are gone through by `values()` of a dict that was taken once."""

    def program(graph: Any) -> Iterator[Any]:
        table = {"a": rand(90, 3), "b": rand(91, 3)}

        def reading(values: Any) -> Callable[[Tensor], Tensor]:
            return lambda x: x * sum(values)

        fast = graph(reading(table.values()))
        for i in range(12):
            if i in (5, 9):
                table["a"] = rand(92 + i, 3)
            yield fast(rand(i, 3))

    right_or_refused(program, device)
