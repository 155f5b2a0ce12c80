"""The search, with costs that a test states: what is kept, tried again, taken out, paired."""

from __future__ import annotations

import gc
import itertools
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch.tools.bench.reference import make_reference
from onelaunch.tools.bench.timers import TimerName
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.checklist import search as module
from onelaunch.tools.checklist.build import ChangedCall
from onelaunch.tools.checklist.check import check
from onelaunch.tools.checklist.clock import Clock, TimeIsUp
from onelaunch.tools.checklist.search import Search
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import NotPossible, Subject
from onelaunch.tools.checklist.turns import Turns, in_turns

X = torch.randn(3, 4)
Cost = Callable[[set[str]], float]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Leave the collection of garbage out, which takes longer here than all else."""
    if "freed" not in request.node.name:
        monkeypatch.setattr(module, "free", lambda device: None)


@dataclass
class Stated:
    """A timer that knows what each set of steps costs."""

    cost: Cost
    name: TimerName = "wall"
    asked: list[frozenset[str]] = field(default_factory=list[frozenset[str]])

    def sample(self, call: Any, about_us: float) -> list[float]:
        assert isinstance(call, ChangedCall)
        self.asked.append(frozenset(call.did))
        return [self.cost(set(call.did))]


def off_by(error: float) -> Callable[[Subject], str]:
    def take(subject: Subject) -> str:
        subject.after.append(lambda t: t * (1 + error))
        return "done"

    return take


def step(name: str, error: float = 0.0, **options: Any) -> Step:
    return Step(name, name.upper(), off_by(error), **options)


def searching(
    steps: list[Step],
    cost: Cost,
    max_error: float = 1e-2,
    told: Callable[[str, float], object] = lambda *_: None,
    seconds: float = 1000.0,
    **options: Any,
) -> Search:
    workload = Workload(nn.Linear(4, 4).eval(), (X,))
    reference = make_reference(workload, torch.Generator().manual_seed(0))
    clock = Clock(seconds)
    return Search(workload, steps, reference, max_error, Stated(cost), clock, told, **options)


def searched(*args: Any, **options: Any) -> Search:
    found = searching(*args, **options)
    found.run()
    return found


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still."""
    found = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


def kept(found: Search) -> set[str]:
    return {s.name for s in found.best.steps}


def outcomes(found: Search, when: str) -> dict[str, str]:
    return {t.step: t.outcome for t in found.trials if t.round == when}


def additive(**gains: float) -> Cost:
    """Each step takes its gain off a cost of 100."""
    return lambda steps: 100 - sum(gains[name] for name in steps)


def test_what_pays_is_kept_in_order() -> None:
    found = searched([step("a"), step("b"), step("c")], additive(a=20, b=-5, c=1))
    assert kept(found) == {"a"}  # 1 of 80 is less than the 2% that a step must gain
    assert outcomes(found, "first") == {"a": "kept", "b": "no gain", "c": "no gain"}
    first = found.trials[0]
    assert first.before is not None
    assert first.after is not None
    assert (first.before.median_us, first.after.median_us) == (100, 80)
    assert first.gain == pytest.approx(1.25)
    assert first.reason == "done"


def test_a_gain_that_is_not_kept_says_why() -> None:
    """Twice as fast by the medians, but slower in every third round."""
    turns = itertools.cycle((50.0, 50.0, 130.0))
    found = searched([step("a")], lambda steps: next(turns) if steps else 100.0, seconds=4.0)
    (trial,) = (t for t in found.trials if t.round == "first")
    assert trial.outcome == "no gain"
    assert trial.gain == pytest.approx(2.0)
    assert trial.reason == "done; not in three rounds of four"


def test_what_is_not_tried_is_not_told() -> None:
    told: list[str] = []
    found = searching([step("a")], additive(a=20), told=lambda text, _: told.append(text))
    found.clock.keep(1000)
    found.run()
    assert (found.left, told) == (["a"], [])


def test_what_came_too_early_is_tried_again() -> None:
    def cost(steps: set[str]) -> float:
        return 100 - 20 * ("b" in steps) - 30 * ({"a", "b"} <= steps)

    found = searched([step("a"), step("b")], cost)
    assert kept(found) == {"a", "b"}
    assert outcomes(found, "first") == {"a": "no gain", "b": "kept"}
    assert [t.outcome for t in found.trials if t.step == "a"][:2] == ["no gain", "kept"]


def test_what_a_later_step_replaces_is_taken_out() -> None:
    def cost(steps: set[str]) -> float:
        return {"": 100, "a": 80, "b": 50, "ab": 50}["".join(sorted(steps))]

    found = searched([step("a"), step("b")], cost)
    assert kept(found) == {"b"}
    assert outcomes(found, "recheck") == {"a": "no gain", "b": "kept"}
    (out,) = (t for t in found.trials if t.round == "recheck" and t.step == "a")
    assert out.reason == "what came later does without it"


