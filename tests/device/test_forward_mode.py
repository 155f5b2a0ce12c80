"""Forward-mode gradients in a callable: `jvp`, `jacfwd`, `hessian`, and dual numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jvp

from .drop_in import Rand, drop_in_worlds


def net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return layers.to(device).requires_grad_(False)


def of_jvp(model: nn.Module, x: Tensor, v: Tensor) -> Any:
    return jvp(model, (x,), (v,))


def of_jacfwd(model: nn.Module, x: Tensor, v: Tensor) -> Any:
    return jacfwd(model)(x + v)


def of_hessian(model: nn.Module, x: Tensor, v: Tensor) -> Any:
    return hessian(lambda z: model(z).square().sum())(x + v)


def by_hand(model: nn.Module, x: Tensor, v: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, v)) * x.sum()))


@pytest.mark.parametrize("f", [of_jvp, of_jacfwd, of_hessian, by_hand])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_forward_mode_is_captured(rand: Rand, device: torch.device, f: Callable[..., Any]) -> None:
    def world() -> Any:
        model = net(device)
        return lambda x, v: f(model, x, v), lambda i: (rand(i, 3), rand(i + 50, 3))

    drop_in_worlds(world)


def test_a_step_trains_through_it(rand: Rand, device: torch.device) -> None:
    def world() -> Any:
        model = net(device).requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, v: Tensor) -> Any:
            optimizer.zero_grad()
            y, tangent = jvp(model, (x,), (v,))
            loss = y.square().mean() + tangent.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), [p.detach().clone() for p in model.parameters()]

        return step, lambda i: (rand(i, 5, 3), rand(i + 50, 5, 3))

    drop_in_worlds(world, mode=torch.enable_grad, calls=6, warmup=3)
