"""Timers: the cost of one call in microseconds, seen from three places.

A timer meets any callable; each knows one device's clock. Samples are taken in short rounds so
that the rounds of several engines can be interleaved.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Timed = Callable[[], object]
TimerName = Literal["wall", "host", "gpu"]

BATCH_US = 10_000.0  # how long a round of one timer should take
BATCH_CALLS = 500
LEAST_CALLS = 5  # one call alone would show its latency, the host's share and then the GPU's
LONGEST_US = 250_000.0  # of a batch that is longer for their sake
SINGLE_CALLS = 15
SLEEP_CYCLES_PER_US = 2_500  # more than any clock of today's GPUs, so never too short
WINDOW = 5  # rounds
AGREEMENT = 0.02


class Timer(Protocol):
    """One clock, and the way to take samples of a call with it."""

    @property
    def name(self) -> TimerName: ...

    def sample(self, call: Timed, about_us: float) -> list[float]:
        """Measure microseconds per call; `about_us`, a rough guess, sets the number of samples."""
        ...


@dataclass(frozen=True)
class WallTimer:
    """The time of a batch of calls and a synchronisation, divided: the pace of a busy loop."""

    synchronize: Callable[[], None]
    name: TimerName = "wall"

    def sample(self, call: Timed, about_us: float) -> list[float]:
        least = min(LEAST_CALLS, int(LONGEST_US / max(about_us, 1e-3)))
        calls = max(least, _count(about_us, BATCH_CALLS))
        self.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        self.synchronize()
        return [(time.perf_counter_ns() - start) / 1e3 / calls]


@dataclass(frozen=True)
class HostTimer:
    """The time for a call to return with nothing queued: the CPU's cost."""

    synchronize: Callable[[], None]
    name: TimerName = "host"

    def sample(self, call: Timed, about_us: float) -> list[float]:
        samples: list[float] = []
        for _ in range(_count(about_us, SINGLE_CALLS)):
            self.synchronize()
            start = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - start) / 1e3)
        self.synchronize()
        return samples


@dataclass(frozen=True)
class GpuTimer:
    """The time between CUDA events around a call queued while the GPU sleeps: the GPU's cost.

    Without the sleep the events would measure the launches of the host, in whose gaps a GPU idles.
    A call of more than about a thousand launches fills the queue before the sleep ends, and its
    figure holds some of those gaps again.
    """

    name: TimerName = "gpu"

    def sample(self, call: Timed, about_us: float) -> list[float]:
        sleep = int(SLEEP_CYCLES_PER_US * (2 * about_us + 50))
        samples: list[float] = []
        for _ in range(_count(2 * about_us, SINGLE_CALLS)):
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(sleep)
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(stop) * 1e3)
        return samples


def _count(about_us: float, most: int) -> int:
    return max(1, min(most, int(BATCH_US / max(about_us, 1e-3))))


def timers_for(device: torch.device) -> tuple[Timer, ...]:
    """Pick the timers of a device: wall and host, and on a GPU its own."""
    wait = functools.partial(synchronize, device)
    timers = WallTimer(wait), HostTimer(wait)
    return (*timers, GpuTimer()) if device.type == "cuda" else timers


def one_call_us(call: Timed, device: torch.device) -> float:
    """Time a single call, and its work on the device."""
    return timers_for(device)[0].sample(call, float("inf"))[0]


@dataclass(frozen=True)
class Timing:
    """Median, and the distance between the quartiles, of samples in microseconds per call."""

    median_us: float
    spread_us: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        if len(samples) < 2:
            return Timing(samples[0], 0.0, 1)
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(middle, high - low, len(samples))


def settled(rounds: Sequence[float]) -> bool:
    """Return True if the medians of the last two windows of rounds agree within 2%."""
    if len(rounds) < 2 * WINDOW:
        return False
    before = statistics.median(rounds[-2 * WINDOW : -WINDOW])
    after = statistics.median(rounds[-WINDOW:])
    return abs(after - before) <= AGREEMENT * before


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
