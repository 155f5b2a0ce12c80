"""Garbage collection in warm-ups and captures, whose walks make many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol

from .drop_in import Rand


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The collections so far, by generation, of a collector that comes often."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def test_walks_cause_few_collections(
    device: torch.device, rand: Rand, collections: list[int]
) -> None:
    """Without a pause, walks of a thousand modules cause five full ones, of 0.1 s or more each."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(40)]
    model = nn.Sequential(*layers).to(device).eval()
    counts: list[list[int]] = []
    for _ in range(2):  # the first imports
        fast: Any = ol.graph(model)
        for i in range(4):
            collections.clear()
            with torch.no_grad():
                fast(rand(i, 2, 4))
            counts.append([*collections])
    assert all(len(found) <= 5 and 2 not in found for found in counts[4:]), counts
