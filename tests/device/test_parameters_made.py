"""Parameters that a call makes: a replay would return and store plain tensors in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, compare
from .training import Rand


def returned(model: nn.Module, x: Tensor) -> Any:
    return nn.Parameter(x * 2, requires_grad=False)


def stored(model: nn.Module, x: Tensor) -> Any:
    model.weight = nn.Parameter(x * 2, requires_grad=False)
    return model.weight + 1


def of_its_memory(model: Any, x: Tensor) -> Any:
    model.other = nn.Parameter(model.weight.detach().flatten(), requires_grad=False)
    return model.weight + x


def in_a_dict(model: Any, x: Tensor) -> Any:
    return {"weight": nn.Parameter(torch.ones(2), requires_grad=False), "y": x + 1}


@pytest.mark.parametrize("make", [returned, stored, of_its_memory, in_a_dict])
def test_a_parameter_that_is_made(
    device: torch.device, rand: Rand, make: Callable[[nn.Module, Tensor], Any]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3, device=device), requires_grad=False)
            self.other = nn.Parameter(torch.ones(6, device=device), requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return make(self, x)

    model, other = Model(), Model()
    fast = ol.graph(model, warmup=2)
    compare(fast, other, lambda i: (rand(i, 2, 3),), 2, torch.enable_grad)
    with pytest.raises(ol.CaptureError, match=r"OL108.*the callable makes a parameter"):  # noqa: PT012
        for i in (2, 3):  # the first may be the only one that does
            fast(rand(i, 2, 3))
    assert all(isinstance(p, nn.Parameter) for p in model._parameters.values())


def test_parameters_that_are_there_are_returned(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(3, 3, device=device).requires_grad_(False)

    def f(x: Tensor) -> Any:
        return layer(x), layer.weight, [layer.bias]

    fast = ol.graph(f, warmup=1)
    for i in range(4):
        _, weight, (bias,) = fast(rand(i, 2, 3))
        assert weight is layer.weight
        assert bias is layer.bias


class Offload:
    """Hooks that hold a layer's weights on the host, and on the device while it runs."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.kept = {n: p.detach().cpu() for n, p in layer.named_parameters()}
        self.device = device
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.after)
        self.put(layer, "meta")

    def put(self, layer: nn.Module, where: torch.device | str) -> None:
        for name, kept in self.kept.items():
            layer._parameters[name] = nn.Parameter(kept.to(where), requires_grad=False)

    def before(self, layer: nn.Module, args: Any) -> None:
        self.put(layer, self.device)

    def after(self, layer: nn.Module, args: Any, result: Any) -> None:
        self.put(layer, "meta")


@pytest.mark.parametrize("grad", [False, True])
def test_weights_that_hooks_move(device: torch.device, rand: Rand, grad: bool) -> None:
    """As accelerate's `cpu_offload`: refused, and eager goes on."""

    def offloaded() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        for layer in (model[0], model[2]):
            Offload(layer, device)
        return model

    model, eager = offloaded(), offloaded()
    fast = ol.graph(model, warmup=2)
    with torch.set_grad_enabled(grad):
        for i in range(2):
            assert_same(fast(rand(i, 2, 3)), eager(rand(i, 2, 3)))
        with pytest.raises(ol.CaptureError, match=r"OL10[3458]"):
            fast(rand(2, 2, 3))
        assert_same(model(rand(3, 2, 3)), eager(rand(3, 2, 3)))
    assert all(isinstance(p, nn.Parameter) and p.is_meta for p in model.parameters())
