"""Results that are objects without tensors: made anew where the call makes them, else the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, replays


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0


class Cache:
    """As transformers' `DynamicCache` is before anything is in it."""

    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]


@functools.cache
def only() -> Cache:
    return Cache()


MADE_ONCE = Cache()
BY_NAME = {"cache": Cache()}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        return x * 2, self.cache


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_an_object_made_in_the_call_is_made_by_each_replay(rand: Rand, grad: bool) -> None:
    fast = ol.graph(lambda x: (x * 2, Cache()), warmup=1)
    kept: list[Cache] = []
    with torch.set_grad_enabled(grad):
        for i in range(5):
            y, cache = fast(rand(i, 3).requires_grad_(grad))
            assert_same(y.detach(), rand(i, 3) * 2)
            assert [vars(layer) for layer in cache.layers] == [{"keys": None, "length": 0}] * 2
            cache.layers[0].length = i + 1  # the caller's own
            kept.append(cache)
    assert len({id(layer) for cache in kept for layer in cache.layers}) == 10
    assert [cache.layers[0].length for cache in kept] == [1, 2, 3, 4, 5]
    assert replays(fast) == 4


EXISTING: dict[str, Callable[[], Any]] = {
    "attribute": Model,
    "global": lambda: lambda x: (x * 2, MADE_ONCE),
    "item": lambda: lambda x: (x * 2, BY_NAME["cache"]),
    "cached": lambda: lambda x: (x * 2, only()),
    "closure": lambda: (lambda cache: lambda x: (x * 2, cache))(Cache()),
    "default": lambda: lambda x, cache=MADE_ONCE: (x * 2, cache),  # type: ignore[misc]
}


@pytest.mark.parametrize("name", EXISTING)
def test_an_object_that_exists_is_returned_itself(rand: Rand, name: str) -> None:
    f = EXISTING[name]()
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            y, cache = fast(rand(i, 3))
            assert cache is f(rand(i, 3))[1]
            assert_same(y, rand(i, 3) * 2)
    assert replays(fast) == 4
