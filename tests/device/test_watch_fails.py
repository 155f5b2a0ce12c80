"""A watch that fails is turned off, and the call goes on; no recording relies on what it saw."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.frames import watch
from onelaunch.frames.reads import Reads
from onelaunch.source import PACKAGE

from .drop_in import Rand, assert_same, compare, replays


class Config:
    def __init__(self) -> None:
        self.scale = 2.0


class Program:
    """A callable that reads an attribute, and whose frames have something to do at their end."""

    def __init__(self) -> None:
        self.config, self.ended = Config(), 0

    def inner(self, x: Tensor) -> Tensor:
        try:
            return x * self.config.scale
        finally:
            self.ended += 1

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(-x)


class Failing:
    """A watch of which a part raises, while `left` is above zero."""

    def __init__(self, kind: type, name: str, left: int) -> None:
        self.kind, self.name, self.left = kind, name, left
        self.part = getattr(kind, name)

    def put(self, patch: pytest.MonkeyPatch) -> Failing:
        patch.setattr(self.kind, self.name, lambda *args: self(*args))
        return self

    def __call__(self, *args: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise KeyError("a fault of the watch's own")
        return self.part(*args)


PARTS = {
    "codes": (watch.FrameWatch, "_facts_of"),
    "calls": (watch.FrameWatch, "_called"),
    "returns": (watch.FrameWatch, "_returned"),
    "loads": (watch.RanFrame, "note"),
    "the end": (Reads, "sum_up"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_one_that_fails_at_first(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch, part: str, times: int
) -> None:
    """NotAllReady runs show what is read; each fault turns off the watch of one run."""
    program, twin = Program(), Program()
    failing = Failing(*PARTS[part], times).put(monkeypatch)
    fast: Any = ol.graph(program, on_refusal="eager")
    for call in range(9):
        if call == 6:
            program.config.scale = twin.config.scale = 3.0
        x = rand(call, 4)
        assert_same(fast(x), twin(x))
    assert failing.left == 0
    assert program.ended >= 6
    assert sys.getprofile() is None
    assert replays(fast) > 0


@pytest.mark.parametrize("part", PARTS)
def test_one_that_always_fails(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    program, twin = Program(), Program()
    Failing(*PARTS[part], 10**9).put(monkeypatch)
    fast: Any = ol.graph(program, warmup=2)
    compare(fast, twin, lambda call: (rand(call, 4),), 2, torch.enable_grad)
    with pytest.raises(ol.CaptureError, match="could not watch the call: KeyError") as caught:
        fast(rand(0, 4))
    assert caught.value.code == "OL117"
    assert sys.getprofile() is None
    eager: Any = ol.graph(program, warmup=1, on_refusal="eager")
    eager(rand(0, 4))
    with pytest.warns(ol.GraphWarning, match="could not watch the call"):
        eager(rand(0, 4))
    for call in range(4):
        program.config.scale = twin.config.scale = float(call)
        assert_same(eager(rand(call, 4)), twin(rand(call, 4)))
    assert not eager.recordings


def test_one_that_watches_onelaunch(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its own files were taken for an installed package's: it waited for its own lock."""
    is_machinery = watch.is_machinery
    mine = (lambda file: not file.startswith(PACKAGE) and is_machinery(file),)
    monkeypatch.setattr(watch, "is_machinery", *mine)
    program, twin = Program(), Program()
    fast: Any = ol.graph(program)
    ended: list[Exception | None] = []

    def run() -> None:
        try:
            for call in range(9):
                program.config.scale = twin.config.scale = 2.0 + (call > 5)
                assert_same(fast(rand(call, 4)), twin(rand(call, 4)))
        except Exception as error:  # noqa: BLE001  told in the main thread
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert ended, "it hangs"
    assert isinstance(ended[0], ol.CaptureError | None), ended[0]


def test_one_that_is_called_in_its_own_work(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for its own lock, and is turned off."""
    found: list[watch.FrameWatch] = []
    returned, note = watch.FrameWatch._returned, watch.RanFrame.note

    def enters(self: watch.FrameWatch, *args: Any) -> None:
        found[:] = [self]
        returned(self, *args)

    def again(self: Any, known: set[int]) -> None:
        note(self, known)
        found[0](sys._getframe(), "call", None)
        found[0](sys._getframe(), "return", None)

    monkeypatch.setattr(watch.FrameWatch, "_returned", enters)
    monkeypatch.setattr(watch.RanFrame, "note", again)
    program, twin = Program(), Program()
    fast: Any = ol.graph(program, warmup=2)
    compare(fast, twin, lambda call: (rand(call, 4),), 2, torch.enable_grad)
    assert str(found[0].failed).startswith("RuntimeError")
    with pytest.raises(ol.CaptureError, match="called in its own work"):
        fast(rand(0, 4))


def test_one_that_fails_in_a_backward(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are right, whatever the watch of the backward does."""
    model = torch.nn.Linear(4, 4).to(device)
    twin = torch.nn.Linear(4, 4).to(device)
    twin.load_state_dict(model.state_dict())
    Failing(*PARTS["loads"], 1).put(monkeypatch)
    fast: Any = ol.graph(model)
    for call in range(7):
        x = rand(call, 2, 4)
        for net, run in ((model, fast), (twin, twin)):
            net.zero_grad()
            run(x).square().sum().backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(one.grad, other.grad)
