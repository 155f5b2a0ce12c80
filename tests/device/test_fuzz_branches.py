"""Random programs with branches; `python -m tests.fuzz.branches` runs more of them."""

from __future__ import annotations

import pytest
import torch

from onelaunch.driver import edges
from tests.fuzz import branches

from .drop_in import on_accelerators


@on_accelerators
@pytest.mark.usefixtures("no_overlaps")
def test_results_are_those_of_eager(device: torch.device) -> None:
    said: list[str] = []
    found = branches.fuzz(range(1, 41), device, said.append)
    assert not said, said[0]
    assert found["parallel"] > 30


@pytest.mark.parametrize("device", ["tape"], indirect=True)
def test_a_missing_edge_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reads, that what writes afterwards has to wait for."""
    needed = edges._needed

    def fewer(groups: list[edges.NodeGroup]) -> object:
        for number, group in enumerate(groups):
            if group.accesses is not None and number % 2:
                group.accesses = [a for a in group.accesses if a.writes]
        return needed(groups)

    monkeypatch.setattr(edges, "_needed", fewer)
    found = [branches.run(branches.program(seed), device)[0] for seed in range(1, 31)]
    assert found.count("wrong") > 3
