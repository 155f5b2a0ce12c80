"""The benchmark of the tape runs on any machine, and judges by its limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.tape import ORDER, Row, main, sine_step, summary
from examples.workloads import WORKLOADS
from onelaunch.bench.timers import Timing


def test_the_limit() -> None:
    assert Row(ratio=1.2).met
    assert not Row(ratio=1.21).met
    assert not Row("failed", "no result").met


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tape.json"
    assert main(["--quick", "--workloads", "sine,sine_step", "--out", str(out)]) == 0
    assert "sin(2x) (5,), a step of Adam" in capsys.readouterr().out
    results = json.loads(out.read_text())
    rows = results["workloads"]
    assert {name: row["status"] for name, row in rows.items()} == {"sine": "ok", "sine_step": "ok"}
    assert all(row["eager"]["samples"] == row["replay"]["samples"] >= 21 for row in rows.values())
    assert all(row["met"] is (row["ratio"] <= 1.2) for row in rows.values())

    rows["sine"]["ratio"], rows["sine"]["met"] = 1.5, False
    rows["sine_step"]["status"] = "wrong"
    out.write_text(json.dumps(results))
    text = render.render("<!-- begin:tape -->\n<!-- end:tape -->", tmp_path)
    assert "| 1.50x, missed |" in text
    assert "| sin(2x) (5,), a step of Adam | wrong | - | - |" in text
    assert render.render(text, tmp_path) == text


def test_a_row_in_words() -> None:
    row = {"status": "wrong", "reason": "not the bits of eager"}
    assert "wrong: not the bits of eager" in summary("sine", row)
    timed = {"median_us": 2.0, "spread_us": 0.1}
    row = {"status": "ok", "eager": timed, "replay": timed, "ratio": 1.0, "met": True}
    assert "1.00x  met" in summary("sine", row)
    assert Timing.of([2.0]).median_us == 2.0


def test_a_step_as_one_callable_is_checked() -> None:
    pair = sine_step()
    assert pair.same()
    pair.eager()
    assert not pair.same()


def test_its_workloads_exist() -> None:
    assert set(ORDER) - {"sine_step"} <= set(WORKLOADS)
    assert set(ORDER) <= set(render.NAMES)