def test_two_that_pay_together_alone() -> None:
    def cost(steps: set[str]) -> float:
        return 100 - 40 * ({"a", "c"} <= steps) + 3 * len(steps)

    found = searched([step("a"), step("b"), step("c")], cost)
    assert kept(found) == {"a", "c"}
    assert outcomes(found, "final") == {"a + b": "no gain", "a + c": "kept"}


def test_of_a_group_the_fastest_is_kept() -> None:
    steps = [step(name, group="g") for name in "abc"]
    found = searched(steps, additive(a=10, b=30, c=20))
    assert kept(found) == {"b"}
    assert outcomes(found, "first") == {"a": "kept", "b": "kept", "c": "no gain"}
    assert not any(len(names) > 1 for names in found.timer.asked)  # pyright: ignore


def test_the_search_finds_the_best_by_exhaustion() -> None:
    """Over stated costs of three steps: never worse than the start, and the best of all sets
    wherever steps only add up."""
    for gains in itertools.product((-10, 0, 15), repeat=3):
        cost = additive(**dict(zip("abc", gains, strict=True)))
        found = searched([step(name) for name in "abc"], cost)
        sets = [set(c) for n in range(4) for c in itertools.combinations("abc", n)]
        assert cost(kept(found)) == min(map(cost, sets))


def test_what_is_too_far_off_is_wrong() -> None:
    found = searched([step("a", error=0.1), step("b", error=1e-3)], additive(a=50, b=10))
    assert kept(found) == {"b"}
    first, second = found.trials[:2]
    assert first.outcome == "wrong"
    assert first.reason == "relative error 1.0e-01 is above 1.0e-02"
    assert first.error == pytest.approx(0.1, rel=1e-3)
    assert first.after is None  # what is wrong is not timed
    assert second.error == pytest.approx(1e-3, rel=1e-2)
    assert found.best.check.error == second.error


def test_errors_of_steps_together_count() -> None:
    found = searched([step("a", error=7e-3), step("b", error=7e-3)], additive(a=10, b=10))
    assert kept(found) == {"a"}
    assert outcomes(found, "first")["b"] == "wrong"


def test_without_an_error_results_are_compared_bit_for_bit() -> None:
    steps = [step("a", rounds=True), step("b"), step("c", error=1e-6)]
    found = searched(steps, additive(a=50, b=10, c=50), max_error=0)
    assert kept(found) == {"b"}
    assert found.trials[0].outcome == "not possible"
    assert found.trials[0].reason == "it rounds otherwise, and max_error is 0"
    assert found.trials[2].outcome == "wrong"
    assert found.trials[2].reason == "it is not eager's result bit for bit"


def test_a_step_that_is_wrong_on_a_draw_alone() -> None:
    def take(subject: Subject) -> None:
        subject.after.append(lambda t: t.clamp(max=3.0))

    found = searched([Step("a", "A", take)], additive(a=50))
    (trial,) = found.trials
    assert trial.outcome == "wrong"
    assert trial.reason is not None
    assert "on the draw large" in trial.reason


def test_what_raises_is_a_trial_and_the_rest_goes_on() -> None:
    def raises(subject: Subject) -> None:
        raise LookupError("no kernel")

    def refuses(subject: Subject) -> None:
        raise NotPossible("nothing to do")

    def breaks(subject: Subject) -> None:
        subject.after.append(lambda t: t.view(-1, 100))

    steps = [Step("a", "A", raises), Step("b", "B", refuses), Step("c", "C", breaks), step("d")]
    found = searched(steps, additive(a=1, b=1, c=1, d=50))
    assert kept(found) == {"d"}
    assert [(t.outcome, t.reason) for t in found.trials[:2]] == [
        ("failed", "LookupError: no kernel"),
        ("not possible", "nothing to do"),
    ]
    assert found.trials[2].outcome == "failed"


def test_what_failed_too_early_is_tried_again() -> None:
    def needs_b(subject: Subject) -> None:
        if not subject.autocast:
            raise LookupError("only with b")

    def b(subject: Subject) -> None:
        subject.autocast = torch.bfloat16
        subject.after.append(lambda t: t.float())

    found = searched([Step("a", "A", needs_b), Step("z", "Z", b)], additive(a=20, z=20))
    assert [(t.round, t.outcome) for t in found.trials if t.step == "a"][:2] == [
        ("first", "failed"),
        ("recheck", "kept"),
    ]
    assert kept(found) == {"a", "z"}


def test_a_result_that_the_next_call_overwrites_is_wrong() -> None:
    def take(subject: Subject) -> None:
        held: list[Tensor] = []

        def reuse(t: Tensor) -> Tensor:
            held.append(t.detach().clone())
            return held[0].copy_(t.detach())

        subject.after.append(reuse)

    found = searched([Step("a", "A", take)], additive(a=50))
    assert found.trials[0].reason == "the next call overwrites its result"


