"""The doctor on architectures of transformers, beside real captures of them on the emulated device.

It blames no model that a capture takes, and names each that one refuses, at the refusal's line.
"""

from __future__ import annotations

import pytest

from benchmarks.coverage_models.diagnosed import DOCTOR
from benchmarks.coverage_models.pool import Case, run
from benchmarks.doctor import compared

CAPTURED = ("albert bert", "clip_vision_model convnext", "llama t5")
REFUSED = ("encodec flaubert", "reformer vilt")


@pytest.mark.thorough
@pytest.mark.parametrize("names", [*CAPTURED, *REFUSED])
def test_architectures(names: str) -> None:
    cases = [
        Case(f"transformers/{name}", "inference", ["onelaunch", DOCTOR]) for name in names.split()
    ]
    run(cases, "tape", 1, 600.0, lambda case: None)
    said = {
        case.name: compared(case.rows.get(DOCTOR, {}), case.rows.get("onelaunch", {}))
        for case in cases
    }
    refused = {c.name for c in cases if c.rows.get("onelaunch", {}).get("verdict") == "refused"}
    expected = {case.name: "named" if case.name in refused else "clean" for case in cases}
    assert said == expected, {c.name: c.rows for c in cases if said[c.name] != expected[c.name]}
    assert bool(refused) == (names in REFUSED), refused
