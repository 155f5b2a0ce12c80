"""Random programs with values of the host; `python -m tests.fuzz.host_values` runs more of them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import host_values

PROGRAMS = {"cpu": 5, "tape": 8, "cuda": 10}


@pytest.mark.cpu
@pytest.mark.parametrize("part", range(3))
def test_programs_are_right_or_refused(device: torch.device, part: int) -> None:
    count = PROGRAMS[device.type]
    said: list[str] = []
    start = 1 + part * count
    found = host_values.fuzz(range(start, start + count), device, said.append)
    assert not said, said[0]
    # On a CPU a read of a host tensor is one of the device's, and refused.
    assert found["replayed"] > (0 if device.type == "cpu" else count / 3)
