"""Numbers and objects that a call moves in odd ways: as eager, or refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .states import World, as_eager


class Episode:
    """One function counts, and another begins anew."""

    def __init__(self) -> None:
        self.t, self.over = 0, False

    def count(self) -> None:
        self.t += 1

    def begin(self) -> None:
        self.t = 0

    def step(self, x: Tensor) -> Tensor:
        if self.over:
            self.begin()
        else:
            self.count()
        return x * 2

    def step_then_begin(self, x: Tensor) -> Tensor:
        self.count()
        if self.over:
            self.begin()
        return x * 2


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["step", "step_then_begin"])
def test_a_count_that_another_function_resets(device: torch.device, how: str) -> None:
    def world() -> World:
        episode = Episode()
        return episode, getattr(episode, how)

    def between(episode: Any, i: int) -> None:
        episode.over = i % 8 >= 5

    as_eager(device, world, between, calls=24)


@pytest.mark.parametrize("warmup", [1, 2, 3])
@pytest.mark.parametrize("slots", [2, 3])
def test_counts_that_go_round(device: torch.device, slots: int, warmup: int) -> None:
    def world() -> World:
        s = SimpleNamespace(a=0, b=1, c=1)

        def f(x: Tensor) -> Tensor:
            if slots == 2:
                s.a, s.b = s.b, s.a + 1
            else:
                s.a, s.b, s.c = s.b, s.c, s.a + 1
            return x * 2

        return s, f

    as_eager(device, world, warmup=warmup)


def test_a_number_that_is_stored_twice(device: torch.device) -> None:
    def world() -> World:
        s = SimpleNamespace(h=1.0)

        def f(x: Tensor) -> Tensor:
            s.h -= 0.25
            s.h = 0.5
            return x * 2

        return s, f

    def between(s: Any, i: int) -> None:
        if i in (8, 14):
            s.h = float(i)

    as_eager(device, world, between, calls=24)


class Gain:
    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Gain({self.value})"


def test_objects_in_turn(device: torch.device) -> None:
    def world() -> World:
        s = SimpleNamespace(gains=[Gain(1.0), Gain(1.0)])

        def f(x: Tensor) -> Tensor:
            gain = s.gains.pop(0)
            s.gains.append(gain)
            return x * gain.value

        return s, f

    def between(s: Any, i: int) -> None:
        if i == 7:
            s.gains[0].value = 5.0

    as_eager(device, world, between, code="OL118")


def test_objects_that_change_places(device: torch.device) -> None:
    def world() -> World:
        s = SimpleNamespace(front=Gain(1.0), back=Gain(2.0))

        def f(x: Tensor) -> Tensor:
            s.front, s.back = s.back, s.front
            return x * 2

        return s, f

    as_eager(device, world, code="OL118")


def test_a_dict_that_is_written_and_replaced(device: torch.device) -> None:
    def world() -> World:
        s = SimpleNamespace(h=torch.zeros(3, device=device), d={})
        s.d = {"a": torch.zeros(3, device=device), "b": torch.ones(3, device=device)}

        def f(x: Tensor) -> Tensor:
            s.d["c"] = s.h[:2]
            s.d = {"a": s.d["b"], "b": x}
            return x * 2

        return s, f

    as_eager(device, world, code="OL105")


@pytest.mark.parametrize("warmup", [1, 3])
def test_a_number_of_an_iterator_that_is_only_stored(device: torch.device, warmup: int) -> None:
    def world() -> World:
        s, ids = SimpleNamespace(id=None), itertools.count()

        def f(x: Tensor) -> Tensor:
            s.id = next(ids)
            return x * 2

        return s, f

    as_eager(device, world, warmup=warmup, code="OL117")
