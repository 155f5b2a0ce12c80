"""The result of an optimisation, as data: what was tried, what it gave, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from onelaunch.tools.bench.environment import Environment
from onelaunch.tools.bench.timers import Timing
from onelaunch.tools.report.document import Document
from onelaunch.tools.report.result import Result
from onelaunch.tools.report.units import us

if TYPE_CHECKING:
    from onelaunch.tools.checklist.optimize import Optimized

P = ParamSpec("P")
R = TypeVar("R")

Outcome = Literal["kept", "required", "no gain", "wrong", "failed", "not possible"]
"""``required``: the plan is for it, whatever it gains, so it was not timed: eval mode."""
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
class Plan(Result):
    """The steps to take, and how they were found.

    Attributes:
        workload: the name of the callable.
        steps: the names of the steps that are kept, in the order in which they are applied.
        trials: all that was tried, in order.
        max_error: the largest relative error that was allowed.
        error: relative error of the result against float64; None if it is not known or not finite.
        eager: wall time of the callable as it was given, with the required steps: eval mode.
        result: wall time of the callable that came out.
        environment: hardware and versions.
        remarks: remarks on the whole.
        untried: the steps that were left, for want of time or of a check.
        unsearched: the reason if nothing was tried at all.
    """

    noun = "a plan"

    workload: str
    steps: tuple[str, ...]
    trials: tuple[Trial, ...]
    max_error: float
    error: float | None
    eager: Timing
    result: Timing
    environment: Environment
    remarks: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    unsearched: str = ""

    @property
    def speedup(self) -> float:
        """The time of the callable as it was given, in times of the result's."""
        return self.eager.median_us / self.result.median_us

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        late = f"not tried: {', '.join(self.untried)}" if self.untried else ""
        if self.gains:
            error = "that is not known" if self.error is None else f"of {self.error:.1e}"
            text = (
                f"{us(self.result.median_us)} per call instead of {us(self.eager.median_us)}, "
                f"{self.speedup:.2f}x, at a relative error {error}, by {', '.join(self.gains)}"
            )
            return f"{text}; {late}." if late else f"{text}."
        head = "The plan has no steps"
        if any(trial.outcome != "required" for trial in self.trials):
            head = (
                f"Nothing that was tried pays ({late})" if late else "Nothing that was tried pays"
            )
        elif late or self.unsearched:
            why = f": {self.unsearched}" if self.unsearched else ""
            head = f"Nothing was tried{why}"
        same = f"with {', '.join(self.steps)} alone" if self.steps else "as before"
        return f"{head}: {us(self.result.median_us)} per call, {same}."

    @property
    def gains(self) -> tuple[str, ...]:
        """The steps that were kept for their gain: all but those that are required."""
        required = {trial.step for trial in self.trials if trial.outcome == "required"}
        return tuple(step for step in self.steps if step not in required)

    def apply(
        self,
        fn: Callable[P, R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Optimized[P, R]:
        """Take the steps on a copy of a callable, without a search.

        The callable runs a few times on copies of the arguments, to see which layers feed which.
        It runs once more for a result to compare with. Compiling and capturing take their time
        again.

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
        from onelaunch.tools.checklist.apply import apply

        return apply(self, fn, args, kwargs)

    def without(self, *steps: str) -> Plan:
        """Return the plan without some steps; its figures are those of before."""
        return replace(self, steps=tuple(step for step in self.steps if step not in steps))

    def document(self) -> Document:
        from onelaunch.tools.checklist.shown import document

        return document(self)
