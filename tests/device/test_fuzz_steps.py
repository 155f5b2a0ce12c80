"""Random interleavings of training; `python -m tests.fuzz.steps` runs more of them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import steps

PROGRAMS = {"cpu": 11, "tape": 5, "cuda": 10}


@pytest.mark.parametrize("part", range(3))
def test_programs_are_right_or_refused(device: torch.device, part: int) -> None:
    count = PROGRAMS[device.type]
    said: list[str] = []
    start = 1 + part * count
    found = steps.fuzz(range(start, start + count), device, said.append)
    assert not said, said[0]
    assert found["replayed"] > count / 3


@pytest.mark.parametrize("device", ["tape"], indirect=True)
@pytest.mark.thorough
def test_compiled_programs(device: torch.device) -> None:
    said: list[str] = []
    found = steps.fuzz((5, 6, 8, 9, 11, 12, 14), device, said.append, "compile")
    assert not said, said[0]
    assert found["replayed"] > 3
