"""Floats of the state that each call moves on: one recording, and eager's bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import assert_same, replays
from .states import World, as_eager


class State:
    def __init__(self, v: Any) -> None:
        self.v = v


def added(s: State, x: Tensor) -> Tensor:
    s.v += 0.1
    return x * 2


def added_and_used(s: State, x: Tensor) -> Tensor:
    y = x * s.v
    s.v = s.v - 0.25
    return y


def added_twice(s: State, x: Tensor) -> Tensor:
    s.v += 1
    s.v += 0.7
    return x + s.v


def decayed(s: State, x: Tensor) -> Tensor:
    """As the share of random actions in reinforcement learning."""
    s.v = max(0.02, s.v * 0.9)
    return x * s.v


def turned(s: State, x: Tensor) -> Tensor:
    s.v = 1.5 - s.v
    return x


def cycled(s: State, x: Tensor) -> Tensor:
    s.v = (s.v + 0.5) % 3
    return x * s.v


def by_a_size(s: State, x: Tensor) -> Tensor:
    s.v += x.shape[0] * 0.5
    return x


def infinite(s: State, x: Tensor) -> Tensor:
    s.v += math.inf
    return x


ONE = [added, added_and_used, added_twice, decayed, cycled, by_a_size]


def world_of(f: Callable[[State, Tensor], Tensor], start: Any) -> Callable[[], World]:
    def world() -> World:
        state = State(start)
        return state, lambda x: f(state, x)

    return world


@pytest.mark.cpu
@pytest.mark.parametrize("start", [0.3, True])
@pytest.mark.parametrize("f", ONE)
def test_one_recording_moves_it_on(
    device: torch.device, f: Callable[[State, Tensor], Tensor], start: Any
) -> None:
    fast = as_eager(device, world_of(f, start), calls=14)
    assert len(fast.recordings) == 1
    assert replays(fast) >= 10


@pytest.mark.parametrize("start", [0, -0.0, math.nan])
@pytest.mark.parametrize("f", [*ONE, turned, infinite])
def test_from_special_numbers(
    device: torch.device, f: Callable[[State, Tensor], Tensor], start: Any
) -> None:
    as_eager(device, world_of(f, start), calls=14)


def test_of_several_numbers(device: torch.device) -> None:
    """Each value has its recording: a replay moves a number on by itself."""
    step = [0.1]

    def f(s: State, x: Tensor) -> Tensor:
        s.v += step[0]
        return x

    def between(s: State, i: int) -> None:
        step[0] = 0.1 + i // 4

    as_eager(device, world_of(f, 0.5), between)


def test_a_text_that_grows(device: torch.device) -> None:
    def f(s: State, x: Tensor) -> Tensor:
        s.v += "x"
        return x * 2

    as_eager(device, world_of(f, ""), calls=8)


def test_a_number_that_is_stored_as_it_was(device: torch.device) -> None:
    """A clamp: the capture stores what is there, and a later call finds more."""

    def f(s: State, x: Tensor) -> Tensor:
        if s.v > 4:
            s.v = 5
        else:
            s.v += 1
        return x * 2

    def between(s: State, i: int) -> None:
        if i in (10, 13, 16):
            s.v = i

    as_eager(device, world_of(f, 1), between, calls=20)


def test_a_number_of_the_class_behind_that_of_the_object(device: torch.device) -> None:
    class Shared:
        v: Any = 5

    class Own(Shared):
        v = 5

    def f(s: Any, x: Tensor) -> Tensor:
        type(s[0]).v = s[0].v + 1
        return x + s[0].v

    worlds: tuple[list[Any], list[Any]] = ([Shared()], [Own()])
    fast = ol.graph(lambda x: f(worlds[1], x), warmup=1)
    for i in range(14):
        for world in worlds:
            kind = type(world[0])
            if i == 2:
                world[0].v = True
            if i in (4, 7):
                kind.v = 1
            if i == 8:
                world[0] = kind()
        x = torch.zeros(3, device=device)
        assert_same(fast(x), f(worlds[0], x), f"call {i}")
        assert type(worlds[1][0]).v == type(worlds[0][0]).v, f"call {i}"


@pytest.mark.parametrize("start", [1, 1.0])
def test_attributes_in_another_dict(device: torch.device, start: Any) -> None:
    """As `__setstate__` of some classes sets it, between two calls."""

    def f(s: State, x: Tensor) -> Tensor:
        s.v = s.v + 1
        return x * 2

    def between(s: State, i: int) -> None:
        if i in (3, 7, 8, 12):
            s.__dict__ = {"v": start + 3 * i}

    as_eager(device, world_of(f, start), between, calls=16)
