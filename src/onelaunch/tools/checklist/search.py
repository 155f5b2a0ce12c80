"""The search: each step on top of those kept before it, then again, taken out, and in pairs."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from onelaunch.tools.bench.entry import free
from onelaunch.tools.bench.reference import Reference, said
from onelaunch.tools.bench.timers import Timer, Timing, synchronize
from onelaunch.tools.bench.workload import OnProgress, Workload
from onelaunch.tools.checklist.build import ChangedCall, Refusal, build, quiet
from onelaunch.tools.checklist.check import Check, check, finite
from onelaunch.tools.checklist.clock import Clock, TimeIsUp
from onelaunch.tools.checklist.plan import Outcome, Round, Trial
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.steps import in_order
from onelaunch.tools.checklist.turns import Turns, in_turns

TRIAL_SECONDS = 3.0  # of timing, at most
LEAST_TRIAL_SECONDS = 0.2
AUTOTUNING = 12.0
"""The factor by which it makes Inductor's build longer, until that is known."""
_HEAVY = {"half": 0, "channels-last": 1, "tf32": 2, "8 bits": 3}
NO_GAIN = 0.005
"""A step that saves less than that is let go again."""


@dataclass
class CheckedSteps:
    """A set of steps, built and checked.

    Attributes:
        seconds: how long that took.
    """

    steps: tuple[Step, ...]
    built: ChangedCall
    check: Check
    seconds: float


