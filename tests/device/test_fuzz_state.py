"""Random programs over random state; `python -m tests.fuzz.state` runs more of them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import state
from tests.fuzz.state_places import LINKS, ROOTS

PROGRAMS = {"cpu": 30, "tape": 20, "cuda": 30}


@pytest.mark.parametrize("part", range(4))
def test_programs_are_right_or_refused(device: torch.device, part: int) -> None:
    count = PROGRAMS[device.type]
    said: list[str] = []
    start = 1 + part * count
    found = state.fuzz(range(start, start + count), device, said.append)
    assert not said, said[0]
    assert found["replayed"] > count / 3


@pytest.mark.parametrize("device", ["tape"], indirect=True)
@pytest.mark.thorough
def test_compiled_programs(device: torch.device) -> None:
    said: list[str] = []
    found = state.fuzz(range(1, 11), device, said.append, "compile")
    assert not said, said[0]
    assert found["replayed"] > 3


@pytest.mark.parametrize("kind", range(len(LINKS)))
def test_each_kind_of_place_alone(device: torch.device, kind: int) -> None:
    for found in state.alone():
        if found.seed == kind:
            verdict, why = state.verdict(found, device)
            assert verdict in ("right", "refused"), f"{found}\n{why}"


def test_there_are_many_kinds_of_places() -> None:
    assert len({*LINKS}) >= 60
    assert len({*ROOTS}) >= 7


def test_a_wrong_program_is_found_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer sees what is wrong: here, a graph that keeps its first result for ever."""

    def frozen(f: object, warmup: int) -> object:
        kept: list[object] = []

        def fast(x: torch.Tensor) -> object:
            kept[:] = kept or [f(x)]  # type: ignore[operator]
            return kept[0]

        fast.recordings = ()  # type: ignore[attr-defined]
        return fast

    monkeypatch.setattr(state.ol, "graph", frozen)
    said: list[str] = []
    found = state.fuzz(range(1, 4), torch.device("cpu"), said.append)
    assert found["wrong"] == len(said) > 0
    assert said[0].count("fast(x)") == 2
