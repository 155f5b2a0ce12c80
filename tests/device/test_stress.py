"""The stress tests at a size for every commit; tests/gpu has them in full."""

from __future__ import annotations

import pytest
import torch

from . import stress


@pytest.mark.thorough
def test_mixed_calls(device: torch.device) -> None:
    stress.mixed_calls(device, 5000 if device.type == "cpu" else 3000)


@pytest.mark.thorough
def test_threads_on_streams(device: torch.device) -> None:
    stress.threads_on_streams(device, threads=4, calls=200, slow_size=128)


@pytest.mark.parametrize("inputs", ["copy", "rebind"])
def test_queued(device: torch.device, inputs: str) -> None:
    stress.queued(device, 300, inputs, torch.float32, 4, 16)
