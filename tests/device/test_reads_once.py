"""A capture reads no frame again that a warm-up has read, unless something has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.frames.watch import FrameWatch

from .drop_in import Rand, assert_same, replays


@dataclass
class Scale:
    scale: float = 2.0
    shift: float = 1.0


@dataclass
class Other:
    scale: float = 3.0
    shift: float = 0.5


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale(4.0, 3.0)
        self.early = True

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first.scale
        if self.early:
            return x
        return x + self.second.shift


def swapped(model: Scaled) -> None:
    model.first, model.second = model.second, model.first


def replaced(model: Scaled) -> None:
    model.first = Other()  # type: ignore[assignment]


def further(model: Scaled) -> None:
    model.early = False


CHANGES: dict[str, Callable[[Scaled], None]] = {
    "swapped": swapped,
    "replaced": replaced,
    "further": further,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_change_before_the_capture(
    change: str, when: int, device: torch.device, rand: Rand
) -> None:
    """What the code reads from then on is guarded, though the code has run before."""
    model = Scaled().to(device)
    fast = ol.graph(model)
    with torch.no_grad():
        for i in range(24):
            if i == when:
                CHANGES[change](model)
            if i == 12:
                model.first.scale = 7.0
            if i == 18:
                model.second.shift = 9.0
            x = rand(i, 3)
            assert_same(fast(x), model.forward(x), f"call {i}")
    assert replays(fast) >= 8


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self.scale, "scale", 3)


class Bare:
    scale: float


@pytest.mark.parametrize("of_class", [False, True])
def test_an_attribute_that_a_new_object_lacks(
    device: torch.device, rand: Rand, of_class: bool
) -> None:
    """The capture is the first run that looks for the attribute there."""
    model = Chosen().to(device)
    fast = ol.graph(model)
    kind = type("Kind", (Bare,), {})
    with torch.no_grad():
        for i in range(16):
            if i == 3:
                model.scale = kind()
            if i == 9:
                (kind if of_class else model.scale).scale = 7.0
            x = rand(i, 3)
            assert_same(fast(x), model.forward(x), f"call {i}")
    assert replays(fast) >= 8


def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_code_that_the_capture_is_the_first_to_run(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = SimpleNamespace(double=False)

    def f(x: Tensor) -> Tensor:
        return doubled(x) if chosen.double else x + 1

    fast = ol.graph(f)
    for i in range(16):
        if i == 3:
            chosen.double = True
        if i == 9:
            monkeypatch.setattr(doubled, "__code__", (lambda x: x * 3).__code__)
        x = rand(i, 3)
        assert_same(fast(x), f(x), f"call {i}")
    assert replays(fast) >= 8


def test_a_capture_reads_few_frames(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).to(device)
    fast: Any = ol.graph(model)
    frames = [0]
    note: Any = getattr(FrameWatch, "_note")  # noqa: B009

    def counted(*given: Any) -> bool:
        frames[0] += 1
        return note(*given)

    monkeypatch.setattr(FrameWatch, "_note", counted)
    counts: list[int] = []
    with torch.no_grad():
        for i in range(4):
            before = frames[0]
            fast(rand(i, 2, 4))
            counts.append(frames[0] - before)
    assert counts[0] >= 40
    assert counts[1:3] == [0, 0]
    assert counts[3] <= 4
