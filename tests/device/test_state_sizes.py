"""State that each call replaces, of sizes or strides that take turns: a recording for each."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same


class Frames(nn.Module):
    """Means over frames. Samples that fill none are kept for the next call, as codecs do."""

    def __init__(self, size: int, device: torch.device, keep: Any = torch.clone) -> None:
        super().__init__()
        self.size, self.keep = size, keep
        self.left = torch.zeros(2, 0, device=device)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left, x], -1)
        n = x.shape[-1] // self.size * self.size
        self.left = self.keep(x[:, n:])
        return x[:, :n].unflatten(-1, (-1, self.size)).mean(-1)


def transposed(t: Tensor) -> Tensor:
    """Other strides at every other size."""
    return t.t().contiguous().t() if t.shape[1] % 2 else t.clone()


@pytest.mark.parametrize(
    "keep", [torch.clone, transposed, lambda t: t], ids=["clone", "transposed", "view"]
)
@pytest.mark.parametrize(
    ("size", "chunk", "turns"),
    [(4, 5, 4), (4, 3, 4), (4, 6, 2), (3, 2, 3), (8, 9, 8), (12, 13, 12)],
)
@pytest.mark.parametrize("warmup", [1, 3])
def test_samples_left_over(
    device: torch.device, rand: Rand, size: int, chunk: int, turns: int, warmup: int, keep: Any
) -> None:
    mine, theirs = Frames(size, device, keep), Frames(size, device, keep)
    fast = ol.graph(mine, warmup=warmup)
    with torch.no_grad():
        for i in range(max(24, 5 * turns)):
            x = rand(i, 2, chunk)
            assert_same(fast(x), theirs(x))
            assert_same(mine.left, theirs.left, "left")
    assert fast.stats().captures <= turns
    assert fast.stats().eager_calls == 0


def test_a_clock_beside_it_is_found(device: torch.device, rand: Rand) -> None:
    """The size explains a difference, and not all of them."""
    frames = Frames(4, device)
    fast = ol.graph(lambda x: frames(x) * time.perf_counter())

    @torch.no_grad()
    def run() -> None:
        for i in range(20):
            fast(rand(i, 2, 5))

    with pytest.raises(ol.CaptureError, match=r"(?s)OL117.*perf_counter"):
        run()
