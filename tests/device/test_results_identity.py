"""What stands twice in a result is one object, as in eager: as it is, padded, and in chunks.

And the attributes of a dataclass come in the order of its `vars`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import assert_same, replays
from .training import Rand


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = None


def objects(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each object inside of a value, with its path."""
    yield path, value
    if isinstance(value, Pair):
        value = vars(value)
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inside in items:
            yield from objects(inside, f"{path}.{key}")


def identities(value: Any) -> list[tuple[str, str]]:
    """The path of each object, and the first path where it is."""
    found: dict[int, str] = {}
    return [
        (path, found.setdefault(id(inside), path))
        for path, inside in objects(value)
        if not isinstance(inside, int | str | None)
    ]


def a_list(x: Tensor) -> Any:
    y = [x * 2]
    return {"a": y, "b": (y, 1), "apart": [x * 2]}


def a_dict(x: Tensor) -> Any:
    y = {"y": x * 2}
    return y, [y, x + 1]


def a_dataclass(x: Tensor) -> Any:
    y = Pair(x * 2, [x + 1])
    return [y, {"y": y}, y.second]


def a_tuple(x: Tensor) -> Any:
    y = (x * 2, [x + 1], ())
    return y, y, y[1], ()


def a_tensor(x: Tensor) -> Any:
    y = x * 2
    return {"a": y, "b": [y]}


def lists_in_lists(x: Tensor) -> Any:
    inner = [x * 2]
    outer = [inner, inner]
    return outer, outer, inner


def order(x: Tensor) -> Any:
    y = Pair(1, 2)
    vars(y)["more"] = x + 1
    first = vars(y).pop("first")
    y.first = x * first
    return y


PROGRAMS = [a_list, a_dict, a_dataclass, a_tuple, a_tensor, lists_in_lists, order]
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "padded": {"buckets": ol.Buckets(dim=0, sizes=(4, 8))},
    "in chunks": {"buckets": ol.Buckets(dim=0, sizes=(2, 4), overflow="chunk")},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", PROGRAMS)
def test_what_stands_twice(rand: Rand, f: Callable[[Tensor], Any], way: str) -> None:
    fast = ol.graph(f, **WAYS[way])
    with torch.no_grad():
        for i in range(12):
            n = (3, 5)[i % 2]
            expected, got = f(rand(i, n, 3)), fast(rand(i, n, 3))
            assert identities(got) == identities(expected)
            for (_, a), (_, b) in zip(objects(got), objects(expected), strict=True):
                if isinstance(b, Tensor):
                    assert_same(a, b)
    assert replays(fast) >= 4


@pytest.mark.parametrize("way", WAYS)
def test_the_attributes_of_an_argument_are_in_order(rand: Rand, way: str) -> None:
    def f(pair: Pair) -> Any:
        return {name: value * 2 for name, value in vars(pair).items()}

    def argument(i: int, n: int) -> Pair:
        pair = Pair(0, rand(i, n, 3))
        del pair.first
        pair.first = rand(i + 50, n, 3)
        return pair

    fast = ol.graph(f, **WAYS[way])
    with torch.no_grad():
        for i in range(12):
            n = (3, 5)[i % 2]
            expected, got = f(argument(i, n)), fast(argument(i, n))
            assert list(got) == list(expected) == ["second", "first"]
            assert_same(got, expected)
    assert replays(fast) >= 4
