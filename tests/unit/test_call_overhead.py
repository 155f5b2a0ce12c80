"""The benchmark of a call's cost runs on any machine, and judges by the targets as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import render
from benchmarks.call_overhead import ORDER, Row, Target, main, targets
from examples.workloads import WORKLOADS
from onelaunch.tools.bench.timers import Timing


def row(variant: str, host: float, wall: float) -> Row:
    return Row(variant, variant, host=Timing(host, 0.1, 9), wall=Timing(wall, 0.1, 9))


ROWS = [
    row("bare", 4.0, 100.0),
    row("onelaunch", 12.0, 104.0),
    row("onelaunch-static", 9.7, 106.0),
    row("onelaunch-rebind", 13.0, 100.0),
    row("reduce-overhead", 66.0, 110.0),
]


def missed(workload: str) -> set[tuple[str, str]]:
    return {(t.variant, t.rule) for t in targets(workload, ROWS) if not t.met}


def test_targets() -> None:
    wall = "1.05x a bare replay, or 3 us above it"
    assert missed("mlp") == {
        ("onelaunch", "1/6 of reduce-overhead"),
        ("onelaunch-rebind", "1/6 of reduce-overhead"),
        ("onelaunch-static", "2.4x a bare replay"),
        ("onelaunch-static", wall),
    }
    assert missed("bert") == {("onelaunch-static", wall)}
    assert missed("cnn") == {("onelaunch-static", wall)}
    assert {t.figure for t in targets("cnn", ROWS)} == {"wall"}


def test_a_small_wall_time_may_be_3_us_more() -> None:
    rows = [row("bare", 4.0, 10.0), row("onelaunch", 12.0, 12.9)]
    assert [str(t) for t in targets("rnn", rows)] == [
        "onelaunch wall 12.9 us, to reach 13.0 (1.05x a bare replay, or 3 us above it): met"
    ]


def test_nothing_is_judged_without_a_bare_replay() -> None:
    rows = [Row("bare", "bare", "missing", "needs an NVIDIA GPU"), *ROWS[1:]]
    assert targets("mlp", rows) == []
    assert not Target("a", "host", "b", 1.0, 1.1).met


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gives")
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "call_overhead.json"
    assert main(["--quick", "--workloads", "mlp", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "no GPU: bare replays and CUDA graphs are missing" in printed
    data = json.loads(out.read_text())["workloads"]["mlp"]
    status = {found["variant"]: found["status"] for found in data["rows"]}
    assert status.pop("bare") == status.pop("reduce-overhead") == "missing"
    assert set(status.values()) == {"ok"}
    assert all(found["host"]["samples"] >= 30 for found in data["rows"] if found["host"])
    assert set(data["parts_us"]) == {"guard check", "tensor check", "allocation", "launch"}

    page = "<!-- begin:call-overhead -->\n<!-- end:call-overhead -->"
    text = render.render(page, tmp_path)
    assert "| MLP (32, 1024) | missing | " in text
    assert render.render(text, tmp_path) == text


def test_its_workloads_exist() -> None:
    assert set(ORDER) <= set(WORKLOADS) & set(render.NAMES)
