"""State that a call replaces by another object, or keeps in a set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from .side_by_side import right_or_refused

Rand = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0


class Plain:
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.n == self.n

    def __hash__(self) -> int:
        return hash(self.n)


class Named(NamedTuple):
    n: int = 0


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("kind", [Frozen, Plain, Named, "dict", "list"])
def test_a_position_in_an_object_of_each_step(
    device: torch.device, rand: Rand, kind: Any, read: bool
) -> None:
    """https://github.com/sgl-project/sglang-omni/issues/801

    A streaming state holds a position, and each step makes the next state from the last."""

    def next_of(state: Any) -> Any:
        if kind == "dict":
            return {**state, "n": state["n"] + 1}
        return [state[0] + 1] if kind == "list" else kind(state.n + 1)

    def number(state: Any) -> Any:
        if kind == "dict":
            return state["n"]
        return state[0] if kind == "list" else state.n

    def program(graph: Any) -> Iterator[Any]:
        first: Any = {"dict": {"n": 0}, "list": [0]}
        stream = SimpleNamespace(state=first[kind] if isinstance(kind, str) else kind())

        def step(x: Tensor) -> Tensor:
            y = x + number(stream.state) if read else x * 2
            stream.state = next_of(stream.state)
            return y

        fast = graph(step)
        for i in range(12):
            yield fast(rand(i, 3)), number(stream.state)

    right_or_refused(program, device)


def test_a_position_and_a_tensor_in_such_an_object(device: torch.device, rand: Rand) -> None:
    """https://github.com/fangwei123456/spikingjelly/pull/717

    `outputs, states = forward(inputs, states)`, with the states kept in between."""

    @dataclasses.dataclass
    class State:
        n: int
        h: Tensor

    def program(graph: Any) -> Iterator[Any]:
        stream = SimpleNamespace(state=State(0, torch.zeros(3, device=device)))

        def step(x: Tensor) -> Tensor:
            state = stream.state
            stream.state = dataclasses.replace(state, n=state.n + 1, h=state.h * 0.5 + x)
            return stream.state.h * 2 + state.n

        fast = graph(step)
        for i in range(12):
            yield fast(rand(i, 3)), stream.state.n, stream.state.h

    right_or_refused(program, device)


@pytest.mark.parametrize("warmup", [1, 3])
def test_what_was_seen_is_a_set(device: torch.device, rand: Rand, warmup: int) -> None:
    """https://github.com/sgl-project/sglang/pull/973

    What was seen so far is a set of the host's, which grows within the call."""

    def program(graph: Any) -> Iterator[Any]:
        seen = {0}

        def step(x: Tensor) -> Tensor:
            seen.add(max(seen) + 1)
            return x * 2

        fast = graph(step)
        for i in range(8):
            yield fast(rand(i, 3)), sorted(seen)

    right_or_refused(program, device, "OL307", "OL309", "OL118", warmup=warmup)


def test_a_function_that_the_call_stores(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/2831

    Work on the host inside of a captured callable: it stores which function it used."""

    def program(graph: Any) -> Iterator[Any]:
        last = SimpleNamespace(used=None, config=None)
        config = SimpleNamespace(scale=2.0)

        def step(x: Tensor) -> Tensor:
            last.used, last.config = torch.relu, config
            return torch.relu(x) * config.scale

        fast = graph(step)
        for i in range(10):
            if i in (5, 8):
                last.used = last.config = None
            yield fast(rand(i, 3)), [last.used is torch.relu, last.config is config]

    right_or_refused(program, device)
