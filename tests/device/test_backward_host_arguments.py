"""Backwards that use host tensors among the forward's arguments: this call's, not the capture's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

pytestmark = pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copied": lambda g, a: g - a.to(g.device),
    "made": lambda g, a: g - torch.tensor(a.tolist(), device=g.device),
    "read": lambda g, a: g * float(a[0]),
}


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, use: str) -> Tensor:
        ctx.a, ctx.use = a, use
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return USES[ctx.use](grad, ctx.a), None, None


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, use: str) -> Tensor:
        ctx.save_for_backward(a)
        ctx.use = use
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (a,) = ctx.saved_tensors
        return USES[ctx.use](grad, a), None, None


def hooked(x: Tensor, a: Tensor, use: str) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: USES[use](grad, a))
    return y


HOLDERS: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "kept": Kept.apply,
    "saved": Saved.apply,
    "hook": hooked,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("every", [1, 5])
def test_a_backward_uses_the_argument_of_its_call(
    holder: str, use: str, every: int, device: torch.device, rand: Rand
) -> None:
    """The graph of the capture held the capture's, and each later backward used that one."""

    def f(x: Tensor, a: Tensor) -> Tensor:
        return HOLDERS[holder](x, a, use)

    fast = ol.graph(f, on_refusal="eager")
    for i in range(14):
        a = torch.arange(3.0) + i // every
        found: list[Any] = []
        for call in (f, fast):
            x = rand(i, 2, 3).requires_grad_()
            y = call(x, a)
            y.sum().backward()
            found.append((y.detach(), x.grad))
        assert_same(found[1], found[0], f"call {i}")


def test_an_argument_that_is_returned_may_be_another(device: torch.device, rand: Rand) -> None:
    """Only what the graph keeps must be the same in each call."""

    def f(x: Tensor, a: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x * 2, [a, a]

    fast = ol.graph(f)
    for i in range(10):
        x, a = rand(i, 2, 3).requires_grad_(), torch.arange(3.0) + i
        y, (first, second) = fast(x, a)
        y.sum().backward()
        assert first is second
        assert torch.equal(first, a)
    assert device.type == "cpu" or (len(fast.recordings) == 1 and replays(fast) >= 6)
