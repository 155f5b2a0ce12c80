"""Attributes that code puts on tensors: on parameters, buffers and arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays
from .states import World, as_eager

READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda t: t.scale,
    "getattr": lambda t: getattr(t, "scale", 1.0),
    "hasattr": lambda t: t.scale * 2 if hasattr(t, "scale") else 1.0,
    "try": lambda t: _tried(t),
    "vars": lambda t: vars(t).get("scale", 1.0),
    "dict": lambda t: t.__dict__["scale"] if "scale" in t.__dict__ else 1.0,  # noqa: SIM401
    "an unknown name": lambda t: max(getattr(t, name) for name in list(vars(t))),
    "object": lambda t: t.holder.scale,
    "list": lambda t: t.listed[0],
    "function": lambda t: t.function(),
}


def _tried(t: Any) -> Any:
    try:
        return t.scale
    except AttributeError:
        return 1.0


def hang(t: Any, value: Any) -> None:
    t.scale = value
    if hasattr(t, "holder"):
        t.holder.scale = value
        t.listed[0] = value
    t.function = lambda: value


OWNERS = ("closure", "parameter", "buffer", "list", "result of a function", "iterated")


def model_of(owner: str, weight: Tensor, read: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    module: Any = nn.Module()
    module.weight = weight if isinstance(weight, nn.Parameter) else None
    if owner == "buffer":
        module = nn.Module()
        module.register_buffer("weight", weight)
    held = [weight]

    def get() -> Tensor:
        return held[0]

    match owner:
        case "closure":
            return lambda x: x * weight * read(weight)
        case "list":
            return lambda x: x * held[0] * read(held[0])
        case "result of a function":
            return lambda x: x * get() * read(get())
        case "iterated":

            def iterated(x: Tensor) -> Tensor:
                for p in module.parameters():
                    x = x * p * read(p)
                return x

            return iterated
        case _:
            module.forward = lambda x: x * module.weight * read(module.weight)
            return module


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("graded", [False, True])
def test_what_hangs_on_a_weight(
    device: torch.device, rand: Rand, how: str, owner: str, graded: bool
) -> None:
    def world() -> World:
        weight: Any = rand(90, 3)
        weight = weight if owner == "buffer" else nn.Parameter(weight, requires_grad=graded)
        weight.scale, weight.listed = 1.5, [1.5]
        weight.holder = SimpleNamespace(scale=1.5)
        weight.function = lambda: 1.5
        if how == "an unknown name":
            del weight.holder, weight.listed, weight.function
        return weight, model_of(owner, weight, READS[how])

    def between(weight: Any, i: int) -> None:
        if i in (5, 9) and how == "an unknown name":
            weight.scale = i + 1.0
        elif i in (5, 9):
            hang(weight, i + 1.0)
        if i == 12 and how in ("getattr", "hasattr", "try", "vars", "dict"):
            del weight.scale

    fast = as_eager(
        device, world, between, calls=16, shown=lambda weight: None, grad=True, warmup=3
    )
    assert replays(fast)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_on_a_weight(device: torch.device, rand: Rand, kind: str) -> None:
    """Written in place it is read anew, and another in its place is read too."""

    def world() -> World:
        weight: Any = rand(90, 3)
        weight = weight if kind == "buffer" else nn.Parameter(weight, requires_grad=False)
        weight.scale = rand(91, 3)
        return weight, lambda x: x * weight * weight.scale

    def between(weight: Any, i: int) -> None:
        weight.scale.mul_(1.25)
        if i in (5, 9):
            weight.scale = rand(92 + i, 3)

    shown = operator.attrgetter("scale")
    assert replays(as_eager(device, world, between, calls=14, shown=shown, grad=True, warmup=3))


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("what", ["flag", "count", "function", "list", "size", "tensor"])
def test_what_a_callable_hangs_on_a_weight(
    device: torch.device, rand: Rand, what: str, graded: bool
) -> None:
    def world() -> World:
        weight: Any = nn.Parameter(rand(90, 3), requires_grad=graded)
        weight.count = 0

        def step(x: Tensor) -> Tensor:
            match what:
                case "flag":
                    weight.mark = True
                case "count":
                    weight.count += 1
                case "function":
                    weight.mark = torch.relu
                case "list":
                    weight.mark = [x.shape[0]]
                case "size":
                    weight.mark = x.shape[0]
                case _:
                    weight.mark = x.detach() * 2
            return x * weight

        return weight, step

    def between(weight: Any, i: int) -> None:
        if i in (5, 9, 10):
            weight.mark = None

    def shown(weight: Any) -> list[Any]:
        mark = getattr(weight, "mark", "none")
        return [mark is torch.relu or mark, weight.count]

    assert replays(as_eager(device, world, between, calls=14, shown=shown, grad=True, warmup=3))


@pytest.mark.parametrize("mark", ["flag", "number", "missing"])
def test_marks_of_arguments(device: torch.device, rand: Rand, mark: str) -> None:
    """Each value of the mark has a recording."""

    def step(x: Any, y: Tensor) -> Tensor:
        match mark:
            case "flag":
                return x * 2 if getattr(x, "mark", False) else y * 3
            case "number":
                return x * x.mark + y
            case _:
                return x * (2 if hasattr(x, "mark") else 5) - y

    fast = ol.graph(step)
    for i in range(24):
        x: Any = rand(i, 3)
        if mark == "number" or i % 3 == 2:
            x.mark = float(i // 8) if mark == "number" else True
        y: Any = rand(i + 50, 3)
        y.mark = i  # which nobody reads
        assert_same(fast(x, y), step(x, y), f"call {i}")
    assert replays(fast)


def test_a_tensor_on_an_argument_is_refused(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: x * x.scale)
    match = r"args\[0\].scale.*is read in the call"
    with pytest.raises(ol.CaptureError, match=match) as caught:  # noqa: PT012
        for i in range(6):
            x: Any = rand(i, 3)
            x.scale = rand(i + 50, 3)
            assert_same(fast(x), x * x.scale)
    assert caught.value.code == "OL105"
    assert "x.scale" in str(caught.value.where)


@pytest.mark.parametrize("before", [False, True])
def test_a_mark_that_is_set_on_an_argument_is_refused(
    device: torch.device, rand: Rand, before: bool
) -> None:
    def step(x: Any) -> Tensor:
        x.mark = x.shape[0]
        return x * 2

    fast = ol.graph(step)
    match = r"args\[0\].mark.*is set in the call"
    with pytest.raises(ol.CaptureError, match=match) as caught:  # noqa: PT012
        for i in range(6):
            x: Any = rand(i, 3)
            if before:
                x.mark = None
            fast(x)
            assert x.mark == 3
    assert caught.value.code == "OL105"


@pytest.mark.parametrize("how", ["flag", "count"])
def test_what_a_backward_hangs_on_a_weight(device: torch.device, rand: Rand, how: str) -> None:
    """A forward's backward that stores is right or refused, with the line."""

    class Marking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
            if how == "flag":
                ctx.weight.mark = True
            else:
                ctx.weight.mark += 1
            return g * ctx.weight, g

    weight: Any = nn.Parameter(rand(90, 3))
    weight.mark = 0
    fast = ol.graph(lambda x: Marking.apply(x, weight))
    try:
        for i in range(8):
            if how == "flag":
                weight.mark = False
            fast(rand(i, 3).requires_grad_()).sum().backward()
            assert weight.mark == (True if how == "flag" else i + 1)
    except ol.CaptureError as error:
        assert error.code == "OL118"  # noqa: PT017
        assert "ctx.weight.mark" in str(error.where)  # noqa: PT017


def test_marks_of_arguments_with_buckets(device: torch.device, rand: Rand) -> None:
    """What pads an argument keeps its marks."""

    def step(x: Any) -> Tensor:
        return x * 2 if getattr(x, "mark", False) else x * 3

    fast = ol.graph(step, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    for i in range(24):
        x: Any = rand(i, 2 + i % 3, 3)
        if i in (12, 13, 17):
            x.mark = True
        assert_same(fast(x), step(x), f"call {i}")
    assert replays(fast)


def test_a_mark_on_a_gradient(device: torch.device, rand: Rand) -> None:
    weight = nn.Parameter(rand(90, 3))
    weight.grad = rand(91, 3)
    mark: Any = weight.grad
    mark.scale = 2.0
    fast = ol.graph(lambda x: x * weight.grad.scale)  # type: ignore[union-attr]
    with torch.no_grad():
        for i in range(12):
            if i in (6, 9):
                mark.scale = float(i)
            assert_same(fast(rand(i, 3)), rand(i, 3) * mark.scale, f"call {i}")
    assert replays(fast)
