"""Objects that are replaced before a capture: no run has met the ones that it finds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from .drop_in import drop_in_worlds

Rand = Callable[..., Tensor]


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale


class Listed(list[int]):
    def __init__(self, scale: float) -> None:
        super().__init__([1])
        self.scale = scale


def tagged(scale: float) -> Any:
    def tag() -> None: ...

    tag.scale = scale  # type: ignore[attr-defined]
    return tag


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("make", [Scale, Slotted, Layer, Listed, tagged])
def test_an_object_that_came_after_the_warm_up(
    rand: Rand, make: Callable[[float], Any], kept: bool
) -> None:
    def world() -> Any:
        held = SimpleNamespace(layer=make(2), old=[])

        def call(x: Tensor) -> Tensor:
            return x * held.layer.scale

        call.held = held  # type: ignore[attr-defined]
        return call, lambda i: (rand(i, 4),)

    def between(i: int, f: Any) -> None:
        held = getattr(f, "held", None) or f.__wrapped__.held
        if i == 1:
            if kept:
                held.old.append(held.layer)
            held.layer = make(2)
        if i == 3:
            held.layer.scale = 5

    drop_in_worlds(world, calls=6, between=between, recordings=2, min_replays=3)


class Pair(NamedTuple):
    first: Any
    second: int


def test_what_a_named_tuple_holds_is_read_by_its_name(rand: Rand) -> None:
    def world() -> Any:
        pair = Pair(Layer(2), 1)

        def call(x: Tensor) -> Tensor:
            pair.first.scale = (pair.first.scale + 1) % 3
            return x * (1 + pair.first.scale)

        return call, lambda i: (rand(i, 4),)

    drop_in_worlds(world, calls=9, recordings=None, min_replays=1)