@dataclass
class Search:
    """The search for the steps to keep.

    Attributes:
        workload: the user's callable, which is only read; its modules are in eval mode where that
            is a step.
        steps: those to try, in order.
        required: steps that are kept, whatever they gain.
        clock: its time.
        best: the steps that are kept so far.
        trials: all that was tried.
        left: what there was no time for.
    """

    workload: Workload
    steps: Sequence[Step]
    reference: Reference
    max_error: float
    timer: Timer
    clock: Clock
    tell: OnProgress
    required: tuple[Step, ...] = ()
    best: CheckedSteps = field(init=False)
    trials: list[Trial] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    _refused: list[Step] = field(default_factory=list)
    _failed: list[Step] = field(default_factory=list)
    _build_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with self.clock.limit(), quiet():
            self.best = self._candidate(self.required)

    def run(self) -> None:
        """Try all steps in order, then those refused again, then without each, then in pairs."""
        for step in self.required:
            did = self.best.built.did[step.name]
            self._note(step, "required", did, self.best.check.error, None, "first")
        for i, step in enumerate(self.steps):
            self._tell(f"{step.title}", 0.6 * i / len(self.steps))
            if step not in self.required:
                self._try((step,), "first")
        self._again()
        self._without()
        self._pairs()

    def forget(self) -> None:
        """Free what is kept."""
        del self.best
        free(self.workload.device)

    def _tell(self, text: str, part: float) -> None:
        spent = 1 - self.clock.left / self.clock.seconds
        if spent >= 1:
            return  # it is not tried
        self.tell(f"trying: {text}", min(0.95, max(part, spent)))

    @contextlib.contextmanager
    def _limited(self, what: str) -> Generator[None]:
        """Give up what is under way when time is up, and note it."""
        try:
            with self.clock.limit():
                yield
        except TimeIsUp:
            self.left.append(what)
            free(self.workload.device)

    def _again(self) -> None:
        """Try each step that gained nothing or failed again, on top of the steps kept after it."""
        names = [step.name for step in self.steps]
        last = max((names.index(s.name) for s in self.best.steps if s.name in names), default=-1)
        # What changes the kernels most comes first, since time may be up before the last.
        by_weight = sorted(self._refused, key=lambda s: _HEAVY.get(s.group or s.name, len(_HEAVY)))
        for step in [*by_weight, *self._failed]:
            if names.index(step.name) < last and not self._excluded(step):
                self._tell(f"{step.title}, again", 0.6)
                self._try((step,), "recheck")

    def _excluded(self, step: Step) -> bool:
        """Return whether another step of its group is kept already."""
        return step.group is not None and any(s.group == step.group for s in self.best.steps)

    def _without(self) -> None:
        """Take each step out again that was kept, and leave it out if it is not missed."""
        kept = [step for step in self.best.steps if step not in self.required]
        if len(kept) < 2:
            return  # it was measured against its absence
        for step in kept:
            rest = tuple(other for other in self.best.steps if other is not step)
            self._tell(f"without: {step.title}", 0.8)
            if not self._enough_time(rest, f"without {step.name}"):
                continue
            candidate = turns = None
            with self._limited(f"without {step.name}"):
                candidate = self._made(rest, step, "recheck")
                if candidate is not None:
                    turns = self._time(candidate.built, self.best.built)
            if candidate is None or turns is None:
                continue
            missed = turns.ratio < 1 - min(NO_GAIN, step.least_gain)
            outcome: Outcome = "kept" if missed or candidate.check.wrong else "no gain"
            reason = None if outcome == "kept" else "what came later does without it"
            self._note(step, outcome, reason, self.best.check.error, turns, "recheck")
            if outcome == "no gain":
                self.best = candidate
            del candidate
            free(self.workload.device)

    def _pairs(self) -> None:
        """Try two at once of the steps that gained nothing alone, one of each group."""
        groups = {step.group or step.name: step for step in reversed(self._refused)}
        for pair in itertools.combinations(reversed(groups.values()), 2):
            if any(self._excluded(step) or step in self.best.steps for step in pair):
                continue
            if self.clock.left <= 0:
                self.left.append("pairs of the steps that gained nothing alone")
                break
            self._tell(" and ".join(step.title for step in pair), 0.9)
            self._try(pair, "final")

    def _try(self, steps: tuple[Step, ...], when: Round) -> None:
        """Try steps on top of the best, in place of those of their groups."""
        groups = {step.group for step in steps} - {None}
        kept = [step for step in self.best.steps if step.group not in groups]
        wanted = tuple(in_order([*kept, *steps]))
        step = _joined(steps)
        if self.max_error == 0 and any(s.rounds for s in steps):
            reason = "it rounds otherwise, and max_error is 0"
            self._note(step, "not possible", reason, None, None, when)
            return
        if not self._enough_time(wanted, step.name):
            return
        candidate = turns = None
        with self._limited(step.name):
            candidate = self._made(wanted, step, when)
            if candidate is not None and candidate.check.wrong is None:
                turns = self._time(self.best.built, candidate.built)
        if candidate is None:
            return
        if candidate.check.wrong is not None:
            self._note(step, "wrong", candidate.check.wrong, candidate.check.error, None, when)
        elif turns is not None:
            self._judge(steps, step, candidate, turns, when)
        del candidate
        free(self.workload.device)

    def _judge(
        self,
        steps: tuple[Step, ...],
        step: Step,
        candidate: CheckedSteps,
        turns: Turns,
        when: Round,
    ) -> None:
        """Keep a candidate if it pays.

        Args:
            step: the steps that were tried as one.
        """
        did = next(iter(candidate.built.did[s.name] for s in steps), None)
        if turns.pays(step.least_gain):
            self._note(step, "kept", did, candidate.check.error, turns, when)
            self.best = candidate
            self._refused = [s for s in self._refused if s not in steps]
        else:
            before, after = turns.timings
            if after.median_us <= before.median_us * (1 - max(step.least_gain, 0)):
                did = "; ".join(filter(None, (did, "not in three rounds of four")))
            self._note(step, "no gain", did, candidate.check.error, turns, when)
            self._refused += [s for s in steps if s not in self._refused]

    def _enough_time(self, steps: tuple[Step, ...], what: str) -> bool:
        """Return whether there is time to build these, by how long their likes took."""
        likely = max(map(self._likely_seconds, steps), default=0.0)
        if self.clock.left > likely:
            return True
        self.left.append(what)
        return False

    def _likely_seconds(self, step: Step) -> float:
        """Guess how long it takes to build with a step, by the last time."""
        known = self._build_seconds
        if step.name == "inductor:max-autotune" and step.name not in known:
            return AUTOTUNING * known.get("inductor:default", 0.0)
        return known.get(step.name, 0.0)

    def _made(self, steps: tuple[Step, ...], step: Step, when: Round) -> CheckedSteps | None:
        """Build and check; None, with a trial that says why, where that fails."""
        try:
            with quiet():
                return self._candidate(steps)
        except Refusal as refusal:
            other = "" if refusal.step.name in step.name else f"{refusal.step.name}: "
            self._note(step, "not possible", f"{other}{refusal}", None, None, when)
        except Exception as error:  # noqa: BLE001  a library may raise anything in a trial
            self._note(step, "failed", said(error), None, None, when)
            if when == "first":
                self._failed.append(step)
        free(self.workload.device)
        return None

    def _candidate(self, steps: tuple[Step, ...]) -> CheckedSteps:
        start = time.monotonic()
        built = build(self.workload, steps)
        found = check(built.call, self.workload, self.reference, self.max_error, self.clock)
        if found.wrong is None or not steps:
            built.warm(self.clock)
        synchronize(self.workload.device)
        spent = time.monotonic() - start
        for step in steps:
            if step.group == "inductor" or step.name == "graph":
                self._build_seconds[step.name] = spent
        if found.left:
            self._remark(f"A check ended after 10 s, before the draws {', '.join(found.left)}.")
        return CheckedSteps(tuple(steps), built, found, spent)

    def _time(self, before: ChangedCall, after: ChangedCall) -> Turns:
        seconds = min(TRIAL_SECONDS, self.clock.seconds / 20, self.clock.left)
        seconds = max(LEAST_TRIAL_SECONDS, seconds)
        return in_turns(before, after, self.timer, seconds, self.clock)

    def _note(
        self,
        step: Step,
        outcome: Outcome,
        reason: str | None,
        error: float | None,
        turns: Turns | None,
        when: Round,
    ) -> None:
        timings: tuple[Timing | None, Timing | None] = (None, None)
        if turns is not None:
            timings = turns.timings
        known = finite(error)
        self.trials.append(Trial(step.name, step.title, outcome, reason, known, *timings, when))

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)


def _joined(steps: tuple[Step, ...]) -> Step:
    """Make one step of several, for a trial of all at once."""
    if len(steps) == 1:
        return steps[0]
    return Step(
        " + ".join(step.name for step in steps),
        ", and ".join(step.title for step in steps),
        steps[0].take,
        any(step.rounds for step in steps),
        least_gain=max(step.least_gain for step in steps),
    )
