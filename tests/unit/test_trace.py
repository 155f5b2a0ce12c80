"""Traces of torch.profiler: read, nested, and laid out as timelines."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from onelaunch.tools.bench import timeline as timelines
from onelaunch.tools.bench.profile import count_kernels
from onelaunch.tools.bench.rows import Comparison
from onelaunch.tools.bench.timeline import record_timeline, timeline
from onelaunch.tools.bench.trace import TracedCall, TraceEvent, nested, read, record
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.report.document import Span, Timeline, busy_us
from onelaunch.tools.report.result import made as restored
from tests.unit.cuda_trace import RELU, SGEMM, call, eager, graphed, host, operator

CPU = torch.device("cpu")


def kinds(found: TracedCall) -> dict[str, list[str]]:
    made: dict[str, list[str]] = {}
    for event in found.events:
        made.setdefault(event.kind, []).append(event.name)
    return made


def test_what_cuda_shows_of_a_call() -> None:
    (found,) = read(eager())
    assert kinds(found) == {
        "operator": [
            *("aten::linear", "aten::addmm", "aten::relu", "aten::item"),
            "aten::_local_scalar_dense",
        ],
        "launch": ["cudaLaunchKernel", "cudaLaunchKernel"],
        "kernel": [SGEMM, RELU],
        "wait": ["cudaMemcpyAsync", "cudaStreamSynchronize"],
        "copy": ["Memcpy DtoH (Device -> Pageable)"],
    }
    assert found.host_us == 100.0
    assert found.stop_us == 100.0
    (kernel, *_) = [event for event in found.events if event.kind == "kernel"]
    assert (kernel.start_us, kernel.duration_us, kernel.operator) == (15.0, 20.0, 3)


def test_a_copy_of_pinned_memory_is_launched_and_not_waited_for() -> None:
    rows = json.loads(json.dumps(eager()).replace("Device -> Pageable", "Device -> Pinned"))
    (found,) = read(rows)
    assert "cudaMemcpyAsync" in kinds(found)["launch"]
    assert kinds(found)["wait"] == ["cudaStreamSynchronize"]


def test_the_gpu_may_go_on_after_the_call() -> None:
    (found,) = read(graphed(launch=True))
    assert found.host_us == 12.0
    assert found.stop_us == 34.0
    assert [event.on_gpu for event in found.events].count(True) == 3


def test_each_call_has_its_own_events() -> None:
    first, second = read([*eager(1000.0), *eager(2000.0)])
    assert first == second


def test_calls_without_a_name_are_not_read() -> None:
    assert read([operator("aten::add", 0.0, 1.0, 1)]) == []


def test_events_lie_inside_each_other() -> None:
    (found,) = read(eager())
    own = {(n.event.name, n.depth): n.self_us for n in nested(found.events) if n.depth < 2}
    assert own["aten::linear", 0] == 4.0  # 28 without addmm's 24
    assert own["aten::addmm", 1] == 18.0
    assert own["aten::relu", 0] == 7.0
    assert own["aten::_local_scalar_dense", 1] == 41.0 - 28.0 - 2.0


def test_threads_nest_by_themselves() -> None:
    backward = {**operator("aten::mm", 1005.0, 20.0, 9), "tid": 2}
    (found,) = read([call(1000.0, 100.0), operator("aten::add", 1001.0, 50.0, 8), backward])
    assert {n.event.name: n.depth for n in nested(found.events)} == {"aten::add": 0, "aten::mm": 0}


def test_time_is_counted_once() -> None:
    def event(start: float, duration: float) -> TraceEvent:
        return TraceEvent("k", "kernel", start, duration)

    assert busy_us([event(0, 10), event(5, 10), event(20, 1), event(2, 3)]) == 16.0
    assert busy_us([]) == 0.0


def test_a_timeline_of_a_gpu() -> None:
    (found,) = read(eager())
    made = timeline("eager", "eager", found)
    assert Span("aten::addmm", "host", 4.0, 24.0, 1) in made.spans
    assert Span(SGEMM, "gpu", 15.0, 20.0) in made.spans
    assert made.wall_us == 100.0
    assert not made.left_out
    assert [span.name for span in timeline("g", "g", read(graphed(launch=True))[0]).spans] == [
        "onelaunch replay: model (8, 64)",
        "cudaGraphLaunch",
        SGEMM,
        RELU,
        "Memset (Device)",
    ]


def test_too_many_spans_are_left_out_the_innermost_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST", 4)
    (found,) = read(eager())
    made = timeline("eager", "eager", found)
    host_spans = [span.name for span in made.spans if span.lane == "host"]
    assert host_spans == ["aten::linear", "aten::relu", "aten::item"]
    assert made.left_out == 6
    monkeypatch.setattr(timelines, "MOST", 2)
    assert [s.name for s in timeline("eager", "eager", found).spans if s.lane == "host"] == [
        "aten::linear",
        "aten::relu",
    ]


def test_a_call_on_a_cpu() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.ones(2, 8)
    with torch.no_grad():
        made = record_timeline("eager", "eager", lambda: net(x), CPU)
    assert made is not None
    spans = {span.name: span for span in made.spans}
    assert spans["aten::addmm"].depth == spans["aten::linear"].depth + 1
    assert all(span.lane == "host" and 0 <= span.start_us <= made.wall_us for span in made.spans)
    assert restored(Timeline, json.loads(json.dumps(asdict(made)))) == made


def test_a_timeline_is_the_median_of_several_calls() -> None:
    """One call that something else interrupts says nothing of the others."""
    pauses = iter([0.0, 0.0, 0.0, 0.05, 0.0, 0.0])  # the first is not read

    def call() -> None:
        time.sleep(next(pauses))
        torch.ones(2).sum()

    made = record_timeline("eager", "eager", call, CPU)
    assert made is not None
    assert made.wall_us < 50_000
    assert next(pauses, None) is None


def test_another_profiler_is_not_disturbed() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        assert record(lambda: torch.ones(2), CPU) is None
        torch.ones(2).sum()
    assert "aten::sum" in {event.name for event in other.events() or []}


def test_what_a_traced_call_raises_comes_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        record(lambda: torch.ones(2, 3) @ torch.ones(2, 3), CPU)
    assert not torch.autograd._profiler_enabled()


def test_a_cpu_has_no_kernels() -> None:
    assert count_kernels(Workload(torch.ones, (2,))) is None


def test_a_comparison_of_before_the_timelines_can_be_read() -> None:
    text = Comparison("model", (), timelines=(Timeline("eager", "eager", 1.0, ()),)).to_json()
    data = json.loads(text)
    assert Comparison.from_json(text).timelines[0].engine == "eager"
    del data["timelines"]
    assert Comparison.from_json(json.dumps(data)).timelines == ()


def test_host_rows_are_as_torch_writes_them(tmp_path: Path) -> None:
    """The traces made by hand have the fields that a real one has."""
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=only_cpu) as profiler, record_function("named"):
        torch.ones(2).sum()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    real = {row["cat"]: row for row in rows if row.get("cat") in ("cpu_op", "user_annotation")}
    made = {
        "cpu_op": operator("a", 0.0, 1.0, 1),
        "user_annotation": host("user_annotation", "", 0, 1),
    }
    for category, row in made.items():
        assert row.keys() == real[category].keys()
    assert made["cpu_op"]["args"].keys() <= real["cpu_op"]["args"].keys()
