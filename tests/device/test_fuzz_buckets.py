"""Random programs under random buckets; `python -m tests.fuzz.buckets` runs more of them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import buckets

PROGRAMS = {"cpu": 30, "tape": 20, "cuda": 20}


@pytest.mark.parametrize("part", range(4))
def test_programs_are_right_or_refused(device: torch.device, part: int) -> None:
    count = PROGRAMS[device.type]
    said: list[str] = []
    start = 1 + part * count
    found = buckets.fuzz(range(start, start + count), device, said.append)
    assert not said, said[0]
    assert found["right"] > count / 8
    assert found["refused"] > count / 8


def test_the_table_is_large() -> None:
    from tests.fuzz.bucket_operators import FINAL, SAME

    assert len({*SAME, *FINAL}) >= 150
