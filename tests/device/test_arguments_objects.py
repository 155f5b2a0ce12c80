"""Objects with tensors among the arguments, the same through a request: of whichever class, their
tensors come with each call."""

from __future__ import annotations

import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same

FIELDS = [("states", Tensor), ("mask", Tensor)]
Box = make_dataclass("Box", FIELDS)
Frozen = make_dataclass("Frozen", FIELDS, frozen=True)
Slotted = make_dataclass("Slotted", FIELDS, slots=True)


class Plain:
    def __init__(self, states: Tensor, mask: Tensor) -> None:
        self.states, self.mask = states, mask


@dataclass
class Output(OrderedDict[str, Any]):
    """As a `ModelOutput` of transformers: its fields are items, too."""

    states: Any = None
    mask: Any = None

    def __post_init__(self) -> None:
        for name in ("states", "mask"):
            self[name] = getattr(self, name)


Pair = namedtuple("Pair", "states mask")


def attend(x: Tensor, encoded: Any) -> Tensor:
    return ((x @ encoded.states.t()) * encoded.mask).softmax(-1) @ encoded.states


def inside(x: Tensor, encoded: Any) -> Tensor:
    return attend(x, encoded["memory"][0])


KINDS = (Box, Frozen, Slotted, Plain, Output, Pair, types.SimpleNamespace)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_recording_serves_all_requests(
    device: torch.device, rand: Rand, kind: Any, nested: bool
) -> None:
    f = inside if nested else attend
    fast = ol.graph(f)
    with torch.no_grad():
        for request in range(8):
            encoded = kind(states=rand(request, 5, 4), mask=rand(request + 1, 5))
            given = {"memory": [encoded]} if nested else encoded
            alike(lambda x, g=given: fast(x, g), lambda x, g=given: f(x, g), rand, 2, 4)
    assert fast.stats().captures == 1
    assert fast.stats().eager_calls == 0


@pytest.mark.parametrize("kind", [Box, types.SimpleNamespace], ids=lambda kind: kind.__name__)
def test_one_that_the_callable_keeps_too(device: torch.device, rand: Rand, kind: Any) -> None:
    kept = kind(states=rand(0, 5, 4), mask=rand(1, 5))

    def f(x: Tensor, encoded: Any) -> Tensor:
        return attend(x, encoded) + attend(x, kept)

    fast = ol.graph(f)
    with torch.no_grad():
        for request in range(4):
            other = kind(states=rand(request, 5, 4), mask=rand(request + 1, 5))
            kept.states = rand(request + 9, 5, 4)
            for token in range(4):
                for encoded in (kept, other):
                    x = rand(token, 2, 4)
                    assert_same(fast(x, encoded), f(x, encoded))


@pytest.mark.parametrize("kind", [Plain, types.SimpleNamespace], ids=lambda kind: kind.__name__)
def test_one_that_the_callable_changes(device: torch.device, rand: Rand, kind: Any) -> None:
    def f(x: Tensor, encoded: Any) -> Tensor:
        encoded.states = encoded.states * 0.5 + x
        return attend(x, encoded)

    fast = ol.graph(f)
    with torch.no_grad():
        for request in range(4):
            mine, theirs = (kind(states=rand(request, 2, 4), mask=rand(1, 2)) for _ in range(2))
            for token in range(6):
                x = rand(token, 2, 4)
                assert_same(fast(x, mine), f(x, theirs))
                assert_same(mine.states, theirs.states, "states")
