"""The names of captures and replays in a trace, and their absence without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch import trace_names

ONLY_CPU = [torch.profiler.ProfilerActivity.CPU]


def names(run: Callable[[], object]) -> list[str]:
    """The annotations of a run, in their order."""
    with torch.profiler.profile(activities=ONLY_CPU) as profiler:
        run()
    events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("onelaunch ")]


def warm(fast: Any, *args: Tensor) -> None:
    for _ in range(5):
        fast(*args)


def test_captures_and_replays_have_names() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    fast: Any = ol.graph(model)
    x, y = torch.ones(8, 64), torch.ones(64, 2)
    found = names(lambda: warm(fast, x, y))
    assert found == [
        "onelaunch capture: model (8, 64), (64, 2)",
        "onelaunch replay: model (8, 64), (64, 2)",
        "onelaunch replay: model (8, 64), (64, 2)",
    ]


def test_forwards_and_backwards_of_a_module_have_names() -> None:
    fast: Any = ol.graph(nn.Linear(4, 3))
    x = torch.ones(2, 4)

    def train() -> None:
        for _ in range(6):
            fast(x).sum().backward()

    found = names(train)
    assert "onelaunch capture: Linear (2, 4)" in found
    assert "onelaunch capture: backward (2, 3)" in found
    assert found[-2:] == ["onelaunch replay: Linear (2, 4)", "onelaunch replay: backward (2, 3)"]


def test_a_call_in_a_bucket_has_the_name_of_its_recording() -> None:
    fast: Any = ol.graph(lambda x: x + 1, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    x = torch.ones(3, 2)
    warm(fast, x)
    assert names(lambda: fast(x)) == ["onelaunch replay: <lambda> (4, 2)"]


def test_no_name_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(trace_names.profiler, "record_function", refused)
    fast: Any = ol.graph(nn.Linear(4, 3))
    for _ in range(6):
        fast(torch.ones(2, 4)).sum().backward()
    assert fast.recordings[0].replays


def test_many_tensors_are_not_all_named() -> None:
    assert trace_names.sizes([(1,), (2, 3), (), (4,)]) == "(1,), (2, 3), (), ..."
    assert trace_names.sizes([]) == ""


def test_a_reset_recording_is_missed_under_a_profiler_too() -> None:
    fast: Any = ol.graph(lambda x: x + 1)
    warm(fast, torch.ones(3))

    def again() -> None:
        fast.reset()
        assert fast(torch.ones(3)).tolist() == [2.0] * 3

    assert not [name for name in names(again) if "replay" in name]


@pytest.mark.gpu
def test_nvtx_names_replays_while_it_is_emitted() -> None:
    fast: Any = ol.graph(lambda x: x + 1)
    x = torch.ones(8, device="cuda")
    warm(fast, x)
    with torch.autograd.profiler.emit_nvtx():
        assert trace_names.profiler._is_profiler_enabled
        assert fast(x).tolist() == [2.0] * 8
    assert not trace_names.profiler._is_profiler_enabled
