"""The tape refuses what a bare CUDA capture refuses, and takes what it takes.

The CUDA column comes from a GPU: `python tests/device/refusals.py --driver cuda --out FILE`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from . import refusals

COLUMN = Path(__file__).with_name("refusals_cuda.json")

# Rows that the tape cannot give, and why.
_SEEDED = "the contract refuses what a bare capture does not see: each replay draws on regardless"
_ANSWERED = "the contract refuses what a bare capture freezes: the host has its answer already"
DIFFERENCES = {
    "to_cpu_non_blocking": _ANSWERED,
    "equal": _ANSWERED,
    "manual_seed": _SEEDED,
    "device_manual_seed": _SEEDED,
    "event_recorded": "the host can wait for it only before the capture: CUDA refuses it then",
    "seed_between": _SEEDED,
    "set_rng_state": _SEEDED,
    "unregistered_generator": "onelaunch registers the generators that a callable reaches",
    "where_host_number": "the tape takes a 0-dim host tensor for a number, as most kernels do",
    "pinned_to_device_non_blocking": "the emulated device has no pinned memory",
    "copy_from_pinned_non_blocking": "the emulated device has no pinned memory",
    "copy_to_pinned_non_blocking": "the emulated device has no pinned memory",
}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return json.loads(COLUMN.read_text())["rows"]


def test_the_column_has_every_program(rows: dict[str, dict[str, Any]]) -> None:
    assert set(rows) == set(refusals.PROGRAMS)


@pytest.mark.parametrize("name", refusals.PROGRAMS)
def test_verdict(name: str, rows: dict[str, dict[str, Any]]) -> None:
    cuda, tape = rows[name], refusals.on_tape(name)
    assert cuda["eager"], f"no program: on CUDA it fails without a capture, {cuda['message']}"
    assert tape.eager, f"no program: on the tape it fails without a capture, {tape.message}"
    agrees = cuda["captured"] == tape.captured
    assert agrees != (name in DIFFERENCES), (
        f"CUDA: {'captured' if cuda['captured'] else cuda['message']}; "
        f"tape: {'captured' if tape.captured else tape.message}"
    )


@pytest.mark.parametrize("name", refusals.PROGRAMS)
def test_refusals_of_the_tape_are_explained(name: str) -> None:
    tape = refusals.on_tape(name)
    assert tape.captured or tape.error == "CaptureError", tape.message
