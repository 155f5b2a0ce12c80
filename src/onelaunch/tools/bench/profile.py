"""The limit of a workload, launches or kernels, before anything is applied to it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

import torch

from onelaunch.tools.bench.timers import TimerName, one_call_us, timers_for
from onelaunch.tools.bench.trace import record
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.report.units import us

Bound = Literal["launches", "gpu", "both", "cpu"]
CLEARLY = 1.2
ROUNDS = 3


@dataclass(frozen=True)
class Limit:
    """Times of one eager call without gradients.

    Attributes:
        bound: the larger part of its time.
        host_us: the time for the call to return with nothing queued.
        gpu_us: the time that the GPU is busy with it; None on a CPU.
        kernels: kernels that it launches; None on a CPU or where the profiler saw none.
    """

    bound: Bound
    host_us: float
    gpu_us: float | None = None
    kernels: int | None = None

    @property
    def summary(self) -> str:
        """A paragraph on the limit of the call, and the gain to expect of a graph."""
        if self.gpu_us is None:
            return (
                f"This call takes {us(self.host_us)} on the CPU without gradients. Unlike "
                "on a GPU there are no launches to save: the differences below come from "
                "Python's overhead and from fused kernels. onelaunch runs on its tape, which is "
                "there to test the same code without a GPU, so expect less than eager's speed."
            )
        count = f"{self.kernels} kernels" if self.kernels else "its kernels"
        head = (
            f"Without gradients the host takes {us(self.host_us)} to launch {count}, "
            f"and the GPU {us(self.gpu_us)} to run them: this call is bound by "
        )
        best = max(self.host_us, self.gpu_us) / self.gpu_us
        if self.bound == "launches":
            return (
                f"{head}launches. One launch for all of them can make it about {best:.1f}x as "
                "fast as that; fused kernels (compile=True) come on top."
            )
        if self.bound == "both":
            return (
                f"{head}launches and kernels in equal parts. A graph alone saves little of the "
                "wall time but frees the host; fused kernels (compile=True) and a graph save more."
            )
        return (
            f"{head}the GPU. A graph cannot make the kernels faster, so expect a gain of a few "
            "percent at most from launches, and more from fused kernels or a lower precision."
        )


def find_limit(workload: Workload) -> Limit:
    """Time some eager calls; the kernels are counted apart, by `count_kernels`."""
    with torch.no_grad():
        times = time_calls(workload)
    return limit_of(times["host"], times.get("gpu"))


def time_calls(workload: Workload) -> dict[TimerName, float]:
    """Time some calls with every timer of the device: medians in microseconds."""
    samples: dict[TimerName, list[float]] = {}
    for _ in range(3):
        workload()
    about = one_call_us(workload, workload.device)
    for _ in range(ROUNDS):
        for timer in timers_for(workload.device):
            taken = timer.sample(workload, about)
            samples.setdefault(timer.name, []).extend(taken)
            about = taken[-1] if timer.name == "host" else about
    return {name: statistics.median(found) for name, found in samples.items()}


def limit_of(host_us: float, gpu_us: float | None) -> Limit:
    """Make the limit of a call from its times; None for the GPU's on a CPU."""
    if gpu_us is None:
        return Limit("cpu", host_us)
    return Limit(bound_by(host_us, gpu_us), host_us, gpu_us)


def bound_by(host_us: float, gpu_us: float) -> Bound:
    """Compare the times of host and GPU, and name the longer."""
    if host_us > CLEARLY * gpu_us:
        return "launches"
    return "gpu" if gpu_us > CLEARLY * host_us else "both"


def count_kernels(workload: Workload) -> int | None:
    """Count the kernels that one eager call launches; None if the profiler sees none.

    Call it after all timing: the profiler stays attached to the driver and slows launches down.
    """
    if workload.device.type != "cuda":
        return None
    with torch.no_grad():
        calls = record(workload, workload.device)
    kernels = sum(event.kind == "kernel" for event in calls[-1].events) if calls else 0
    return kernels or None
