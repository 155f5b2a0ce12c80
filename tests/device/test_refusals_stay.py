"""Refusals that stay: for the mode of the module in which they came, and ahead of calls, too."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.runtime import varied

from .drop_in import Rand, assert_same, replays


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


class Switching(nn.Module):
    """It leaves a mode of torch's changed in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
        return x * 2


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("how", ["raise", "eager"])
def test_training_is_refused_and_inference_is_recorded(
    device: torch.device, rand: Rand, how: Any, calls: int
) -> None:
    module = Switching().train()
    fast = ol.graph(module, on_refusal=how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for _ in range(calls):
            with contextlib.suppress(ol.CaptureError):
                fast(rand(0, 3))
    torch.use_deterministic_algorithms(False)
    module.eval()
    for i in range(8):
        assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
    assert replays(fast) == 5
    module.train()
    with pytest.raises(ol.CaptureError, match="OL119"):
        fast.capture(rand(0, 3))


@pytest.mark.parametrize("how", ["raise", "eager"])
def test_a_capture_ahead_is_refused(device: torch.device, rand: Rand, how: Any) -> None:
    fast = ol.graph(Switching().train(), on_refusal=how)
    with pytest.raises(ol.CaptureError, match="OL119"):
        fast.capture(rand(0, 3))  # pyright: ignore
    assert not fast.recordings  # pyright: ignore
    assert not torch.are_deterministic_algorithms_enabled()


def test_kinds_of_calls_are_forgotten(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service passes the name of each request, and a number."""
    monkeypatch.setattr(varied, "_MOST_FAMILIES", 20)
    fast: Any = ol.graph(lambda x, name, n: x * n, max_recordings=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(60):
            assert_same(fast(rand(i, 3), f"request {i}", i % 5), rand(i, 3) * (i % 5))
    assert len(fast._signatures.varied._families) <= 20
