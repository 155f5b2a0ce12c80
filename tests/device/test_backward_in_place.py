"""Backwards that work in place on what their forward saved, as cross entropies for long rows do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays


def function(
    forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """A function of one tensor: `forward` returns its result and what it saves."""

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            y, saved = forward(x)
            ctx.save_for_backward(saved)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            return backward(g, *ctx.saved_tensors)

    return Saving.apply  # pyright: ignore


def cross_entropy(x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of class 0 of each row, with the softmax that its backward turns into a gradient."""
    exps = (x - x.amax(-1, keepdim=True)).exp_()
    exps.div_(exps.sum(-1, keepdim=True))
    return -exps[:, 0].log(), exps


def of_softmax(g: Tensor, saved: Tensor) -> Tensor:
    saved[:, 0] -= 1
    return saved.mul_(g.unsqueeze(-1))


def gradient_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, computed by the forward in the memory of its input."""
    y = x.square().sum(-1)
    x.detach().mul_(2)
    return y, x.detach()


def passed_on(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, y


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "made": function(lambda x: (x * x, x * 2), lambda g, saved: saved.mul_(g)),
    "a view": function(
        lambda x: (x * x, x * 2), lambda g, saved: saved.view(-1).mul_(g.reshape(-1)).view_as(g)
    ),
    "uncounted": function(lambda x: (x * x, x * 2), lambda g, saved: saved.data.mul_(g)),
    "cross entropy": function(cross_entropy, of_softmax),
    "gradient first": function(gradient_first, lambda g, saved: saved.mul_(g.unsqueeze(-1))),
    "the argument": function(lambda x: (x * x, x), lambda g, saved: g * saved.mul_(2)),
    "the result": function(passed_on, lambda g, saved: g * saved.mul_(2)),
    "the gradient": function(lambda x: (x * x, x * 2), lambda g, saved: g.mul_(saved)),
}


def outcome(act: Callable[[], Any]) -> Any:
    """What a backward returns, or the words of its error without sizes and versions."""
    try:
        return act()
    except RuntimeError as error:
        return str(error).partition(" [")[0].partition("operation:")[0]


@pytest.mark.parametrize("how", ["once", "retained", "twice", "grad", "given"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_eager(device: torch.device, rand: Rand, name: str, inside: bool, how: str) -> None:
    """Of a layer's result, and of the callable's own argument, which eager lets it write."""

    def world() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to(device)
        return layer, lambda x: FUNCTIONS[name](layer(x) if inside else x)

    (eager, f), (layer, g) = world(), world()
    fast = ol.graph(g, warmup=1)
    for i in range(6):
        results: list[Any] = []
        for module, call in ((eager, f), (layer, fast)):
            module.zero_grad()
            leaf = rand(i, 3, 4).requires_grad_()
            x = leaf * 1
            y = call(x)
            given = rand(50 + i, *y.shape)
            if how == "grad":
                found: Any = torch.autograd.grad(y, x, given)
            else:
                retained = how in ("retained", "twice")
                by = given if how == "given" else given * 1
                found = [outcome(lambda: y.backward(by, retain_graph=retained))]  # noqa: B023
                if how == "twice":
                    found += [outcome(lambda: y.backward(by))]  # noqa: B023
            results.append([found, x, y, given, leaf.grad, [p.grad for p in module.parameters()]])
        assert_same(results[1], results[0], f"call {i}")
    assert replays(fast) == 5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_a_whole_step(device: torch.device, rand: Rand, name: str) -> None:
    def world() -> Callable[[Tensor], Any]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to(device)

        def step(x: Tensor) -> Any:
            layer.zero_grad()
            loss = (FUNCTIONS[name](layer(x)) * 3).sum()
            loss.backward()
            return loss.detach(), [p.grad for p in layer.parameters()]

        return step

    eager, fast = world(), ol.graph(world(), warmup=1)
    for i in range(6):
        assert_same(fast(rand(i, 3, 4)), eager(rand(i, 3, 4)), f"call {i}")
    assert replays(fast) == 5


def test_of_one_result_of_two(device: torch.device, rand: Rand) -> None:
    """Each has a graph of its own, and what one backward writes is nothing to the other."""
    square = FUNCTIONS["the result"]

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return square(x * 2), square(y * 3)

    fast = ol.graph(f, warmup=1)
    for i in range(6):
        results: list[Any] = []
        for call in (f, fast):
            x, y = (rand(i + n, 3, 4).requires_grad_() for n in range(2))
            a, b = call(x, y)
            b.sum().backward(retain_graph=True)
            again = outcome(lambda: b.sum().backward())  # noqa: B023
            if i % 2:
                a.sum().backward()
            results.append([a, b, again, x.grad, y.grad])
        assert_same(results[1], results[0], f"call {i}")
    assert replays(fast) >= 4


@pytest.mark.parametrize("name", ["made", "cross entropy", "the argument"])
def test_the_graph_of_a_call_dies_with_its_result(
    device: torch.device, rand: Rand, name: str
) -> None:
    """A parameter's node would stay on the stream of the capture."""
    layer = nn.Linear(4, 4).to(device)
    fast = ol.graph(lambda x: FUNCTIONS[name](layer(x)), warmup=1)
    for i in range(3):
        fast(rand(i, 3, 4)).sum().backward()
        gc.collect()
        node: Any = torch.autograd.graph.get_gradient_edge(layer.weight).node
        assert "met" not in node.metadata, f"call {i}"
        node.metadata["met"] = True
        del node


def test_in_a_bucket(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)

    def f(x: Tensor) -> Tensor:
        return FUNCTIONS["made"](layer(x))

    fast = ol.graph(f, warmup=1, buckets=ol.Buckets(dim=0, sizes=(4,)))
    for i in range(6):
        results: list[Any] = []
        for call in (f, fast):
            x = rand(i, 3 + i % 2, 4).requires_grad_()
            call(x).sum().backward()
            results.append(x.grad)
        torch.testing.assert_close(results[1], results[0])
    assert replays(fast) == 5


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("writes", ["nothing", "x", "y"])
def test_what_a_function_keeps_without_saving_it(
    device: torch.device, rand: Rand, writes: str, edited: bool
) -> None:
    """Eager checks no version of it: its backward reads what is there then."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            ctx.x, ctx.y = x, x * x
            return ctx.y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            if writes != "nothing":
                getattr(ctx, writes).mul_(2)
            return g * 2 * ctx.x

    fast = ol.graph(Keeping.apply, warmup=1)  # pyright: ignore
    for i in range(6):
        results: list[Any] = []
        for call in (Keeping.apply, fast):
            leaf = rand(i, 3).requires_grad_()
            x = leaf * 1
            y: Any = call(x)
            if edited:
                with torch.no_grad():
                    x.add_(1)
            y.sum().backward()
            results.append([leaf.grad, x, y])
        assert_same(results[1], results[0], f"call {i}")
    assert replays(fast) >= 4
