"""The most that each remedy can gain, and the code or the command that applies it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onelaunch.profiler.breakdown import Part, PartName
from onelaunch.profiler.peaks import Peaks
from onelaunch.profiler.roofline import Roofline

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


def remedies_on_gpu(
    parts: tuple[Part, ...],
    wall_us: float,
    launches: float,
    roof: Roofline,
    peaks: Peaks,
    target: str | None,
) -> tuple[Remedy, ...]:
    """Bound the gain of each remedy for a call on a GPU, the largest first."""
    took: dict[PartName, float] = {part.name: part.us for part in parts}
    busy = took["kernels"] + took["copies"]
    launch = peaks.launch_us
    found = [
        _one_launch(max(busy, launch)) if launches > 1 else None,
        _fused(max(roof.fused_us, launch), "ol.graph(model, compile=True)"),
        _half(
            max(
                took["operators"] + took["launches"],
                took["copies"] + took["kernels"] * _shrinks(roof),
            ),
            target,
        ),
        _no_copies(wall_us - took["copies"], target),
        _no_waits(max(wall_us - took["waits"], busy), target),
    ]
    return _sorted((made for made in found if made is not None), wall_us)


def remedies_on_cpu(
    parts: tuple[Part, ...], wall_us: float, roof: Roofline, peaks: Peaks, target: str | None
) -> tuple[Remedy, ...]:
    """Bound the gain of each remedy for a call on a CPU, the largest first."""
    took: dict[PartName, float] = {part.name: part.us for part in parts}
    found = [
        _fused(max(roof.fused_us, peaks.launch_us), "torch.compile(model)"),
        _half(wall_us - took["operators"] * (1.0 - _shrinks(roof)), target),
        _no_copies(wall_us - took["copies"], target),
    ]
    return _sorted(found, wall_us)


def _shrinks(roof: Roofline) -> float:
    """Return what is left of the kernels' time in half precision."""
    return min(1.0, roof.half_us / roof.roofline_us) if roof.roofline_us else 1.0


def _sorted(found: Iterator[Remedy] | list[Remedy], wall_us: float) -> tuple[Remedy, ...]:
    made = [_against(remedy, wall_us) for remedy in found]
    return tuple(sorted((r for r in made if r.at_most >= WORTH), key=lambda r: -r.at_most))


def _against(remedy: Remedy, wall_us: float) -> Remedy:
    left = min(wall_us, max(remedy.wall_us, 1e-3))
    return Remedy(remedy.name, wall_us / left, left, remedy.assumes, remedy.how)


def _one_launch(wall_us: float) -> Remedy:
    assumes = "the kernels and copies stay as they are, with no gap between them"
    return Remedy("one launch", 0.0, wall_us, assumes, "ol.graph(model)")


def _fused(wall_us: float, how: str) -> Remedy:
    assumes = (
        "one kernel that reads each input and parameter once, writes each result once, and "
        "computes at the measured peak"
    )
    return Remedy("fused kernels", 0.0, wall_us, assumes, how)


def _half(wall_us: float, target: str | None) -> Remedy:
    assumes = (
        "half the bytes, products at bfloat16's measured peak, and kernels as near to the peaks "
        "as they are now"
    )
    # Under the default error, 0, `optimize` does not try half precision.
    how = "ol.optimize(model, args, max_error=1e-2)"
    if target is not None:
        how = f"onelaunch optimize {target} --max-error 1e-2"
    return Remedy("half precision", 0.0, wall_us, assumes, how)


def _no_copies(wall_us: float, target: str | None) -> Remedy:
    return Remedy("no copies", 0.0, wall_us, "no copy is needed at all", _doctor(target))


def _no_waits(wall_us: float, target: str | None) -> Remedy:
    assumes = "the host never waits, and works while the GPU does"
    return Remedy("no waits", 0.0, wall_us, assumes, _doctor(target))


def _doctor(target: str | None) -> str:
    return "ol.diagnose(model, *args)" if target is None else f"onelaunch doctor {target}"
