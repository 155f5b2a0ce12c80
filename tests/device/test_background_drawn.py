"""`capture="background"` of callables that draw numbers, or take from an iterator."""

from __future__ import annotations

import functools
import itertools
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same

DRAWS: dict[str, Callable[[], Callable[[], Any]]] = {
    "Python": lambda: random.random,
    "NumPy": lambda: np.random.rand,
    "one of Python's": lambda: random.Random(3).random,
    "one of NumPy's": lambda: np.random.default_rng(3).random,
    "one of torch's": lambda: functools.partial(
        torch.rand, (), generator=torch.Generator().manual_seed(3)
    ),
    "an iterator": lambda: iter(range(100)).__next__,
    "a count": lambda: itertools.count().__next__,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_what_draws_is_captured_in_its_calls(rand: Rand, kind: str) -> None:
    """A run beside a call would take its number."""

    def values(graphed: bool) -> list[Tensor]:
        random.seed(3)
        np.random.seed(3)
        draw, found = DRAWS[kind](), []

        def f(x: Tensor) -> Tensor:
            return x * draw()

        options: Any = {"capture": "background", "on_refusal": "eager"}
        call: Any = ol.graph(f, **options) if graphed else f
        with warnings.catch_warnings(action="ignore"):
            for i in range(20):
                found.append(call(rand(i, 3)))
                time.sleep(0.001)
        return found

    assert_same(values(True), values(False))
