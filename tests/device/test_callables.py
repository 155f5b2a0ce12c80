"""Functions, methods and other callables, decorated or not."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, alike, drop_in, replays


def test_a_graphed_function_looks_like_the_function(rand: Rand) -> None:
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        """Multiply."""
        return x * by

    fast = ol.graph(scaled)
    assert isinstance(fast, ol.Graphed)
    assert callable(fast)
    assert fast.__name__ == "scaled"
    assert fast.__qualname__ == scaled.__qualname__
    assert fast.__doc__ == "Multiply."
    assert fast.__module__ == scaled.__module__
    assert fast.__wrapped__ is scaled
    assert inspect.signature(fast) == inspect.signature(scaled)
    assert "scaled" in repr(fast)


def test_decorators_with_and_without_options(rand: Rand) -> None:
    @ol.graph
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @ol.graph(warmup=1, outputs="static")
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    alike(doubled, lambda x: x * 2, rand, 3)
    alike(tripled, lambda x: x * 3, rand, 3)
    assert replays(doubled) > 0
    assert replays(tripled) > 0
    assert doubled.__name__ == "doubled"
    assert tripled.__name__ == "tripled"


class Engine:
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    @ol.graph(warmup=1)
    def step(self, x: Tensor) -> Tensor:
        """One step."""
        return x * self.scale

    def plain(self, x: Tensor) -> Tensor:
        return x + self.scale


def test_a_decorated_method(rand: Rand) -> None:
    a, b = Engine(rand(1, 3)), Engine(rand(2, 3))
    both = (rand(1, 3), rand(2, 3))
    alike(lambda x: (a.step(x), b.step(x)), lambda x: (x * both[0], x * both[1]), rand, 3)
    a.scale = rand(5, 3)
    alike(a.step, lambda x: x * rand(5, 3), rand, 3)
    assert Engine.step.__doc__ == "One step."


def test_a_decorated_method_of_a_module(device: torch.device, rand: Rand) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, device=device)

        @ol.graph(warmup=1)
        def encode(self, x: Tensor) -> Tensor:
            return self.linear(x)

    a, b = Model(), Model()
    for m in (a, b):
        alike(m.encode, m.linear, rand, 2, 3)
    assert len(a.encode.recordings) == len(Model.encode.recordings) == 2
    assert a.encode == a.encode != b.encode


def test_a_bound_method(rand: Rand) -> None:
    engine = Engine(rand(1, 3))
    fast = ol.graph(engine.plain, warmup=1)
    assert fast.__name__ == "plain"
    alike(fast, lambda x: x + rand(1, 3), rand, 3)
    assert replays(fast) > 0


def test_other_callables(device: torch.device, rand: Rand) -> None:
    import functools

    class Callable_:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 3

    drop_in(Callable_(), lambda i: (rand(i, 3),))
    drop_in(functools.partial(torch.add, alpha=2), lambda i: (rand(i, 3), rand(9 + i, 3)))
    drop_in(torch.sin, lambda i: (rand(i, 3),))
    drop_in(torch.nn.functional.gelu, lambda i: (rand(i, 3),))


def test_graph_of_a_graphed_function_is_refused() -> None:
    with pytest.raises(ol.GraphError, match="OL401"):
        ol.graph(ol.graph(lambda x: x * 2))
