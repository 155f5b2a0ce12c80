"""The profile of a call, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from onelaunch.bench.environment import Environment
from onelaunch.bench.profile import Limit, us
from onelaunch.profiler.breakdown import Heavy, Part
from onelaunch.profiler.peaks import Peaks
from onelaunch.profiler.remedies import Remedy
from onelaunch.profiler.roofline import Roofline

Bound = Literal["launches", "memory", "arithmetic", "overhead"]
"""``launches``: the host takes longer to launch the work than the GPU to do it. ``memory`` and
``arithmetic``: the kernels wait for bytes, or for products. ``overhead``: neither; they are so
small that starting them takes the time, and on a CPU the Python between them."""


@dataclass(frozen=True)
class Profile:
    """An account of a call: where its time goes, what bounds it, what each remedy can gain.

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
        return (
            f"the {work} take {us(self.busy_us)} of {us(self.wall_us)} and reach "
            f"{100 * self.reached:.0f}% of the measured {peak}"
        )

    def _gain(self) -> str:
        first = next(iter(self.remedies), None)
        if self.bound == "launches":
            first = next((r for r in self.remedies if r.name == "one launch"), first)
        if first is None:
            return "none of the remedies can gain 2%"
        return f"{first.name} can give at most {first.at_most:.1f}x"

    def to_json(self) -> str:
        """Write it as JSON text; `from_json` gives an equal profile."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read a profile that `to_json` wrote.

        Raises:
            ValueError: the text is not such a profile.
        """
        try:
            return _profile(json.loads(text))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a profile in JSON: {error}") from error


_WORK = {True: ("operators", "copies"), False: ("kernels", "copies")}
"""The parts that are work: on a CPU, and on a GPU."""


def _profile(data: dict[str, Any]) -> Profile:
    heavy: list[dict[str, Any]] = [
        {**one, "operators": tuple(one["operators"])} for one in data["heaviest"]
    ]
    fields: dict[str, Any] = {
        **data,
        "limit": Limit(**data["limit"]),
        "parts": tuple(Part(**part) for part in data["parts"]),
        "heaviest": tuple(Heavy(**one) for one in heavy),
        "roofline": Roofline(**data["roofline"]),
        "peaks": Peaks(**data["peaks"]),
        "remedies": tuple(Remedy(**remedy) for remedy in data["remedies"]),
        "unseen": tuple(data["unseen"]),
        "remarks": tuple(data["remarks"]),
    }
    return Profile(**fields)
