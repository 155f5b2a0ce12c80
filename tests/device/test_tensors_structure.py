"""Table of tensors: modules, lists, dicts and attributes that come and go between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol

from .test_tensors_slots import Holder, at_once

Rand = Callable[..., Tensor]


def test_forward_replaced_on_the_instance(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(3, 3, device=device), nn.ReLU())
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    model[1].forward = torch.tanh
    at_once(fast, model, rand)
    del model[1].forward
    at_once(fast, model, rand)


def test_layers_added_and_removed(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(3, 3, device=device), nn.ReLU())
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    model.append(nn.Tanh())
    at_once(fast, model, rand)
    del model[1]
    at_once(fast, model, rand)
    model[0] = nn.Identity()
    at_once(fast, model, rand)


def test_a_list_that_grows(rand: Rand) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.terms = [rand(50, 3)]

        def forward(self, x: Tensor) -> Tensor:
            for t in self.terms:
                x = x + t
            return x

    model = Sums()
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    model.terms.append(rand(51, 3))
    at_once(fast, model, rand)
    model.terms.pop(0)
    at_once(fast, model, rand)
    model.terms.clear()
    at_once(fast, model, rand)


def test_a_dict_that_gains_a_key(rand: Rand) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table["w"] if "w" in self.table else x + 1

    model = Looks()
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    model.table["w"] = rand(51, 3)
    at_once(fast, model, rand)
    del model.table["w"]
    at_once(fast, model, rand)


def test_an_optional_attribute_that_is_filled(rand: Rand) -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.bias is None else x + self.bias

    model = Maybe()
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    model.bias = rand(51, 3)
    at_once(fast, model, rand)
    model.bias = None
    at_once(fast, model, rand)


def test_an_attribute_that_appears(rand: Rand) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (3 if hasattr(self, "late") else 2)

    model = Asks()
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    model.late = True
    at_once(fast, model, rand)
    del model.late
    at_once(fast, model, rand)


def test_the_memory_of_a_tensor_that_left_is_not_read(device: torch.device, rand: Rand) -> None:
    """The recording keeps what it reads alive, whatever the caller drops."""
    model = Holder(rand(50, 3), lambda b: b)
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    for seed in range(60, 70):
        model.box = rand(seed, 3)
        for _ in range(4):
            torch.full((3,), float("nan"), device=device)
        at_once(fast, model, rand, calls=3)
    assert len(fast.recordings) <= 10
