"""The benchmark of `ol.optimize`: its workloads, its targets, its table; one workload for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import optimize, render
from benchmarks.optimize import ROUNDS, measure, targets
from benchmarks.optimize_workloads import KINDS, LARGE, ORDER, SMALL, WORKLOADS, ViT
from benchmarks.processes import write
from onelaunch.tools.bench.environment import environment


def test_every_workload_has_a_name_and_a_place() -> None:
    assert set(ORDER) <= set(WORKLOADS) & set(render.NAMES)
    assert set(ORDER) == {*SMALL, *LARGE, *KINDS}


def test_the_newer_kinds_run() -> None:
    with torch.device("meta"):
        assert ViT()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    pytest.importorskip("transformers", reason="needs transformers")
    net, args = KINDS["decoder"]()
    with torch.no_grad():
        assert net(*args).shape == (1, 32000)


def timed(us: float, **found: Any) -> dict[str, Any]:
    return {"timing": {"median_us": us, "spread_us": 0.0, "samples": 3}, **found}


def test_targets_are_those_asked_for() -> None:
    rows = {"incumbent": timed(280.0), "exact": timed(300.0), "1e-2": timed(250.0)}
    rows["exact incumbent"] = timed(300.0)
    exact, any_of_them, loose = targets("bert", rows)
    assert exact["met"]
    assert not any_of_them["met"]
    assert not loose["met"]
    assert loose["limit_us"] == pytest.approx(1.02 * 280 / 1.5)
    (bf16,) = targets("vit", {"incumbent": timed(100.0), "1e-2": timed(110.0)})
    assert not bf16["met"]
    assert targets("mlp", {"exact": {"status": "failed"}}) == []


@pytest.mark.thorough
def test_a_workload_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimize, "INCUMBENTS", ("eager", "no_grad", "by-hand"))
    monkeypatch.setattr(optimize, "SMALL", ())  # no max-autotune
    monkeypatch.setattr(optimize, "ROUNDS", 3)
    found = only_quick(monkeypatch)
    assert found["rows"]["incumbent"]["engine"] in ("eager", "no_grad")
    assert {e["status"] for e in found["rows"]["incumbent"]["engines"]} == {"ok", "missing"}
    for row in ("eager", "incumbent", "exact incumbent", "exact", "1e-2"):
        assert found["rows"][row]["timing"]["samples"] == 3 < ROUNDS
    results = {"environment": environment(), "workloads": {"linear_small": found}}
    write(tmp_path / "optimize.json", results)
    page = render.render("<!-- begin:optimize -->\n<!-- end:optimize -->\n", tmp_path)
    assert "| Linear 10-64-10 (10,) |" in page
    assert page.count("|") > 20


def only_quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Measure a small workload with the steps that take no compiler."""
    search = optimize.ol.optimize

    def quick(*args: Any, **options: Any) -> Any:
        return search(*args, steps=["inference-mode", "half:bf16", "int8"], **options)

    monkeypatch.setattr(optimize.ol, "optimize", quick)
    return measure("linear_small", 10.0)


def test_a_row_that_failed_leaves_the_others() -> None:
    def broken() -> dict[str, Any]:
        raise LookupError("no kernel")

    assert optimize.noted("mlp", "exact", broken) == {
        "status": "failed",
        "reason": "LookupError: no kernel",
    }
    (cells,) = render.rows_of(
        {"mlp": {"rows": {"eager": timed(12.0), "exact": {"status": "failed"}}}}, {}, str
    )
    assert cells[:4] == ("mlp", "12.0", "-", "failed")
