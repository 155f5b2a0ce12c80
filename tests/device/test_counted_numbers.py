"""A number that the callable reads and moves on, in operations with tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, drop_in_worlds


def _in_place(how: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Any]:
    """Return a program that shows by a second name whether a tensor was written in place."""

    def program(x: Tensor, n: Any) -> Any:
        y = x.clone()
        other = y
        y = how(y, n)
        return y, other

    return program


def _added(y: Tensor, n: Any) -> Tensor:
    y += n
    return y


def _taken_off(y: Tensor, n: Any) -> Tensor:
    y -= n
    return y


def _multiplied(y: Tensor, n: Any) -> Tensor:
    y *= n
    return y


def _divided(y: Tensor, n: Any) -> Tensor:
    y /= n
    return y


FOLLOWED: dict[str, Callable[[Tensor, Any], Any]] = {
    "sum": lambda x, n: (x + n, n + x, torch.add(x, n), x.add(n)),
    "difference": lambda x, n: (x - n, n - x, x.sub(n)),
    "product": lambda x, n: (x * n, n * x, torch.mul(x, n)),
    "comparison": lambda x, n: (x < n, n >= x, x == n, torch.ne(x, n)),
    "expression": lambda x, n: (n + 1) * x - (3 + n),
    "+=": _in_place(_added),
    "-=": _in_place(_taken_off),
    "*=": _in_place(_multiplied),
}
CONSTANT: dict[str, Callable[[Tensor, Any], Any]] = {
    "/=": _in_place(_divided),
    "quotient": lambda x, n: x / n,
    "power": lambda x, n: x**n,
    "float": lambda x, n: x * (n * 0.5),
    "scaled sum": lambda x, n: torch.add(x, n, alpha=2),
    "where": lambda x, n: torch.where(x > 0, n, x),
    "clamp": lambda x, n: x.clamp(max=n),
}


def world(
    how: Callable[[Tensor, Any], Any], rand: Rand, step: int, **kind: Any
) -> tuple[Callable[[Tensor], Any], Callable[[int], tuple[Tensor]]]:
    state = types.SimpleNamespace(n=5)

    def f(x: Tensor) -> Any:
        y = how(x, state.n)
        state.n += step
        return y

    return f, lambda i: (rand(i, 3, **kind),)


@pytest.mark.parametrize("step", [1, 2, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("how", FOLLOWED)
def test_one_recording_follows_it(rand: Rand, how: str, dtype: torch.dtype, step: int) -> None:
    fast = drop_in_worlds(
        lambda: world(FOLLOWED[how], rand, step, dtype=dtype),
        calls=16,
        recordings=None,
        min_replays=13,
    )
    assert fast.stats().captures == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", [*CONSTANT, "sum", "product", "+="])
def test_else_each_value_is_recorded_or_refused(rand: Rand, how: str, dtype: torch.dtype) -> None:
    does = {**FOLLOWED, **CONSTANT}[how]
    made = functools.partial(world, does, rand, 2, dtype=dtype)
    try:
        drop_in_worlds(made, calls=12, recordings=None, min_replays=1)
    except ol.CaptureError as refusal:
        if refusal.code != "OL118":
            raise


@pytest.mark.parametrize("first", [2**53 - 3, -(2**53) - 3, 2**62])
def test_a_number_beyond_floats_is_exact(rand: Rand, first: int) -> None:
    def large() -> Any:
        state = types.SimpleNamespace(n=first)

        def f(x: Tensor) -> Tensor:
            y = x + state.n
            state.n += 1
            return y

        return f, lambda i: (rand(i, 3, dtype=torch.int64),)

    try:
        drop_in_worlds(large, calls=9, recordings=None, min_replays=0)
    except ol.CaptureError as refusal:
        if refusal.code != "OL118":
            raise
