"""The benchmark of the first replay runs on any machine, and judges by its targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import first_replay, first_replay_models, render
from benchmarks.first_replay_table import missed, warm_rows
from onelaunch.tools.bench.environment import environment

SECONDS = {"seconds": 0.2, "cpu_seconds": 0.1, "import_torch_seconds": 2.0, "eager_seconds": 0.01}


def results(gpu: str | None) -> dict[str, Any]:
    runs = [{**SECONDS, "compilers": []}, {**SECONDS, "seconds": 0.3, "compilers": ["sympy"]}]
    seconds = {"onelaunch": [0.5, 0.7], "by-hand": [0.1, 0.2]}
    found = {
        "environment": environment() | {"gpu": gpu},
        "fresh": [first_replay.row_of("onelaunch", "inference", runs)],
        "warm": [
            first_replay.warm_row("bert", {"status": "ok", "small": False, "seconds": seconds}),
            first_replay.warm_row("hrnet", {"status": "missing", "reason": "no timm"}),
        ],
    }
    return found | {"targets": first_replay.targets(found)}


def test_rows_and_targets() -> None:
    found = results("a GPU")
    (row,) = found["fresh"]
    assert row["seconds"]["median"] == pytest.approx(0.25)
    assert row["compilers"] == ["sympy"]
    assert found["warm"][0]["of by hand"] == pytest.approx(4.0)
    assert found["warm"][0]["buckets of by hand"] is None
    assert [t["met"] for t in found["targets"]] == [True, False]
    assert [t["met"] for t in results(None)["targets"]] == [False, False]
    assert missed(found) == "\nMissed: bert, of by hand 4.00, to reach 3.0.\n"
    assert warm_rows(found)[1] == ("HRNet-W18", "missing", "-", "-", "-")
    text = render.first_replay_fresh(found)
    assert "| onelaunch | 0.250 ± 0.050 | - | - |" in text
    assert "| BERT-base | 0.600 ± 0.100 | 0.150 ± 0.050 |" in render.first_replay_warm(found)


def test_a_fresh_process_is_measured() -> None:
    found = first_replay.fresh("onelaunch", "pair")
    assert found["seconds"] > 0
    assert found["compilers"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the models are large on a GPU")
def test_a_warm_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_replay_models, "BUCKETS", (1, 2))
    found = first_replay_models.measured("resnet50", 1)
    assert found["small"]
    counts = {what: len(times) for what, times in found["seconds"].items()}
    assert counts == {"eager": 1, "onelaunch": 1, "onelaunch bucket": 1}
