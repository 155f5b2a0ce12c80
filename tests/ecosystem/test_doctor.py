"""The doctor on architectures of transformers, beside real captures of them on the emulated device.

It blames no model that a capture takes, and names each that one refuses, at the refusal's line.
"""

from __future__ import annotations

from benchmarks.coverage_models.diagnosed import DOCTOR
from benchmarks.coverage_models.pool import Case, run
from benchmarks.doctor import compared

CAPTURED = "albert bart bert bloom clip_vision_model convnext deberta-v2 gpt2 llama t5 vit whisper"
REFUSED = "encodec flaubert idefics3 led longcat_flash mm-grounding-dino reformer vilt"


def test_architectures() -> None:
    names = [*CAPTURED.split(), *REFUSED.split()]
    cases = [Case(f"transformers/{name}", "inference", ["onelaunch", DOCTOR]) for name in names]
    run(cases, "tape", 2, 1200.0, lambda case: None)
    said = {
        case.name: compared(case.rows.get(DOCTOR, {}), case.rows.get("onelaunch", {}))
        for case in cases
    }
    refused = {c.name for c in cases if c.rows.get("onelaunch", {}).get("verdict") == "refused"}
    expected = {case.name: "named" if case.name in refused else "clean" for case in cases}
    assert said == expected, {c.name: c.rows for c in cases if said[c.name] != expected[c.name]}
    assert len(refused) >= 5, refused
