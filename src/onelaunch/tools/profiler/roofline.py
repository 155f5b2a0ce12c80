"""The time that arithmetic and bytes take at a machine's peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from onelaunch.tools.profiler.counting import CallWork, Work
from onelaunch.tools.profiler.peaks import Peaks

Limit = Literal["memory", "arithmetic"]
HALF = "bfloat16"
_WIDE = {"float32": 2, "float64": 4}


@dataclass(frozen=True)
class Roofline:
    """The operations and bytes of a call, and how long that takes at the machine's peaks.

    Attributes:
        flops: of matrix products, convolutions and attention, by dtype.
        nbytes: that all operators read and write.
        least_bytes: that are read from outside the call and left there, if nothing in between goes
            through memory.
        memory_us: the time of `nbytes` at the peak.
        arithmetic_us: the time of `flops` at the peak.
        roofline_us: the larger of both for each operator, added up.
        waits_for: which of both is the larger for the greater part of `roofline_us`.
        fused_us: the larger of `least_bytes` and `flops` at the peak: all of it as one kernel.
        half_us: `roofline_us` in half precision, bfloat16.
    """

    flops: dict[str, int]
    nbytes: int
    least_bytes: int
    memory_us: float
    arithmetic_us: float
    roofline_us: float
    waits_for: Limit
    fused_us: float
    half_us: float


def roofline(count: CallWork, peaks: Peaks) -> Roofline:
    """Set the work of a call against the peaks of a machine."""
    times = {"memory": 0.0, "arithmetic": 0.0}
    flops: dict[str, int] = {}
    half = arithmetic = 0.0
    for work in count.works:
        memory_us, arithmetic_us = _times(work, peaks)
        times["memory" if memory_us >= arithmetic_us else "arithmetic"] += max(
            memory_us, arithmetic_us
        )
        arithmetic += arithmetic_us
        half += max(_times(_halved(work), peaks))
        if work.flops:
            flops[work.dtype] = flops.get(work.dtype, 0) + work.flops
    return Roofline(
        flops=flops,
        nbytes=count.nbytes,
        least_bytes=count.least_bytes,
        memory_us=count.nbytes / peaks.bytes_per_us,
        arithmetic_us=arithmetic,
        roofline_us=sum(times.values()),
        waits_for="memory" if times["memory"] >= times["arithmetic"] else "arithmetic",
        fused_us=max(count.least_bytes / peaks.bytes_per_us, arithmetic),
        half_us=half,
    )


def _times(work: Work, peaks: Peaks) -> tuple[float, float]:
    """Return the time of an operator's bytes and that of its arithmetic, each at the peak."""
    peak = peaks.flops_per_us.get(work.dtype)
    return work.nbytes / peaks.bytes_per_us, work.flops / peak if peak else 0.0


def _halved(work: Work) -> Work:
    """Return the work of an operator in half precision, if it is wider now."""
    factor = _WIDE.get(work.dtype, 1)
    dtype = HALF if factor > 1 else work.dtype
    return replace(work, nbytes=work.nbytes // factor, dtype=dtype)
