"""The benchmark of serving runs on any machine, and judges by the targets as they stand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import render, serving, serving_table
from benchmarks.serving_engines import ENGINES, SMALL, Scale
from benchmarks.serving_load import Outcome
from benchmarks.serving_rates import highest_rate
from onelaunch.tools.bench.environment import environment

GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="it is not small on a GPU")


def rate(rate: float) -> dict[str, Any]:
    return {"rate": rate, "wrong": 0, "p50 ms": 3.0, "p99 ms": 19.0, "padding": None}


def phases(answer: float) -> dict[str, Any]:
    found = {"import torch": answer - 1, "first answer": 1.0, "ready": 2.0}
    return {"phases": found, "first answer": answer, "right": True}


LATER = {"longest ms": 3.9, "taken over": True, "afterwards ms": 0.52}
GOOD: dict[str, Any] = {
    "rates": {
        "eager": rate(1000),
        "by-hand": rate(2000),
        "compile-dynamic": {"status": "failed"},
        "onelaunch-batcher": rate(2100),
        "onelaunch-compile": rate(2500),
    },
    "background": {
        "sizes": 64,
        "captured": 64,
        "eager": {"p99 ms": 4.0},
        "while captured": {"p99 ms": 12.0, "bad": 0},
    },
    "start": {"rows": {"eager": phases(6.0), "onelaunch-later": phases(6.5)}},
    "sizes": {"sizes": 51, "warm_up": 4.0, "by hand": 2.0},
    "padding": {
        "rows": [
            {
                "sizes": "1, 2",
                "max_wait_ms": 0.0,
                "rules": {"batcher": {"padding": 0.1}, "fixed": {"padding": 0.2}},
            }
        ]
    },
    "later": {
        "from the first call": LATER,
        "after warm_up": LATER,
        "eager": {"longest ms": 2.0},
        "compile=True ms": 0.5,
    },
    "threads": {
        "threads": 32,
        "seconds": 60.0,
        "wrong": 0,
        "lost": 0,
        "evictions": 9,
        "reserved growth bytes": 0,
        "host growth bytes": 1,
        "host bytes": 1000,
    },
}


def test_what_is_to_be_reached() -> None:
    found = serving.targets(GOOD)
    assert len(found) == 3 + 3 + 1 + 1 + 1 + 3 + 5
    assert [t for t in found if not t["met"]] == []


@pytest.mark.parametrize(
    ("part", "path", "value"),
    [
        ("rates", ("onelaunch-batcher", "rate"), 1999),
        ("rates", ("eager", "rate"), 2100),
        ("rates", ("onelaunch-compile", "wrong"), 1),
        ("background", ("while captured", "p99 ms"), 12.1),
        ("background", ("captured",), 63),
        ("background", ("while captured", "bad"), 1),
        ("start", ("rows", "onelaunch-later", "first answer"), 6.7),
        ("start", ("rows", "onelaunch-later", "right"), False),
        ("sizes", ("warm_up",), 4.1),
        ("padding", ("rows", 0, "rules", "batcher", "padding"), 0.11),
        ("later", ("after warm_up", "longest ms"), 4.1),
        ("later", ("compile=True ms",), 0.45),
        ("threads", ("wrong",), 1),
        ("threads", ("lost",), 1),
        ("threads", ("evictions",), 0),
        ("threads", ("reserved growth bytes",), 1),
        ("threads", ("host growth bytes",), 21),
    ],
)
def test_what_misses_it(part: str, path: tuple[Any, ...], value: float) -> None:
    changed = json.loads(json.dumps(GOOD[part]))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    missed = [t for t in serving.targets({part: changed}) if not t["met"]]
    assert len(missed) == 1
    assert "MISSED" in serving.target_text(missed[0])


def test_the_tables(tmp_path: Path) -> None:
    results = {
        "environment": environment() | {"gpu": "Some GPU"},
        "scale": vars(Scale()),
        "parts": GOOD,
        "targets": serving.targets(GOOD),
    }
    (tmp_path / "serving.json").write_text(json.dumps(results))
    names = "serving", "serving-rates", "serving-start"
    page = "".join(f"<!-- begin:{name} -->\n<!-- end:{name} -->\n" for name in names)
    text = render.render(page, tmp_path)
    assert "| 51 sizes ready, of captures by hand | at most 2 | 2 |" in text
    assert "| buckets by hand | 2,000 | 3.0 | 19.0 | - |" in text
    assert "| torch.compile(dynamic=True) | failed | - | - | - |" in text
    assert '| phase | eager | onelaunch compile="later" |' in text
    assert "| until the first answer | 6.00 | 6.50 |\n| ready | 2.00 | 2.00 |" in text
    assert render.render(text, tmp_path) == text
    assert set(serving_table.TITLES) >= set(ENGINES)
    for file in ("serving.md", "benchmarks.md"):
        assert render.render((render.ROOT / "docs" / file).read_text(), tmp_path / "none")


@pytest.mark.parametrize("most", [100.0, 700.0, 3000.0, 1e9])
def test_the_search_ends_near_the_highest_rate(most: float) -> None:
    scale, asked = Scale(), []
    dice = random.Random(0)

    def measure(rate: float) -> Outcome:
        asked.append(rate)
        slow = scale.limit_ms * 2 if rate > most else dice.random()
        return Outcome([(0.0, slow)] * 100, 0, 0, 0)

    found = highest_rate(scale, measure)
    assert len(asked) <= 12
    if most < scale.first_rate / 16:
        assert found["rate"] == 0.0
    elif most < 1e6:
        assert most / 1.05 <= found["rate"] <= most
    lost = highest_rate(scale, lambda rate: Outcome([(0.0, 1.0)] * 100, 0, 1, 0))
    assert lost["rate"] == 0.0


@GPU
@pytest.mark.thorough
@pytest.mark.parametrize("part", [*serving.PARTS, "rates"])
def test_it_runs_without_a_gpu(part: str, tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    options = ["--only", part, "--engines", "by-hand,onelaunch-batcher", "--minutes", "0.05"]
    assert serving.main([*options, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["targets"] == []
    found = data["parts"][part]
    if part == "rates":
        assert list(found) == ["onelaunch-batcher"]
        row = found["onelaunch-batcher"]
        assert row["rate"] > 0
        assert row["wrong"] == 0
        assert row["captures"] == len(SMALL.rows) * len(SMALL.lengths)
        assert row["replays under load"] > 0
        assert row["eager_calls under load"] == row["warmup_calls under load"] == 0
    elif part == "background":
        assert found["captured"] == SMALL.sizes
        assert found["while captured"]["bad"] == 0
    elif part == "threads":
        assert (found["wrong"], found["lost"], found["errors"]) == (0, 0, [])
        assert found["evictions"] > 0
    elif part == "start":
        assert all(row["right"] for row in found["rows"].values())
    elif part == "sizes":
        assert found["warm_up"] > 0
    elif part == "padding":
        assert all(0 <= row["rules"]["batcher"]["padding"] < 1 for row in found["rows"])
    else:
        assert found["after warm_up"]["calls"] > 0
