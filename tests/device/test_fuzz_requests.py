"""Random services; `python -m tests.fuzz.requests` runs more of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fuzz import requests

PROGRAMS = {"cpu": 15, "tape": 20, "cuda": 40}


def test_requests_are_right_or_refused(device: torch.device) -> None:
    count = PROGRAMS[device.type]
    said: list[str] = []
    found = requests.fuzz(range(1, 1 + count), device, said.append)
    assert not said, said[0]
    assert found["replayed"] > count / 2


def test_a_wrong_service_is_found_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer sees what is wrong: here, a count that stays as it was."""

    def counts_nothing(net: Any, **options: object) -> Any:
        def fast(x: torch.Tensor, cache: Any) -> torch.Tensor:
            result = net(x, cache)
            cache.n = 0
            return result

        fast.recordings = ()  # type: ignore[attr-defined]
        return fast

    monkeypatch.setattr(requests.ol, "graph", counts_nothing)
    said: list[str] = []
    found = requests.fuzz(range(1, 40), torch.device("cpu"), said.append)
    assert found["wrong"] == len(said) > 0
