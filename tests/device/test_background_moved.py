"""`capture="background"`: state that moves during a capture, or that the first call changes."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.beside import is_beside
from onelaunch.capture import result

from .drop_in import Rand, assert_same
from .test_background import captured, idle, network


def doubled(x: Tensor) -> Tensor:
    return x * 2


def tripled(x: Tensor) -> Tensor:
    return x * 3


class State:
    """What the callable reads, each way by another check."""

    def __init__(self) -> None:
        self.scales = [2.0, 3.0]
        self.table = {"shift": 1.0}
        self.part = SimpleNamespace(scale=2.0)

        def step(x: Tensor) -> Tensor:
            return x * 2

        self.step = step

    def __call__(self, x: Tensor) -> Tensor:
        for scale in (*self.scales, *self.table.values()):
            x = x * scale
        x = self.step(x) * self.part.scale * getattr(self, "late", 1.0)
        return x + 1 if torch.backends.cudnn.benchmark else x


CHANGES: dict[str, Callable[[State], Any]] = {
    "a list grows": lambda state: state.scales.append(5.0),
    "a dict grows": lambda state: state.table.update(scale=5.0),
    "an attribute appears": lambda state: setattr(state, "late", 5.0),
    "an object gets another dict": lambda state: setattr(state.part, "__dict__", {"scale": 5.0}),
    "a function gets other code": lambda state: setattr(state.step, "__code__", tripled.__code__),
    "a flag": lambda state: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_state_that_moves_before_the_guard_is_made(
    rand: Rand, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard would expect the new state, of which the recording knows nothing."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    state, left, original = State(), [1], result.dependencies

    def moving(*args: Any) -> Any:
        if is_beside() and left:
            left.clear()
            CHANGES[kind](state)
        return original(*args)

    monkeypatch.setattr(result, "dependencies", moving)
    fast = ol.graph(state, capture="background")
    captured(fast, 1, lambda: fast(rand(0, 3)))
    assert not left
    for i in range(5):
        assert_same(fast(rand(i, 3)), state(rand(i, 3)))


def test_state_that_only_the_first_call_shows(rand: Rand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk before the first call does not find it: a module that the callable imports."""
    module: Any = types.ModuleType("counting")
    module.calls = 0
    monkeypatch.setitem(sys.modules, "counting", module)

    def f(x: Tensor) -> Tensor:
        import counting

        if not is_beside():
            time.sleep(0.02)  # the capture may run first
        counting.calls += 1
        return x * counting.calls

    fast: Any = ol.graph(f, capture="background")
    for i in range(12):
        assert_same(fast(rand(i, 3)), rand(i, 3) * (i + 1))
        idle(fast)
    assert module.calls == 12


def test_a_flag_that_is_set_and_comes_back(rand: Rand) -> None:
    """A capture meets the flag of another thread, for which it stands itself here."""

    def f(x: Tensor) -> Tensor:
        try:
            torch._C._set_cudnn_benchmark(is_beside())
            return x * 2 if torch._C._get_cudnn_benchmark() else x + 1
        finally:
            torch._C._set_cudnn_benchmark(False)

    fast: Any = ol.graph(f, capture="background")
    for i in range(30):
        assert_same(fast(rand(i, 3)), rand(i, 3) + 1)
        time.sleep(0.002)
        idle(fast)


def test_weights_that_move_just_before_the_guard_is_made(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard would take their new addresses, and the recording reads the old memory."""
    net, moves = network(device), [1]
    own = result.StateGuard

    def guard(*args: Any, **kwargs: Any) -> Any:
        if is_beside() and moves:  # as a call of another thread may do
            moves.pop()
            for p in net.parameters():
                p.data = p.data * 2
        return own(*args, **kwargs)

    monkeypatch.setattr(result, "StateGuard", guard)
    fast: Any = ol.graph(net, capture="background")
    with torch.no_grad():
        captured(fast, 1, lambda: fast(rand(0, 3, 4)))
        assert not moves
        for i in range(3):
            assert_same(fast(rand(i, 3, 4)), net(rand(i, 3, 4)))
