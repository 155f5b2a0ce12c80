"""Random programs, bit for bit eager.

`ONELAUNCH_PROGRAMS` sets how many (500); the number that ran is printed, and goes to
programs.json in the folder that `ONELAUNCH_RESULTS` names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from .drop_in import drop_in_worlds
from .programs import Program, programs
from .results import report

OPTIONS: list[dict[str, str]] = [{}, {}, {"inputs": "rebind"}, {"outputs": "static"}]
MODES: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
    torch.no_grad,
    torch.no_grad,
    torch.inference_mode,
]
COUNT = int(os.environ.get("ONELAUNCH_PROGRAMS", "500"))


def world(program: Program, device: torch.device) -> Any:
    state = program.initial_state(device)

    def f(tensors: list[Tensor], constant: Any) -> Any:
        return program.run(tensors, state, constant), None

    def arguments(i: int) -> tuple[Any, ...]:
        # Two calls with each constant in turn; the state is compared as an argument would be.
        return program.arguments(i, device), program.constants[(i // 2) % len(program.constants)]

    return f, arguments


@pytest.mark.thorough
def test_random_programs(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    ran = {"programs": 0, "steps": 0, "replays": 0, "recordings": 0}

    @settings(
        max_examples=COUNT,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs, st.sampled_from(OPTIONS), st.sampled_from(MODES))
    def check(program: Program, options: dict[str, str], mode: Any) -> None:
        # The emulated device runs the host's kernels, so the host says what they admit.
        settled = program.settle(torch.device("cpu") if device.type == "tape" else device)
        fast = drop_in_worlds(
            lambda: world(settled, device),
            calls=8,
            recordings=None,
            min_replays=4,
            mode=mode,
            **options,
        )
        ran["programs"] += 1
        ran["steps"] += len(settled.steps)
        ran["replays"] += sum(r.replays for r in fast.recordings)
        ran["recordings"] += len(fast.recordings)
        fast.reset()

    check()
    with capsys.disabled():
        report("programs.json", device.type, ran)
    assert ran["programs"] >= COUNT
