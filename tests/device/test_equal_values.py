"""Values that are equal and not alike: keys of another type, ranges, keys of large dicts."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, replays


class Number(enum.IntEnum):
    ONE = 1


KEYS: dict[str, tuple[Any, Any]] = {
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "zeros": (0.0, -0.0),
    "enumeration": (1, Number.ONE),
    "tuples": ((1, 2), (1.0, 2)),
}


def described(x: Tensor, weights: dict[Any, float]) -> Tensor:
    """The key's type and sign make a difference."""
    for key, weight in weights.items():
        part = key[0] if isinstance(key, tuple) else key
        x = x * weight + len(type(part).__name__) + (1 if str(part) == "-0.0" else 0)
    return x


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", KEYS)
def test_keys_of_an_argument(
    name: str, kind: Callable[[Any], Any], device: torch.device, rand: Rand
) -> None:
    fast = ol.graph(described)
    with torch.no_grad():
        for i in range(14):
            key, x = KEYS[name][i // 7], rand(i, 3)
            args = x, kind({key: 2.0})
            assert_same(fast(*args), described(*args), f"call {i}")
    assert len(fast.recordings) == 2


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_state(name: str, device: torch.device, rand: Rand) -> None:
    first, second = KEYS[name]
    weights = {first: 2.0}
    fast = ol.graph(lambda x: described(x, weights))
    alike(fast, lambda x: described(x, weights), rand, 3, calls=7)
    del weights[first]
    weights[second] = 2.0
    alike(fast, lambda x: described(x, weights), rand, 3, calls=7)
    assert replays(fast) >= 5


@pytest.mark.parametrize("held", [False, True])
def test_ranges_of_the_same_numbers(held: bool, device: torch.device, rand: Rand) -> None:
    spans = [range(0, 8, 4)] * 7 + [range(0, 5, 4)] * 7
    state = {"span": spans[0]}

    def f(x: Tensor, span: range | None = None) -> Tensor:
        span = span or state["span"]
        return x[span.start : span.stop : span.step].sum() * span.stop

    fast = ol.graph(f)
    with torch.no_grad():
        for i, span in enumerate(spans):
            state["span"] = span
            args = (rand(i, 8),) if held else (rand(i, 8), span)
            assert_same(fast(*args), f(*args), f"call {i}")
    assert replays(fast) >= 5


@pytest.mark.parametrize("kind", ["dict", "list", "in"])
def test_a_key_of_a_large_container_that_a_later_call_uses(
    kind: str, device: torch.device, rand: Rand
) -> None:
    """The third key that it is used by was checked by none: with 64 items each one is."""
    values: Any = [float(i) for i in range(65)]
    held = values if kind == "list" else dict(enumerate(values))
    users = (3, 3, 3, 3, 3, 5, 5, 7, 7, 7, 7, 7)
    user = users[0]

    def f(x: Tensor) -> Tensor:
        return x * (user in held) + 1 if kind == "in" else x * held[user]

    fast = ol.graph(f)
    with torch.no_grad():
        for i, user in enumerate(users):  # noqa: B007  which `f` reads
            if i == 9:
                held[7] = 100.0
            if i == 10 and kind == "in":
                del held[7]
                held[700] = 1.0
            assert_same(fast(rand(i, 3)), f(rand(i, 3)), f"call {i}")
