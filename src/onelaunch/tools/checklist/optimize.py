"""`optimize`: the inference checklist, tried on a copy of a callable."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from onelaunch.errors import bad, describe_type
from onelaunch.tools.bench.entry import free, isolated, reset_compiler
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.reference import SECONDS, Reference, make_reference
from onelaunch.tools.bench.timers import Timer, one_call_us, timers_for
from onelaunch.tools.bench.workload import (
    OnProgress,
    Workload,
    name_of,
    takes_a_call,
    tell_nobody,
    validated,
)
from onelaunch.tools.checklist.build import ChangedCall, build, quiet
from onelaunch.tools.checklist.check import finite, own_error
from onelaunch.tools.checklist.clock import Clock, TimeIsUp
from onelaunch.tools.checklist.modes import EVAL, in_train_mode
from onelaunch.tools.checklist.plan import Plan, Trial
from onelaunch.tools.checklist.search import Search
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.steps import choose
from onelaunch.tools.checklist.subject import modules_behind, subject_of
from onelaunch.tools.checklist.turns import LEAST_ROUNDS, Turns, in_turns

P = ParamSpec("P")
R = TypeVar("R")
FINAL_SECONDS = 2.0
LEAST_FINAL_SECONDS = 0.5
DRAWS_PART = 0.25
"""The part of the time that the draws of the reference may take."""
FINAL_CALLS = 10
"""The least number of calls of each in the timing of the result against the original."""
SHORT_US = 50_000.0  # a call that takes less is timed more than once in any case
KEPT_PART = 0.25
"""The part of the time that is kept for that, at most."""


class Optimized(Generic[P, R]):
    """A callable to which the steps of a plan were applied: a drop-in for the original, in
    inference. It has its own copy of the parameters; its results are the caller's to keep.

    Attributes:
        plan: the steps, with the error and the gain of each.
    """

    def __init__(self, call: Callable[P, R], plan: Plan) -> None:
        self._call = call
        self.plan = plan

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Optimized({self.plan.workload}: {', '.join(self.plan.steps) or 'as it was'})"


@takes_a_call
def optimize(
    fn: Callable[P, R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    max_error: float = 0,
    seconds: float = 60.0,
    steps: Sequence[str] | None = None,
    name: str | None = None,
    on_progress: OnProgress | None = None,
) -> Optimized[P, R]:
    """Try the inference checklist on a copy of a callable, and keep what is right and pays.

    Each step is built on top of the steps kept before it, and timed in turns with the version
    without it. It is checked against float64 on the given arguments, and on others of the same
    sizes. Steps that gained nothing are tried again when the rest is in. Then each kept step is
    tried without, and the steps that are left are tried in pairs. The result is timed against the
    callable as it was given, and where it is not faster the plan is empty.

    It is for inference: modules in train mode are put into eval mode first, and checked in it. The
    caller's callable, parameters and random state stay as they are. Up to three copies are held
    during the search, and one by the result. At the end code compiled by `torch.compile` in this
    process is dropped.

    Args:
        fn: any callable that returns tensors. Steps that rewrite layers need an `nn.Module` behind
            it: itself, or one that a function, method or `functools.partial` holds.
        args: positional arguments of a typical call.
        kwargs: its keyword arguments.
        max_error: the largest relative error against float64 that passes. 0: every result tried is
            to be eager's bit for bit. About 1e-2 lets 16 bits in.
        seconds: how long the search and its checks may take, after the first run. A trial that is
            under way by then is given up between two of its calls: a compiler is not interrupted,
            and may take a minute. What was left untried is a remark of the plan.
        steps: only these; a name without its way, such as ``"half"``, is all of its ways.
        name: a name for the workload; the callable's by default.
        on_progress: called with a text and the part that is done, 0 to 1.

    Returns:
        An `Optimized`: the callable, and its `plan`. On KeyboardInterrupt, what was kept so far.

    Raises:
        ArgumentError: OL401, a bad argument, or a callable that returns no tensor.
        Exception: whatever `fn` itself raises on these arguments, unchanged.

    Example:
        >>> import torch, onelaunch as ol
        >>> model, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
        >>> fast = ol.optimize(model, (x,), steps=["eval", "inference-mode"], seconds=1)
        >>> torch.equal(fast(x), model(x))
        True
    """
    workload = checked(fn, args, kwargs)
    _check_numbers(max_error, seconds)
    clock, chosen = Clock(seconds), choose(steps, "optimize")
    with isolated(workload.device, compiles(chosen)):
        found = _Optimization(workload, chosen, max_error, clock, on_progress or tell_nobody)
        call, plan = found.run(name or name_of(fn))
    return Optimized(call, plan)


def plan_in_time(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    max_error: float,
    seconds: float,
    steps: Sequence[str] | None,
    name: str,
    on_progress: OnProgress,
) -> Plan:
    """Find the plan that `optimize` finds, for a command: an alarm ends what is under way when time
    is up, a compiler, too."""
    workload, chosen = checked(fn, args, kwargs), choose(steps, "optimize")
    clock = Clock(seconds)
    with clock.alarm(), isolated(workload.device, compiles(chosen)):
        return _Optimization(workload, chosen, max_error, clock, on_progress).run(name)[1]


@dataclass(eq=False)
class _Optimization:
    """The state of one call of `optimize`."""

    given: Workload
    steps: Sequence[Step]
    max_error: float
    clock: Clock
    tell: OnProgress
    timer: Timer = field(init=False)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timer = timers_for(self.given.device)[0]

    def run(self, name: str) -> tuple[Callable[..., Any], Plan]:
        self.tell("the first run", 0.0)
        required = self._modes()
        first = self._first_run(required)
        try:
            reference = self._reference(required)
            if not reference.repeatable:
                return self._unchanged(name, required, first, reference.doubt)
            self.clock.keep(self._final_seconds(first))
            search = Search(
                self.given,
                self.steps,
                reference,
                self.max_error,
                self.timer,
                self.clock,
                self.tell,
                required,
            )
        except TimeIsUp:
            self.remarks.append("Time was up before anything was tried.")
            return self._unchanged(name, required, first, "the time was too short")
        try:
            search.run()
        except KeyboardInterrupt:
            self.remarks.append("Interrupted: this is what was found by then.")
        self.clock.keep(0)
        return self._finished(name, search, reference, first)

    def _first_run(self, required: Sequence[Step]) -> Turns:
        """Time a few calls after the first, for which there is time in any case: another call, or
        a few ms of them."""
        eager = build(self.given, required)
        with torch.no_grad():
            about = one_call_us(eager, self.given.device)
        taken = [self.timer.sample(eager, about)[-1]]
        while taken[-1] < SHORT_US and len(taken) < LEAST_ROUNDS:
            taken.append(self.timer.sample(eager, taken[-1])[-1])
        return Turns(tuple(taken), tuple(taken))

    def _final_seconds(self, first: Turns) -> float:
        """Guess how long it takes to time the result against the original."""
        call = first.before[0] / 1e6
        likely = 2 * FINAL_CALLS * call + LEAST_FINAL_SECONDS + FINAL_SECONDS
        return min(likely, self.clock.seconds * KEPT_PART)

    def _reference(self, required: Sequence[Step]) -> Reference:
        self.tell("float64 reference", 0.0)
        with self.clock.limit():
            inference = build(self.given, required)
            workload = replace(self.given, fn=inference.call)
            seconds = min(SECONDS, round(self.clock.left * DRAWS_PART, 1))
            reference = make_reference(workload, torch.Generator().manual_seed(0), seconds)
        self.remarks += reference.doubts()
        return reference

    def _modes(self) -> tuple[Step, ...]:
        """Return eval mode as a step to take in any case, if a module is in train mode."""
        roots = modules_behind(self.given)
        training = in_train_mode([module for root in roots for module in root.modules()])
        if not training or EVAL not in self.steps:
            return ()
        if subject_of(self.given).shared:
            self.remarks.append(
                "Modules are in train mode and cannot be copied, so they stay in it: call .eval()."
            )
            return ()
        self.remarks.append(
            "Modules were in train mode: the plan is for eval mode, and was checked in it."
        )
        return (EVAL,)

    def _unchanged(
        self, name: str, required: tuple[Step, ...], first: Turns, why: str
    ) -> tuple[Callable[..., Any], Plan]:
        """Give up where nothing can be checked, or where there is no time for it."""
        trials = [Trial(s.name, s.title, "required", None, None, None, None) for s in required]
        untried = [step for step in self.steps if step not in required]
        call = build(self.given, required).call
        plan = self._plan(name, required, tuple(trials), None, first, untried)
        return call, replace(plan, unsearched=why)

    def _finished(
        self, name: str, search: Search, reference: Reference, first: Turns
    ) -> tuple[Callable[..., Any], Plan]:
        """Build the result anew, and compare it with what was given."""
        self.tell("the result against the original", 0.97)
        steps, error, required = search.best.steps, search.best.check.error, search.required
        self.remarks += search.remarks
        if search.left:
            self.remarks.append(f"Time was up before: {', '.join(search.left)}.")
        if compiles(self.steps) and self.clock.left > search.best.seconds:
            # The trials share the model's code, so what they compiled would count against it.
            search.forget()
            reset_compiler()
            built = self._built(steps)
        else:
            built = search.best.built
        trials, turns = [*search.trials], self._against_eager(built, required)
        tried = {trial.step for trial in trials}
        untried = [step for step in self.steps if step.name not in tried]
        timed = turns is not None
        if turns is None:
            turns = _of_trials(trials, first)
            self.remarks.append(
                "Time was up before the result was timed against the original: the times are those "
                "of the trials."
            )
        if steps != required:
            before, after = turns.timings
            slower = after.median_us >= before.median_us
            trials += [_as_a_whole(steps, error, turns, slower)] if timed else []
            if slower:
                steps, built = required, self._built(required)
                error = own_error(reference)
        if steps == required:  # as the original is timed
            turns = Turns(turns.before, turns.before)
        return built.call, self._plan(name, steps, tuple(trials), error, turns, untried)

    def _built(self, steps: Sequence[Step]) -> ChangedCall:
        """Build, and compile and record in the time that is left; the rest is done by calls."""
        free(self.given.device)
        with quiet():
            built = build(self.given, steps)
            with contextlib.suppress(TimeIsUp), self.clock.limit():
                built.warm()
        return built

    def _against_eager(self, built: ChangedCall, required: Sequence[Step]) -> Turns | None:
        """Time a result in turns with the callable as it was given, and with what is required;
        None: time was up."""
        seconds = max(LEAST_FINAL_SECONDS, min(FINAL_SECONDS, self.clock.seconds / 20))
        try:
            with self.clock.limit():
                eager = build(self.given, required)
                eager.warm(self.clock)
                return in_turns(eager, built, self.timer, seconds, self.clock)
        except TimeIsUp:
            return None

    def _plan(
        self,
        name: str,
        steps: Sequence[Step],
        trials: tuple[Trial, ...],
        error: float | None,
        turns: Turns,
        untried: Sequence[Step] = (),
    ) -> Plan:
        eager, result = turns.timings
        return Plan(
            workload=name,
            steps=tuple(step.name for step in steps),
            trials=trials,
            max_error=float(self.max_error),
            error=finite(error),
            eager=eager,
            result=result if steps else eager,
            environment=environment(),
            remarks=tuple(self.remarks),
            untried=tuple(step.name for step in untried),
        )


def _of_trials(trials: Sequence[Trial], first: Turns) -> Turns:
    """Return the times of the callable as given and of the result, as far as trials have them."""
    timed = [(t.before, t.after) for t in trials if t.outcome == "kept" and t.before and t.after]
    if not timed:
        return first
    return Turns((timed[0][0].median_us,), (timed[-1][1].median_us,))


def _as_a_whole(steps: Sequence[Step], error: float | None, turns: Turns, slower: bool) -> Trial:
    before, after = turns.timings
    reason = "slower than the original" if slower else None
    names = " + ".join(step.name for step in steps)
    outcome = "no gain" if slower else "kept"
    error = finite(error)
    return Trial(names, "all that is kept", outcome, reason, error, before, after, "final")


def compiles(steps: Sequence[Step]) -> bool:
    """Return whether a step compiles code."""
    return any(step.group == "inductor" for step in steps)


def checked(fn: object, args: object, kwargs: object, where: str = "optimize") -> Workload:
    """Make a workload from a user's arguments; a class, whose calls make modules, is a mistake.

    Raises:
        ArgumentError: OL401.
    """
    if isinstance(fn, type):
        what = f"{describe_type(fn)} is not a callable"
        raise bad(what, where, "it is called with the arguments", f"{where}(model, (x,))")
    return validated(fn, args, kwargs, where)


def _check_numbers(max_error: object, seconds: object) -> None:
    if not isinstance(max_error, (int, float)) or not 0 <= max_error < math.inf:
        why = "it is a relative error: 0 for bit for bit, or 1e-2, say"
        raise bad(f"max_error={max_error!r}", "optimize", why, "max_error=1e-2")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        why = "the search takes a number of seconds above 0"
        raise bad(f"seconds={seconds!r}", "optimize", why, "seconds=60")
