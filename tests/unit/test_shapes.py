"""The benchmark of sizes runs on any machine, and judges by the targets as they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import render, shapes_serving
from benchmarks.shapes import PARTS, main, targets
from benchmarks.shapes_recordings import VLLM_SIZES


def held(nbytes: float, seconds: float = 1.0) -> dict[str, float]:
    return {"reserved bytes": nbytes, "seconds": seconds, "driver bytes": 3 << 20}


def call(us: float) -> dict[str, float]:
    return {"median_us": us}


def row(title: str, rate: float, p50: float, p99: float, first: int = 5) -> dict[str, Any]:
    latency, throughput = {"p50 us": p50, "p99 us": p99}, {"per second": rate}
    figures = {"throughput": throughput, "latency": latency, "first pass": first}
    return {"title": title, "status": "ok"} | figures


GOOD: dict[str, Any] = {
    "memory": {
        "sizes": [1, 2],
        "alone": held(100),
        "one pool": held(115),
        "separate pools": held(210),
    },
    "capture": {"sizes": 51, "alone": held(100), "all": held(120, 10.0)},
    "overhead": {
        "exact, one input": call(9.0),
        "padded, one input": call(14.0),
        "exact, three inputs": call(9.0),
        "padded, three inputs": call(19.0),
    },
    "requests": {
        "load": {"requests": 5, "max_batch": 16, "max_length": 64, "layers": 6, "width": 384},
        "engines": {
            "eager": row("eager", 100, 2000, 3000, first=3),
            "by-hand": {"title": "by hand", "status": "failed", "reason": "broken"},
            "onelaunch": row("onelaunch", 900, 300, 500) | {"captures after the first pass": 0},
        },
    },
    "churn": {
        "requests": 1_000_000,
        "reserved growth bytes": 0,
        "device growth bytes": -2,
        "largest pool bytes": 90,
        "budget bytes": 90,
        "evictions": 7,
        "wrong": 0,
    },
}


def test_what_is_to_be_reached() -> None:
    found = targets(GOOD)
    assert len(found) == 1 + 2 + 2 + 4 + 3
    assert [str(t) for t in found if not t.met] == []


@pytest.mark.parametrize(
    ("part", "path", "value"),
    [
        ("memory", ("one pool", "reserved bytes"), 116),
        ("capture", ("all", "reserved bytes"), 121),
        ("capture", ("all", "seconds"), 10.1),
        ("overhead", ("padded, one input", "median_us"), 14.1),
        ("overhead", ("padded, three inputs", "median_us"), 19.1),
        ("requests", ("engines", "eager", "latency", "p99 us"), 499),
        ("requests", ("engines", "eager", "throughput", "per second"), 901),
        ("requests", ("engines", "onelaunch", "captures after the first pass"), 1),
        ("churn", ("wrong",), 1),
        ("churn", ("evictions",), 0),
        ("churn", ("device growth bytes",), 1),
        ("churn", ("largest pool bytes",), 91),
    ],
)
def test_what_misses_it(part: str, path: tuple[str, ...], value: float) -> None:
    changed = json.loads(json.dumps(GOOD[part]))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (missed,) = [t for t in targets({part: changed}) if not t.met]
    assert "MISSED" in str(missed)


def test_the_sizes_are_those_of_vllm() -> None:
    assert len(VLLM_SIZES) == 51
    assert (VLLM_SIZES[0], VLLM_SIZES[-1]) == (1, 512)
    assert list(VLLM_SIZES) == sorted(set(VLLM_SIZES))


def test_the_tables(tmp_path: Path) -> None:
    environment = {"gpu": "Some GPU", "driver": "580", "cuda": "13.0", "torch": "2.11"}
    environment |= {"cudnn TF32": "off"}
    judged = [vars(target) for target in targets(GOOD)]
    results = {"environment": environment, "parts": GOOD, "targets": judged}
    (tmp_path / "shapes.json").write_text(json.dumps(results))
    page = "".join(
        f"<!-- begin:{name} -->\n<!-- end:{name} -->\n" for name in ("shapes", "shapes-serving")
    )
    text = render.render(page, tmp_path)
    assert (
        "| 1,000,000 requests under a budget, evictions | more than 0, the budget kept | 7 |"
        in (text)
    )
    assert "| onelaunch | 900 | 300 | 500 |" in text
    assert "| by hand | failed | - | - |" in text
    assert "up eager had seen 3 of them" in text
    assert "up onelaunch had" not in text
    assert "bfloat16, TF32 off" in text
    assert render.render(text, tmp_path) == text


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gives")
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shapes.json"
    assert main(["--engines", "by-hand,onelaunch", "--out", str(out)]) == 0
    assert "small: no target is judged" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert set(data["parts"]) == set(PARTS)
    assert data["small"]
    assert data["targets"] == []
    engines = data["parts"]["requests"]["engines"]
    assert engines["by-hand"]["status"] == "missing"
    assert engines["onelaunch"]["status"] == "ok"
    assert engines["onelaunch"]["captures after the first pass"] == 0
    assert data["parts"]["memory"]["one pool"]["recordings"] == 3
    churn = data["parts"]["churn"]
    assert churn["wrong"] == 0
    assert churn["evictions"] > 0
    assert churn["largest pool bytes"] <= churn["budget bytes"] < churn["need bytes"]


def test_every_engine_has_a_title() -> None:
    assert set(shapes_serving.TITLES) == set(shapes_serving.ENGINES)
