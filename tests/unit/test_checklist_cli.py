"""`onelaunch optimize`: the table, files, exit codes, mistakes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.tools.checklist import optimize as module
from onelaunch.tools.checklist.steps import STEPS as ALL
from onelaunch.tools.cli import run
from onelaunch.tools.cli.optimize import STEPS
from tests.unit.reported import page_of

TARGETS = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), (torch.ones(2, 32),)

def broken():
    def call(x):
        raise LookupError("no weights here")
    return call, (torch.ones(2),)

def trains():
    net = nn.Linear(8, 3)
    def step(x):
        net(x).sum().backward()
        return x * 2
    return step, (torch.ones(2, 8),)
"""


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of factories, and not enough seconds to wait for."""
    file = tmp_path / "targets.py"
    file.write_text(TARGETS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "targets", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return str(file)


def test_the_names_of_the_steps_are_those_of_the_library() -> None:
    assert list(STEPS) == list(dict.fromkeys(step.name.partition(":")[0] for step in ALL))


@pytest.mark.thorough
def test_a_plan_is_found_and_saved(
    targets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    steps = "eval,inference-mode,int8,half:bf16,fold-batchnorm"
    words = ["--max-error", "0.05", "--seconds", "30", "--steps", steps, "--plan", str(file)]
    assert run(["optimize", f"{targets}:model", *words, "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    plan = ol.Plan.from_json(file.read_text())
    assert page.read_text() == page_of(plan)
    assert plan.workload == f"{targets}:model"
    assert plan.steps[0] == "eval"
    assert "no BatchNorm with running statistics runs in it" in shown
    assert f'plan = ol.Plan.from_json(Path("{file}").read_text())' in shown.replace("\n", "")
    assert "fast = plan.apply(model, args)" in shown
    for trial in plan.trials:
        assert trial.step in shown


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--steps", "grahp"], "no step is called grahp"),
        (["--steps", "grahp,fold-batchnorms"], "fix:   --steps graph,fold-batchnorm\n"),
        ([], "there is no file no_such_file.py"),
        (["--steps", ","], "no step is named"),
        (["--seconds", "0"], "--seconds is 0"),
        (["--max-error", "-1"], "--max-error is -1"),
        (["--max-error", "nan"], "--max-error is nan"),
        (["--plan", "nowhere/plan.json"], "there is no folder nowhere"),
    ],
)
def test_mistakes_are_told_before_the_work(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["optimize", "no_such_file.py:model", *words]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("broken", "the callable raised LookupError: no weights here"),
        ("trains", "steps are measured in inference, without grad, and this runs a backward"),
        ("absent", "has no `absent`"),
    ],
)
def test_a_target_that_does_not_run(
    targets: str, name: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.no_grad():
        code = run(["optimize", f"{targets}:{name}", "--seconds", "1"])
    assert code == 2
    assert what in capsys.readouterr().err


def test_an_interrupt_before_there_is_anything(
    targets: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "make_reference", stop)
    assert run(["optimize", f"{targets}:model", "--steps", "eval"]) == 130
    assert "stopped before there was anything to show" in capsys.readouterr().err


def test_a_module_is_what_apply_takes() -> None:
    """The code that the command prints, run."""
    plan = ol.optimize(nn.Linear(8, 4), (torch.ones(2, 8),), steps=["eval"], seconds=1).plan
    fast = plan.apply(nn.Linear(8, 4), (torch.ones(2, 8),))
    assert fast(torch.ones(2, 8)).shape == (2, 4)
