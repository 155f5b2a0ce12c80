"""Table of tensors: modules, lists, dicts and attributes that come and go between calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .drop_in import Rand, follows

Changes = list[Callable[[Any], object]]


class Layers(nn.Sequential):
    def __init__(self, rand: Rand) -> None:
        super().__init__(nn.Linear(3, 3), nn.ReLU())
        self.to(rand(0).device)


class Sums(nn.Module):
    def __init__(self, rand: Rand) -> None:
        super().__init__()
        self.terms = [rand(50, 3)]
        self.more = rand(51, 3)

    def forward(self, x: Tensor) -> Tensor:
        for t in self.terms:
            x = x + t
        return x


class Looks(nn.Module):
    def __init__(self, rand: Rand) -> None:
        super().__init__()
        self.table: dict[str, Tensor] = {}
        self.bias: Any = None
        self.more = rand(51, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if self.bias is None else x + self.bias
        x = x * self.table["w"] if "w" in self.table else x + 1
        return x * (3 if hasattr(self, "late") else 2)


class Goes(nn.Module):
    """Goes through its buffers and the attributes of an object."""

    def __init__(self, rand: Rand) -> None:
        super().__init__()
        self.register_buffer("shift", rand(52, 3))
        self.register_buffer("scale", rand(53, 3))
        self.table = SimpleNamespace(shift=2.0, scale=3.0)

    def forward(self, x: Tensor) -> Tensor:
        for t in (*self.buffers(), *vars(self.table).values()):
            x = x * t + 1
        return x


def to_the_end(entries: dict[str, Any], key: str) -> None:
    entries[key] = entries.pop(key)


CASES: dict[str, tuple[Callable[[Rand], Any], Changes]] = {
    "forward of an instance": (
        Layers,
        [
            lambda model: setattr(model[1], "forward", torch.tanh),
            lambda model: delattr(model[1], "forward"),
        ],
    ),
    "layers added and removed": (
        Layers,
        [
            lambda model: model.append(nn.Tanh()),
            lambda model: model.__delitem__(1),
            lambda model: model.__setitem__(0, nn.Identity()),
        ],
    ),
    "layers in another order": (Layers, [lambda model: to_the_end(model._modules, "0")]),
    "attributes in another order": (
        Goes,
        [
            lambda model: to_the_end(model._buffers, "shift"),
            lambda model: to_the_end(vars(model.table), "shift"),
        ],
    ),
    "a list that grows": (
        Sums,
        [
            lambda model: model.terms.append(model.more),
            lambda model: model.terms.pop(0),
            lambda model: model.terms.clear(),
        ],
    ),
    "a dict that gains a key": (
        Looks,
        [lambda model: model.table.update(w=model.more), lambda model: model.table.pop("w")],
    ),
    "an optional attribute that is filled": (
        Looks,
        [
            lambda model: setattr(model, "bias", model.more),
            lambda model: setattr(model, "bias", None),
        ],
    ),
    "an attribute that appears": (
        Looks,
        [lambda model: setattr(model, "late", True), lambda model: delattr(model, "late")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_and_goes(rand: Rand, case: str) -> None:
    kind, changes = CASES[case]
    model = kind(rand)
    follows(model, lambda i: (rand(i, 3),), *(lambda to=to: to(model) for to in changes))
