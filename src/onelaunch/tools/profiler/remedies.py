"""The most that each remedy can gain, and the code or the command that applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onelaunch.tools.profiler.breakdown import Part, PartName
from onelaunch.tools.profiler.peaks import Peaks
from onelaunch.tools.profiler.roofline import Roofline

RemedyName = Literal["one launch", "fused kernels", "half precision", "no copies", "no waits"]
WORTH = 1.02
"""Gains below this are not shown."""


@dataclass(frozen=True)
class Remedy:
    """One way to make a call faster.

    Attributes:
        at_most: the gain that it cannot exceed: the wall time now over `wall_us`. 2.0: twice as
            fast.
        wall_us: the time below which no call comes by it alone, if what it `assumes` is so.
        how: the code or the command.
    """

    name: RemedyName
    at_most: float
    wall_us: float
    assumes: str
    how: str


_ASSUMES: dict[RemedyName, str] = {
    "one launch": "the kernels and copies stay as they are, with no gap between them",
    "fused kernels": "one kernel that reads each input and parameter once, writes each result "
    "once, and computes at the measured peak",
    "half precision": "half the bytes, products at bfloat16's measured peak, and kernels as near "
    "to the peaks as they are now",
    "no copies": "no copy is needed at all",
    "no waits": "the host never waits, and works while the GPU does",
}


def remedies_on_gpu(
    parts: tuple[Part, ...],
    wall_us: float,
    launches: float,
    roof: Roofline,
    peaks: Peaks,
    target: str | None,
    trains: bool = False,
) -> tuple[Remedy, ...]:
    """Bound the gain of each remedy for a call on a GPU, the largest first."""
    took: dict[PartName, float] = {part.name: part.us for part in parts}
    busy = took["kernels"] + took["copies"]
    launch = peaks.launch_us
    on_host = took["operators"] + took["launches"]
    halved = max(on_host, took["copies"] + took["kernels"] * _shrinks(roof))
    left: dict[RemedyName, float] = {
        "one launch": max(busy, launch) if launches > 1 else wall_us,
        "fused kernels": max(roof.fused_us, launch),
        "half precision": halved,
        "no copies": wall_us - took["copies"],
        "no waits": max(wall_us - took["waits"], busy),
    }
    return _bounded(left, wall_us, target, trains, "ol.graph(model, compile=True)")


def remedies_on_cpu(
    parts: tuple[Part, ...],
    wall_us: float,
    roof: Roofline,
    peaks: Peaks,
    target: str | None,
    trains: bool = False,
) -> tuple[Remedy, ...]:
    """Bound the gain of each remedy for a call on a CPU, the largest first."""
    took: dict[PartName, float] = {part.name: part.us for part in parts}
    left: dict[RemedyName, float] = {
        "fused kernels": max(roof.fused_us, peaks.launch_us),
        "half precision": wall_us - took["operators"] * (1.0 - _shrinks(roof)),
        "no copies": wall_us - took["copies"],
    }
    return _bounded(left, wall_us, target, trains, "torch.compile(model)")


def _shrinks(roof: Roofline) -> float:
    """Return the part of the kernels' time that is left in half precision."""
    return min(1.0, roof.half_us / roof.roofline_us) if roof.roofline_us else 1.0


def _bounded(
    left: Mapping[RemedyName, float], wall_us: float, target: str | None, trains: bool, fused: str
) -> tuple[Remedy, ...]:
    """Make the remedies that are worth it, the largest first.

    Args:
        left: remedy -> the time that it leaves at least.
        target: as a command has it, or None.
        trains: whether the call runs a backward, which `optimize` refuses.
        fused: the code that fuses kernels.
    """
    doctor = "ol.diagnose(model, args)" if target is None else f"onelaunch doctor {target}"
    # Under the default error, 0, `optimize` does not try half precision.
    half = "ol.optimize(model, args, max_error=1e-2)"
    if trains:
        half = "torch.autocast(x.device.type, torch.bfloat16) around the forward"
    elif target is not None:
        half = f"onelaunch optimize {target} --max-error 1e-2"
    how = {"one launch": "ol.graph(model)", "fused kernels": fused, "half precision": half}
    found: list[Remedy] = []
    for name, least_us in left.items():
        us = min(wall_us, max(least_us, 1e-3))
        found.append(Remedy(name, wall_us / us, us, _ASSUMES[name], how.get(name, doctor)))
    return tuple(sorted((r for r in found if r.at_most >= WORTH), key=lambda r: -r.at_most))
