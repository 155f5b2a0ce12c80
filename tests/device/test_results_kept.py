"""A result or an argument that something else keeps, too, where no replay would put another."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, refused


class Slotted:
    __slots__ = ("t",)

    def __init__(self, t: Tensor) -> None:
        self.t = t


class Plain:
    def __init__(self, t: Tensor) -> None:
        vars(self).update(t=t)

    def get(self) -> Tensor:
        return self.t


def _module(t: Tensor) -> nn.Module:
    module = nn.Identity()
    module.register_buffer("kept", t)
    return module


def _queue(t: Tensor) -> Any:
    kept: Any = queue.SimpleQueue()
    kept.put(t)
    return kept


def _attribute(t: Tensor) -> Any:
    def function() -> None: ...

    function.t = t  # pyright: ignore
    return function


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a closure": lambda t: lambda: t,
    "closures in a list": lambda t: [lambda: t],
    "a method": lambda t: Plain(t).get,
    "a method of the tensor": lambda t: t.sum,
    "an attribute of a function": _attribute,
    "a partial": lambda t: functools.partial(torch.mul, t),
    "an iterator": lambda t: iter([t]),
    "a map": lambda t: map(t.mul, [1, 2]),
    "an object with slots": Slotted,
    "an object in a dict": lambda t: {"a": [t, Plain(t)]},
    "an exception": ValueError,
    "a module": _module,
    "a class": lambda t: type("Kept", (), {"t": t}),
    "a queue": _queue,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("kept", ["result", "argument"])
def test_an_object_that_is_stored(rand: Rand, holder: Callable[[Tensor], Any], kept: str) -> None:
    store = SimpleNamespace(last=None)

    def f(x: Tensor) -> Tensor:
        y = x * 2
        store.last = holder(x if kept == "argument" else y)
        return y

    fast = ol.graph(f, warmup=1)
    fast(rand(0, 3))
    with pytest.raises(ol.CaptureError, match="OL105"):
        fast(rand(1, 3))


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_an_object_that_is_returned(rand: Rand, holder: Callable[[Tensor], Any]) -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        return y, holder(y)

    if holder is HOLDERS["an object in a dict"]:  # which is taken apart
        fast = ol.graph(f, warmup=1)
        for i in range(4):
            y, found = fast(rand(i, 3))
            assert found["a"][0] is y
            assert found["a"][1].t is y
        return
    error = refused(ol.graph(f, warmup=1), rand(0, 3))
    assert error.code in ("OL105", "OL108")


def test_a_forward_and_its_backward(rand: Rand) -> None:
    store = SimpleNamespace(last=None)
    layer = nn.Linear(3, 3).to(rand(0, 1).device)

    def f(x: Tensor) -> Tensor:
        y = layer(x)
        store.last = lambda: y
        return y

    fast = ol.graph(f, warmup=1)
    fast(rand(0, 3)).sum().backward()
    with pytest.raises(ol.CaptureError, match="OL105"):
        fast(rand(0, 3))


MADE: dict[str, Callable[[Tensor], Any]] = {
    "a closure": lambda x: lambda: len(x),
    "a method of a list": lambda x: [len(x)].append,
    "a module": lambda x: nn.Dropout(1 / len(x)),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_code_that_each_call_makes_anew(rand: Rand, make: Callable[[Tensor], Any]) -> None:
    """No two calls may return the same."""
    assert refused(ol.graph(lambda x: (x * 2, make(x)), warmup=1), rand(0, 3)).code == "OL108"


def test_code_from_before_the_call(rand: Rand) -> None:
    class Model(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scaled = lambda x: x * scale
            self.layer = nn.Identity()

        def forward(self, x: Tensor, then: Any) -> Any:
            return (
                self.layer(self.scaled(x)),
                self.scaled,
                self.layer,
                self.forward,
                then,
                torch.mul,
            )

    model = Model(2.0)
    fast = ol.graph(model, warmup=1)
    offset = 3
    then = lambda x: x + offset  # noqa: E731
    for i in range(4):
        y, *code = fast(rand(i, 3), then)
        assert torch.equal(y, rand(i, 3) * 2)
        assert code[0] is model.scaled
        assert code[1] is model.layer
        assert code[3:] == [then, torch.mul]
    assert len(fast.recordings) == 1
