"""Random programs on graphs of random sizes; `python -m tests.fuzz.ragged` runs more of them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import ragged


@pytest.mark.parametrize("part", range(2))
def test_programs_are_right_or_refused(device: torch.device, part: int) -> None:
    said: list[str] = []
    count = 15
    found = ragged.fuzz(range(1 + part * count, 1 + (part + 1) * count), device, said.append)
    assert not said, said[0]
    assert found["right"] > count / 8
    assert found["refused"] > count / 8
