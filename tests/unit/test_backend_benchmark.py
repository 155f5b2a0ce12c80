"""The benchmark of the backend runs on any machine, and judges by the targets as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import render
from benchmarks.backend import Built, main, targets
from benchmarks.backend_workloads import WORKLOADS, made
from onelaunch.tools.bench.timers import Timing


@pytest.mark.parametrize("name", ["sine", "breaks", "host", "decode", "train-sine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_repeats(name: str, dtype: torch.dtype) -> None:
    begun: list[int] = []
    work = made(name, dtype)
    step = work.step(lambda fn: fn, lambda: begun.append(1))
    first, second = step(), step()
    assert len(begun) == 2
    torch.testing.assert_close(first, second)
    given = first[0] if work.train else first
    assert isinstance(given, Tensor)
    assert given.isfinite().all()
    assert given.requires_grad is False


@pytest.mark.parametrize("name", ["breaks", "large"])
def test_graph_breaks_break_the_graph(name: str) -> None:
    """A break in a loop leaves the whole function to eager."""
    work, graphs = made(name, torch.float32), []
    torch._dynamo.reset()
    run = torch.compile(work.fn, backend=lambda graph, inputs: graphs.append(graph) or graph)
    with torch.no_grad():
        run(*work.args)
    torch._dynamo.reset()
    assert len(graphs) == 3


def row(variant: str, host: float, wall: float, build: float) -> Built:
    timings = {"host": Timing(host, 0.1, 9), "wall": Timing(wall, 0.1, 9)}
    return Built(variant, variant, build_seconds=build, **timings)


ROWS = [
    row("backend", 20.0, 100.0, 12.0),
    row("reduce-overhead", 30.0, 101.0, 10.0),
    row("cudagraphs", 25.0, 190.0, 3.0),
    row("graph", 12.0, 114.0, 0.1),
]


def test_targets() -> None:
    def missed(name: str) -> set[str]:
        return {t.rule for t in targets(name, ROWS) if not t.met}

    always = {"0.6x reduce-overhead", "1.1x reduce-overhead"}
    assert missed("bert") == always
    assert missed("host") == always | {"0.5x the cudagraphs backend"}
    assert missed("train-sine") == always
    assert missed("train-bert") == always | {"0.87x our own without compile"}
    failed = Built("reduce-overhead", "reduce-overhead", "failed", "not built in time")
    assert targets("sine", [ROWS[0], failed]) == []


def test_every_workload_has_a_name() -> None:
    assert render.BACKEND_NAMES.keys() == WORKLOADS.keys()


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gives")
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "backend.json"
    small = ["--seconds", "0.2", "--workload-seconds", "120"]
    assert main(["--workloads", "sine", *small, "--out", str(out)]) == 0
    assert "reduce-overhead" in capsys.readouterr().out
    rows = {r["variant"]: r for r in json.loads(out.read_text())["fp32"]["sine"]["rows"]}
    for name in ("eager", "cudagraphs", "graph", "backend-eager"):
        assert rows[name]["status"] == "ok", rows[name]
        assert rows[name]["build_seconds"] > 0
    assert rows["backend-eager"]["notes"] == ["0 recordings"]
    page = render.render("<!-- begin:backend -->\n<!-- end:backend -->\n", tmp_path)
    assert "| sin of cos |" in page