def test_a_result_is_overwritten_by_a_draw_that_changes_it() -> None:
    """Shuffled integers have the same sum: the draws after them tell."""
    workload = Workload(lambda ids: ids.sum()[None], (torch.arange(4),))
    reference = make_reference(workload, torch.Generator().manual_seed(0))
    held = torch.zeros(1, dtype=torch.int64)
    found = check(lambda ids: held.copy_(ids.sum()), workload, reference, 0.0)
    assert found.wrong == "the next call overwrites its result"
    assert check(workload.fn, workload, reference, 0.0).wrong is None


def test_what_is_required_is_kept_whatever_it_costs() -> None:
    required = step("a")
    found = searched([required, step("b")], additive(a=-50, b=10), required=(required,))
    assert kept(found) == {"a", "b"}
    assert outcomes(found, "first") == {"a": "required", "b": "kept"}
    assert "a" not in outcomes(found, "recheck")


def test_no_trial_is_begun_when_time_is_up(now: list[float]) -> None:
    def slow(subject: Subject) -> None:
        now[0] += 10

    steps = [Step(name, name, slow) for name in "abc"]
    found = searched(steps, additive(a=10, b=10, c=10), seconds=15.0)
    assert [t.step for t in found.trials] == ["a"]
    assert kept(found) == {"a"}
    assert found.left[:2] == ["b", "c"]  # `b` was under way


def test_a_check_and_a_timing_end_when_time_is_up(now: list[float]) -> None:
    def slowly(t: Tensor) -> Tensor:
        now[0] += 10
        return t

    def slow(subject: Subject) -> None:
        subject.after.append(slowly)

    steps = [Step("fast", "", lambda subject: None), Step("slow", "", slow)]
    found = searched(steps, additive(fast=10, slow=10), seconds=25.0)
    assert kept(found) == {"fast"}
    assert found.left == ["slow"]
    assert now[0] == 30  # the call that was under way came to its end
    clock, calls = Clock(25), list[str]()

    class Slow:
        name: TimerName = "wall"

        def sample(self, call: Any, about_us: float) -> list[float]:
            calls.append(call())
            now[0] += 10
            return [1.0]

    with pytest.raises(TimeIsUp):
        in_turns(lambda: "before", lambda: "after", Slow(), 60.0, clock)
    assert calls == ["before", "after", "before"]


def test_a_clock_without_an_end_rings_no_alarm() -> None:
    clock = Clock(float("inf"))
    with clock.alarm(), clock.limit():
        clock.keep(3.0)
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_compiler_is_not_begun_where_it_would_not_end(now: list[float]) -> None:
    def compiles(subject: Subject) -> None:
        now[0] += 10

    first = Step("inductor:default", "", compiles, group="inductor")
    second = Step("inductor:max-autotune", "", compiles, group="inductor")
    found = searched([first, second], lambda s: 100 - 20 * len(s), seconds=40.0)
    assert [t.step for t in found.trials] == ["inductor:default"]
    assert found.left == ["inductor:max-autotune"]  # likely four times as long


def test_an_interrupt_leaves_what_was_kept() -> None:
    def stop(subject: Subject) -> None:
        raise KeyboardInterrupt

    steps = [step("a"), Step("b", "B", stop), step("c")]
    found = searching(steps, additive(a=10, b=10, c=10))
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert kept(found) == {"a"}


def test_progress_goes_up() -> None:
    told: list[float] = []
    cost = additive(a=10, b=-1, c=10, d=-1)
    searched([step(name) for name in "abcd"], cost, told=lambda text, part: told.append(part))
    assert told == sorted(told)
    assert told[-1] < 1


@pytest.mark.parametrize(
    ("before", "after", "gain", "pays"),
    [
        ([100.0] * 8, [90.0] * 8, 0.02, True),
        ([100.0] * 8, [99.0] * 8, 0.02, False),
        ([100.0] * 8, [101.0] * 8, -0.02, True),
        ([100.0] * 8, [103.0] * 8, -0.02, False),
        # Half of the rounds are slower: noise, whatever the median says.
        ([100.0] * 8, [60.0] * 5 + [130.0] * 3, 0.02, False),
    ],
)
def test_a_gain_is_one_in_most_rounds(
    before: list[float], after: list[float], gain: float, pays: bool
) -> None:
    assert Turns(tuple(before), tuple(after)).pays(gain) is pays


def test_turns_alternate_and_end_when_clear() -> None:
    calls: list[str] = []

    class Timer:
        name: TimerName = "wall"

        def sample(self, call: Any, about_us: float) -> list[float]:
            call()
            return [100.0 if calls[-1] == "before" else 50.0]

    turns = in_turns(lambda: calls.append("before"), lambda: calls.append("after"), Timer(), 60.0)
    assert len(turns.before) == len(turns.after) == 5
    assert calls[2:6] == ["before", "after", "after", "before"]
    assert turns.ratio == 0.5


@pytest.mark.thorough
def test_trials_are_freed_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the best, and no other, is alive when a trial begins."""
    alive: list[int] = []
    refs: list[weakref.ref[nn.Module]] = []

    def take(subject: Subject) -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(subject.roots[0]))

    steps = [Step(name, name, take) for name in "abc"]
    searched(steps, additive(a=0, b=0, c=0))
    assert max(alive) <= 1
