"""The benchmark of training runs on any machine, and judges by the targets as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import long_training, render
from benchmarks.call_overhead import Row
from benchmarks.training import ORDER, RUNS, Reference, main, targets
from benchmarks.training_engines import PARTS, Training, network, whole_step
from onelaunch.bench.timers import Timing


def row(variant: str, wall: float) -> Row:
    return Row(variant, variant, host=Timing(1.0, 0.1, 9), wall=Timing(wall, 0.1, 9))


STEP = [
    row("bare", 100.0),
    row("onelaunch", 106.0),
    row("reduce-overhead", 90.0),
    row("onelaunch-compile", 90.5),
]
PAIR = [
    row("eager", 500.0),
    row("make_graphed_callables", 200.0),
    row("compile", 180.0),
    row("onelaunch", 139.0),
    row("onelaunch-compile", 181.0),
]


def missed(part: str, workload: str, rows: list[Row]) -> set[tuple[str, str]]:
    return {(t.variant, t.rule) for t in targets(part, workload, rows) if not t.met}


def test_targets_of_whole_steps() -> None:
    bare = ("onelaunch", "1.05x a bare replay")
    fastest = ("onelaunch-compile", "1.00x the best incumbent")
    assert missed("step", "mlp", STEP) == {bare, fastest}
    assert missed("step", "bert", STEP) == {bare}


def test_targets_of_pairs() -> None:
    assert missed("pair", "cnn", PAIR) == {("onelaunch", "0.7x the best incumbent")}
    assert missed("pair", "bert", PAIR) == set()
    slower = [*PAIR[:3], row("onelaunch", 203.0), row("onelaunch-compile", 182.0)]
    assert missed("pair", "resnet50", slower) == {
        ("onelaunch", "1.01x the best of eager's kernels"),
        ("onelaunch-compile", "1.01x the best incumbent"),  # the faster of the two
    }


def test_nothing_is_judged_without_figures() -> None:
    for part in PARTS:
        missing = [Row(r.variant, r.title, "missing", "needs an NVIDIA GPU") for r in STEP]
        assert targets(part, "mlp", missing) == []


def test_an_engine_that_trains_wrongly_is_found() -> None:
    model, batches = network("mlp")
    reference = Reference("step", model, batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = whole_step(model, optimizer)
    found = Row("wrong", "another optimizer")
    reference.check(found, Training(step, model, optimizer))
    assert found.status == "wrong"
    assert found.reason is not None
    assert "updates" in found.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gives")
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "training.json"
    wanted = "step:mlp,pair:mlp,long"
    small = ["--seconds", "0.3", "--steps", "40", "--build-seconds", "60"]
    assert main(["--runs", wanted, *small, "--out", str(out)]) == 0
    assert "MLP (32, 1024), step" in capsys.readouterr().out
    data = json.loads(out.read_text())
    for part in PARTS:
        status = {r["variant"]: r["status"] for r in data[part]["mlp"]["rows"]}
        assert status["eager"] == status["onelaunch"] == "ok", data[part]["mlp"]["rows"]
        assert status["reduce-overhead"] == "missing"
    for check in data["long"]["checks"]:
        assert check["parameters equal"], check
        assert check["recordings"] > 0

    page = "".join(
        f"<!-- begin:{name} -->\n<!-- end:{name} -->\n"
        for name in ("training-step", "training-pair")
    )
    text = render.render(page, tmp_path)
    assert "| torch.cuda.make_graphed_callables | missing |" in text
    assert render.render(text, tmp_path) == text


def test_a_table_without_results_is_left_alone(tmp_path: Path) -> None:
    page = "<!-- begin:training-step -->\nNot yet.\n<!-- end:training-step -->\n"
    assert render.render(page, tmp_path) == page


@pytest.mark.parametrize("check", long_training.CHECKS)
def test_changing_batch_sizes_rates_and_accumulation(check: long_training.Check) -> None:
    """Once every size has its recording, none is made anew; the parameters are eager's."""
    found = long_training.run_long(check, 800)
    assert found["parameters equal"], found
    assert found["losses equal"]
    assert found["recordings"] == found["recordings after a quarter"] > 0


def test_its_workloads_exist() -> None:
    assert set(ORDER) <= set(render.NAMES)
    assert {run.partition(":")[0] for run in RUNS} == {*PARTS, "long"}
