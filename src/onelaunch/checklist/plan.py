"""The result of an optimisation, as data: what was tried, what it gave, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from onelaunch.bench.environment import Environment
from onelaunch.bench.profile import us
from onelaunch.bench.timers import Timing

if TYPE_CHECKING:
    from onelaunch.checklist.optimize import Optimized

P = ParamSpec("P")
R = TypeVar("R")

Outcome = Literal["kept", "no gain", "wrong", "failed", "not possible"]
Round = Literal["first", "recheck", "final"]


@dataclass(frozen=True)
class Trial:
    """One step tried on top of the steps kept before it.

    Attributes:
        step: its name, ``"fold-batchnorm"``.
        title: its name for people, ``"BatchNorm folded into convolutions"``.
        outcome: whether it is kept, or why not.
        reason: the reason if it is not kept, or what it did (``"12 of 12 norms"``).
        error: relative error against float64 with the step on; None if it never ran.
        before: wall time without it, measured in turns with `after`.
        after: wall time with it.
        round: when it was tried: in the first pass, taken out or tried again after it, or with
            the result as a whole.
    """

    step: str
    title: str
    outcome: Outcome
    reason: str | None
    error: float | None
    before: Timing | None
    after: Timing | None
    round: Round = "first"

    @property
    def gain(self) -> float | None:
        """The time without it, in times of that with it; None if it was not timed."""
        if self.before is None or self.after is None:
            return None
        return self.before.median_us / self.after.median_us


@dataclass(frozen=True)
class Plan:
    """The steps to take, and how they were found.

    Attributes:
        workload: the name of the callable.
        steps: the names of what is kept, in the order in which it is applied.
        trials: all that was tried, in order.
        max_error: the largest relative error that was allowed.
        error: relative error of the result against float64.
        eager: wall time of the callable as it was given.
        result: wall time of the callable that came out.
        environment: hardware and versions.
        remarks: remarks on the whole.
    """

    workload: str
    steps: tuple[str, ...]
    trials: tuple[Trial, ...]
    max_error: float
    error: float
    eager: Timing
    result: Timing
    environment: Environment
    remarks: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """The time of the callable as it was given, in times of the result's."""
        return self.eager.median_us / self.result.median_us

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        if not self.steps:
            head = "Nothing that was tried pays" if self.trials else "The plan has no steps"
            return f"{head}: {us(self.eager.median_us)} per call, as before."
        return (
            f"{us(self.result.median_us)} per call instead of {us(self.eager.median_us)}, "
            f"{self.speedup:.2f}x, at a relative error of {self.error:.1e}, by "
            f"{', '.join(self.steps)}."
        )

    def apply(
        self,
        fn: Callable[P, R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Optimized[P, R]:
        """Take the steps on a copy of a callable, without a search.

        The callable runs a few times on copies of the arguments, to see which layers feed which,
        and once more for the result to be compared with it. Compiling and capturing take their
        time again.

        Args:
            fn: the callable of the plan, or one built alike: with other weights, say.
            args: positional arguments of a typical call.
            kwargs: its keyword arguments.

        Returns:
            An `Optimized`, as from `optimize`.

        Raises:
            ArgumentError: OL403, with each step that is not possible with this callable or on this
                machine and the reason, or that is wrong here. `without` leaves steps out.
        """
        from onelaunch.checklist.apply import apply

        return apply(self, fn, args, kwargs)

    def without(self, *steps: str) -> Plan:
        """Return the plan without some steps; its figures are those of before."""
        return replace(self, steps=tuple(step for step in self.steps if step not in steps))

    def to_json(self) -> str:
        """Write it as JSON text; `from_json` gives an equal plan."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
            ValueError: the text is not such a plan.
        """
        try:
            return _plan(json.loads(text))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan in JSON: {error}") from error


def _plan(data: dict[str, Any]) -> Plan:
    fields: dict[str, Any] = {
        **data,
        "steps": tuple(data["steps"]),
        "trials": tuple(_trial(trial) for trial in data["trials"]),
        "eager": Timing(**data["eager"]),
        "result": Timing(**data["result"]),
        "remarks": tuple(data["remarks"]),
    }
    return Plan(**fields)


def _trial(data: dict[str, Any]) -> Trial:
    timings = {name: Timing(**data[name]) if data[name] else None for name in ("before", "after")}
    fields: dict[str, Any] = {**data, **timings}
    return Trial(**fields)
