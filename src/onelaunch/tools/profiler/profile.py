"""The profile of a call, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from onelaunch.tools.bench.environment import Environment
from onelaunch.tools.bench.profile import Limit
from onelaunch.tools.profiler.breakdown import Heavy, Part
from onelaunch.tools.profiler.peaks import Peaks
from onelaunch.tools.profiler.remedies import Remedy
from onelaunch.tools.profiler.roofline import Roofline
from onelaunch.tools.report.document import Document
from onelaunch.tools.report.result import Result
from onelaunch.tools.report.units import us

Bound = Literal["launches", "memory", "arithmetic", "overhead"]
"""``launches``: the host takes longer to launch the work than the GPU to do it. ``memory`` and
``arithmetic``: the kernels wait for bytes, or for products. ``overhead``: neither; the
kernels are so small that their starts take the time, and on a CPU the Python in between."""


@dataclass(frozen=True)
class Profile(Result):
    """An account of a call: where its time goes, its bound, and the most that each remedy can gain.

    Attributes:
        workload: its name.
        bound: what a call waits for most.
        wall_us: per call, many calls in a row.
        limit: the time of the host and of the GPU, and the number of kernels.
        launches: of kernels, copies and graphs, per call; None on a CPU.
        parts: of the wall time; see `Part`.
        heaviest: ten kernels at most, on a CPU operators, the heaviest first.
        roofline: what the call computes and moves, against the peaks.
        peaks: what this machine reaches, measured here.
        remedies: what each can gain at most, the largest first; none that gains less than 2%.
        unseen: what this machine cannot show.
        remarks: doubts about the figures.
        environment: hardware and versions.
    """

    noun = "a profile"

    workload: str
    bound: Bound
    wall_us: float
    limit: Limit
    launches: float | None
    parts: tuple[Part, ...]
    heaviest: tuple[Heavy, ...]
    roofline: Roofline
    peaks: Peaks
    remedies: tuple[Remedy, ...]
    unseen: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    environment: Environment = field(default_factory=dict)

    @property
    def busy_us(self) -> float:
        """The time for which kernels and copies run, or on a CPU operators."""
        return sum(part.us for part in self.parts if part.name in _WORK[self.limit.gpu_us is None])

    @property
    def reached(self) -> float:
        """The part of the roofline that the work reaches: 1.0 is the peak."""
        return self.roofline.roofline_us / self.busy_us if self.busy_us else 0.0

    @property
    def summary(self) -> str:
        """The answer in a sentence or two."""
        return f"Bound by {self.bound}: {self._why()}; {self._gain()}."

    def _why(self) -> str:
        roof = self.roofline
        if self.bound == "launches":
            return f"the GPU is busy {us(self.busy_us)} of {us(self.wall_us)}"
        work = "operators" if self.limit.gpu_us is None else "kernels"
        if self.bound == "overhead":
            return (
                f"a call takes {us(self.wall_us)}, and the peaks of memory and arithmetic allow "
                f"{us(roof.roofline_us)}: its {work} are small"
            )
        peak = "bandwidth" if self.bound == "memory" else "peak of matrix products"
        took = f"the {work} take {us(self.busy_us)} of {us(self.wall_us)} and"
        if self.reached > BEYOND:
            return (
                f"{took} are {self.reached:.1f}x as fast as the measured {peak}, so what they move "
                "stays in a cache, or the peak was measured too low"
            )
        return f"{took} reach {100 * self.reached:.0f}% of the measured {peak}"

    def _gain(self) -> str:
        first = next(iter(self.remedies), None)
        if self.bound == "launches":
            first = next((r for r in self.remedies if r.name == "one launch"), first)
        if first is None:
            return "none of the remedies can gain 2%"
        return f"{first.name} can give at most {first.at_most:.1f}x"

    def document(self) -> Document:
        from onelaunch.tools.profiler.shown import document

        return document(self)


BEYOND = 1.05
"""The part of a peak above which a profile says that something is off."""
_WORK = {True: ("operators", "copies"), False: ("kernels", "copies")}
"""The parts that are work: on a CPU, and on a GPU."""
