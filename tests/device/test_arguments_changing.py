"""Arguments that are others at each call: what is said of them, and when."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import assert_same, replays

Rand = Callable[..., Tensor]


class Data:
    """A plain object with tensors, as a batch of torch-geometric is."""

    def __init__(self, x: Tensor, size: int = 3) -> None:
        self.x, self.size = x, size


def warned(fast: Any, calls: list[tuple[Any, ...]]) -> list[tuple[int, str]]:
    """The warnings of these calls, by the number of the call."""
    found: list[tuple[int, str]] = []
    with torch.no_grad():
        for i, args in enumerate(calls):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fast(*args)
            found += [(i, str(w.message)) for w in caught]
    return found


@pytest.mark.parametrize("value", [lambda i: i / 7, lambda i: i], ids=["float", "int"])
def test_a_number_that_changes_is_named_early(rand: Rand, value: Callable[[int], Any]) -> None:
    def f(x: Tensor, options: dict[str, Any]) -> Tensor:
        return x * options["scale"]

    fast = ol.graph(f, warmup=1)
    calls = [(rand(i, 3), {"scale": value(i), "mode": "a"}) for i in range(30)]
    ((number, text),) = warned(fast, calls)
    assert number < 10
    assert "[OL301]" in text
    assert "`args[1]['scale']`" in text
    assert "0-dim tensor" in text
    with torch.no_grad():
        for i in range(4):  # as the warning says
            scale = torch.tensor(i / 7)
            assert_same(fast(rand(i, 3), {"scale": scale}), rand(i, 3) * scale)
    assert replays(fast) >= 2


def test_an_object_that_changes_is_named_early(rand: Rand) -> None:
    fast = ol.graph(lambda data, k: data.x * data.size * k, warmup=1)
    ((number, text),) = warned(fast, [(Data(rand(i, 3)), 2) for i in range(30)])
    assert number < 10
    assert "[OL302]" in text
    assert "a Data" in text
    assert "args[0]" in text


def test_numbers_that_come_again_are_not_named(rand: Rand) -> None:
    fast = ol.graph(lambda x, s: x * s, warmup=1)
    assert not warned(fast, [(rand(i, 3), i // 2) for i in range(40)])
    fast = ol.graph(lambda x, s: x * s, warmup=1)
    assert not warned(fast, [(rand(i, 3), i % 5) for i in range(40)])


def test_sizes_and_other_arguments_that_change_are_not_named(rand: Rand) -> None:
    fast = ol.graph(lambda x, s: x * s, warmup=1)
    assert not warned(fast, [(rand(i, 3 + i), i) for i in range(12)])
    fast = ol.graph(lambda x, *s: x * s[0] + s[1], warmup=1)
    assert not warned(fast, [(rand(i, 3), i, -i) for i in range(12)])
