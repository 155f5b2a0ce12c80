"""Random programs that are refused half-way; `python -m tests.fuzz.rollback` runs more of them."""

from __future__ import annotations

import pytest
import torch

from onelaunch.state.rollback import Rollback
from tests.fuzz import rollback

PROGRAMS = {"cpu": 25, "tape": 25, "cuda": 25}


@pytest.mark.parametrize("part", range(4))
def test_state_is_as_in_eager_or_as_before(device: torch.device, part: int) -> None:
    count = PROGRAMS[device.type]
    said: list[str] = []
    start = 1 + part * count
    found = rollback.fuzz(range(start, start + count), device, said.append)
    assert not said, said[0]
    assert found["OL101"] > count / 3
    assert found["OL102"] > 0


def test_a_rollback_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rollback, "restore", lambda self: None)
    said: list[str] = []
    found = rollback.fuzz(range(1, 8), torch.device("cpu"), said.append)
    assert found["wrong"] == len(said) > 3
