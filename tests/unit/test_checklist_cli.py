"""`onelaunch optimize`: the table, files and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import onelaunch as ol
from onelaunch.tools.checklist import optimize as module
from onelaunch.tools.checklist.steps import STEPS as ALL
from onelaunch.tools.cli.optimize import STEPS
from tests.unit.reported import page_of


def test_the_names_of_the_steps_are_those_of_the_library() -> None:
    assert list(STEPS) == list(dict.fromkeys(step.name.partition(":")[0] for step in ALL))


@pytest.mark.thorough
def test_a_plan_is_found_and_saved(
    command: Any, targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    steps = "eval,inference-mode,int8,half:bf16,fold-batchnorm"
    words = ["--max-error", "0.05", "--seconds", "30", "--steps", steps, "--plan", str(file)]
    code, shown, _ = command("optimize", "FILE:trained", *words, "--report", str(page))
    assert code == 0
    plan = ol.Plan.from_json(file.read_text())
    assert page.read_text() == page_of(plan)
    assert plan.workload == f"{targets}:trained"
    assert plan.steps[0] == "eval"
    assert "no BatchNorm with running statistics runs in it" in shown
    assert f'plan = ol.Plan.from_json(Path("{file}").read_text())' in shown.replace("\n", "")
    assert "fast = plan.apply(model, args)" in shown
    for trial in plan.trials:
        assert trial.step in shown


def test_an_interrupt_before_there_is_anything(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "make_reference", stop)
    code, _, err = command("optimize", "FILE:trained", "--steps", "eval")
    assert code == 130
    assert "stopped before there was anything to show" in err
