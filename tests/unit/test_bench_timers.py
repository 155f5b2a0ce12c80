"""Timers, and when a measurement has settled."""

from __future__ import annotations

import math
import time

import pytest
import torch

from onelaunch.tools.bench.profile import Limit, bound_by, us
from onelaunch.tools.bench.timers import GpuTimer, HostTimer, Timing, WallTimer, settled, timers_for


def test_wall_divides_a_batch_with_its_synchronisation() -> None:
    calls: list[str] = []
    timer = WallTimer(lambda: calls.append("sync"))
    (sample,) = timer.sample(lambda: calls.append("call"), about_us=1000.0)
    assert calls == ["sync", *["call"] * 10, "sync"]
    assert 0 < sample < 1000


@pytest.mark.parametrize(
    ("about_us", "calls"), [(1.0, 500), (6000.0, 5), (80_000.0, 3), (1e6, 1), (math.inf, 1)]
)
def test_a_batch_hides_the_latency_of_one_call(about_us: float, calls: int) -> None:
    made: list[str] = []
    WallTimer(lambda: None).sample(lambda: made.append("call"), about_us)
    assert len(made) == calls


def test_host_times_each_call_on_an_empty_queue() -> None:
    calls: list[str] = []
    timer = HostTimer(lambda: calls.append("sync"))
    samples = timer.sample(lambda: calls.append("call"), about_us=4000.0)
    assert calls == ["sync", "call", "sync", "call", "sync"]
    assert len(samples) == 2


def test_host_does_not_count_the_synchronisation() -> None:
    timer = HostTimer(lambda: time.sleep(0.01))
    assert max(timer.sample(lambda: None, about_us=5000.0)) < 5000


def test_gpu_events_stand_around_a_call_queued_behind_a_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("sync"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    assert GpuTimer().sample(lambda: order.append("call"), about_us=5000.0) == [250.0]
    assert order == ["sync", "sleep", "event", "call", "event", "sync"]


def test_a_cpu_has_no_gpu_timer() -> None:
    assert [timer.name for timer in timers_for(torch.device("cpu"))] == ["wall", "host"]
    assert [timer.name for timer in timers_for(torch.device("cuda"))] == ["wall", "host", "gpu"]


def test_median_and_quartiles() -> None:
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(3.0, 2.0, 5)
    assert Timing.of([7.0]) == Timing(7.0, 0.0, 1)


def test_settled_compares_two_windows() -> None:
    assert not settled([100.0] * 9)
    assert settled([100.0] * 10)
    assert settled([50.0] * 20 + [100.0] * 5 + [101.9] * 5)
    assert not settled([100.0] * 5 + [103.0] * 5)


@pytest.mark.parametrize(
    ("host", "gpu", "bound"), [(71.0, 15.0, "launches"), (15.0, 71.0, "gpu"), (50.0, 45.0, "both")]
)
def test_what_bounds_a_call(host: float, gpu: float, bound: str) -> None:
    found = Limit(bound_by(host, gpu), host, gpu, kernels=14)
    assert found.bound == bound
    assert "14 kernels" in found.summary


def test_the_summary_promises_no_more_than_the_figures() -> None:
    found = Limit("launches", 71.0, 15.0, 5).summary
    assert "about 4.7x as fast as that" in found  # as eager without gradients, which it names
    assert found.startswith("Without gradients the host takes 71.0 us")
    assert "are no launches to save" in Limit("cpu", 71.0).summary


def test_durations() -> None:
    assert [us(v) for v in (3.14, 41.23, 412.3, 1234.0, 2.1e6)] == [
        "3.1 us",
        "41.2 us",
        "412 us",
        "1.2 ms",
        "2.1 s",
    ]
