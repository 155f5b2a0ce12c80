"""`optimize` as a whole: what comes out, what stays as it was; plans that are saved and applied."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.tools.bench.timers import TimerName, Timing
from onelaunch.tools.checklist import optimize as module
from onelaunch.tools.checklist import search
from onelaunch.tools.checklist.build import ChangedCall
from onelaunch.tools.checklist.plan import Trial
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.steps import BY_NAME, choose
from onelaunch.tools.checklist.subject import Subject
from tests.unit.checklist_steps import apart, contents, lively, same
from tests.unit.test_checklist_branches import Attention, RepVgg
from tests.unit.test_checklist_precision import SCALE, Net, Pair, absent

X = torch.randn(4, 6, 9, 9)
QUICK = ["eval", "inference-mode", "fold-batchnorm", "merge-branches", "channels-last"]


class Stated:
    """A timer by which every step saves a tenth, or what `gains` says."""

    name: TimerName = "wall"

    def __init__(self, **gains: float) -> None:
        self.gains = gains

    def sample(self, call: Any, about_us: float) -> list[float]:
        assert isinstance(call, ChangedCall)
        cost = 100.0
        for name in call.did:
            cost *= 1 - self.gains.get(name.replace("-", "_").partition(":")[0], 0.1)
        return [cost]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the collection of garbage out, which takes longer here than all else."""
    monkeypatch.setattr(module, "free", lambda device: None)
    monkeypatch.setattr(search, "free", lambda device: None)


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step that is possible pay."""
    monkeypatch.setattr(module, "timers_for", lambda device: (Stated(),))


def net() -> nn.Module:
    torch.manual_seed(0)
    return lively(nn.Sequential(RepVgg(), nn.Dropout(0.5), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8)))


@pytest.mark.usefixtures("stated")
def test_the_result_is_right_and_the_model_is_untouched() -> None:
    model = net().train()
    before, random = contents(model), torch.get_rng_state()
    fast = ol.optimize(model, (X,), max_error=1e-4, steps=QUICK)
    assert model.training
    assert same(model, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.requires_grad for p in model.parameters())
    assert fast.plan.steps[:3] == ("eval", "inference-mode", "fold-batchnorm")
    assert "merge-branches:sums" in fast.plan.steps
    assert fast.plan.error is not None
    assert fast.plan.error < 1e-6
    assert any("train mode" in said for said in fast.plan.remarks)
    for x in (X, torch.randn(2, 6, 5, 5)):  # other sizes, too
        assert apart(fast(x), model.eval()(x)) < 1e-6


@pytest.mark.usefixtures("stated")
def test_a_result_of_no_error_is_bit_for_bit() -> None:
    model = net().train()
    fast = ol.optimize(model, (X,), steps=[*QUICK, "half", "graph"])
    assert {"eval", "inference-mode", "graph"} <= {*fast.plan.steps}
    assert "fold-batchnorm" not in fast.plan.steps
    assert {t.outcome for t in fast.plan.trials if "half" in t.step} == {"not possible"}
    for x in (X, -X, X * 100):
        assert torch.equal(fast(x), model.eval()(x))


@pytest.mark.usefixtures("stated")
def test_lower_precision_comes_in_with_an_error() -> None:
    fine = ol.optimize(net(), (X,), max_error=1e-5, steps=["half"])
    assert fine.plan.steps == ()
    assert {t.outcome for t in fine.plan.trials} == {"wrong"}
    coarse = ol.optimize(net(), (X,), max_error=3e-2, steps=["half"])
    (step,) = coarse.plan.steps
    assert step.startswith("half:")
    assert coarse.plan.error is not None
    assert 1e-5 < coarse.plan.error <= 3e-2
    assert coarse(X).dtype == torch.float32


def test_the_result_is_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps pay one by one; together, against the original, they do not: nothing is kept."""
    costs = {0: 100.0, 1: 90.0}

    class Fickle(Stated):
        final = False

        def sample(self, call: Any, about_us: float) -> list[float]:
            return [150.0 if self.final and call.did else costs[min(1, len(call.did))]]

    timer = Fickle()
    monkeypatch.setattr(module, "timers_for", lambda device: (timer,))

    def watch(text: str, part: float) -> None:
        timer.final |= "against the original" in text

    fast = ol.optimize(net(), (X,), steps=["inference-mode"], on_progress=watch)
    assert fast.plan.steps == ()
    assert fast.plan.trials[-1].outcome == "no gain"
    assert fast.plan.trials[-1].reason == "slower than the original"
    assert fast.plan.remarks == ()  # the summary says it, and once is enough
    assert fast.plan.result == fast.plan.eager
    assert "Nothing that was tried pays" in fast.plan.summary
    untried = dataclasses.replace(fast.plan, trials=())  # as a plan that was applied
    assert untried.summary.startswith("The plan has no steps: ")
    assert torch.equal(fast(X), net()(X))


@pytest.mark.usefixtures("stated")
def test_an_interrupt_gives_what_was_kept() -> None:
    def stop(text: str, part: float) -> None:
        if "channels last" in text:
            raise KeyboardInterrupt

    fast = ol.optimize(net(), (X,), max_error=1e-4, steps=QUICK, on_progress=stop)
    assert "inference-mode" in fast.plan.steps
    assert "channels-last" not in fast.plan.steps
    assert any(said.startswith("Interrupted") for said in fast.plan.remarks)
    assert apart(fast(X), net()(X)) < 1e-6


@pytest.mark.usefixtures("stated")
def test_random_results_leave_nothing_to_check() -> None:
    fast = ol.optimize(lambda x: x + torch.randn_like(x), (X,), steps=["inference-mode", "half"])
    assert fast.plan.steps == ()
    assert "Nothing could be checked" in fast.plan.remarks[0]
    assert fast.plan.error is None
    assert fast.plan.summary.startswith("Nothing was tried: the callable's own results change: ")


CANCELS = torch.arange(1, 9) * 2.0**-30
"""Float64 cancels it to 0 alone; 16 bits overflow, where float64 does not."""


@pytest.mark.usefixtures("stated")
@pytest.mark.parametrize(
    ("fn", "x", "finite"),
    [
        (lambda x: (x + 1.0) - 1.0 - x, CANCELS, True),
        (lambda x: x * 1e5, torch.ones(4).half(), False),
        (lambda x: (x * 2).to(torch.float8_e4m3fn), torch.randn(8), True),
    ],
    ids=["0 in float64", "overflow", "8 bits"],
)
def test_a_plan_of_any_error_is_json(fn: Any, x: Tensor, finite: bool) -> None:
    plan = ol.optimize(fn, (x,), steps=["inference-mode"]).plan
    assert (plan.error is not None) is finite
    assert ol.Plan.from_json(plan.to_json()) == plan
    assert "relative error" in str(plan.document())
    (row,) = ol.compare(fn, (x,), engines=["eager"], seconds=0.01)
    assert (row.status == "ok") is finite


@pytest.mark.usefixtures("stated")
def test_dicts_keywords_and_functions() -> None:
    model = Net().eval()
    steps = ["inference-mode", "half:bf16", "graph"]
    fast = ol.optimize(model, (torch.randn(4, 32),), {"scale": SCALE}, max_error=0.05, steps=steps)
    x = torch.randn(4, 32)
    found = fast(x, scale=SCALE)
    assert type(found["pair"]) is Pair
    assert found["pair"].logits.dtype == torch.float32
    other = ol.optimize(lambda x: model(x, scale=SCALE)["y"], (x,), max_error=0.05, steps=steps)
    assert apart(other(x), model(x, scale=SCALE)["y"]) < 0.05
    plain = ol.optimize(torch.sin, (x,), steps=["inference-mode", "eval", "fold-batchnorm"])
    assert plain.plan.steps == ("inference-mode",)


def test_what_is_required_is_no_gain() -> None:
    plan = ol.optimize(net().train(), (X,), steps=["eval", "fold-batchnorm"], seconds=5).plan
    assert (plan.steps, plan.gains, plan.speedup) == (("eval",), (), 1.0)
    (required,) = [trial for trial in plan.trials if trial.outcome == "required"]
    assert (required.step, required.gain) == ("eval", None)
    assert plan.summary.startswith("Nothing that was tried pays: ")
    assert plan.summary.endswith(" per call, with eval alone.")


@pytest.mark.usefixtures("stated")
def test_the_gain_is_over_the_callable_with_what_is_required() -> None:
    plan = ol.optimize(net().train(), (X,), steps=["eval", "inference-mode"]).plan
    assert plan.steps == ("eval", "inference-mode")
    assert (plan.eager.median_us, plan.result.median_us) == (90.0, 81.0)  # eval takes a tenth off
    assert plan.summary.endswith("by inference-mode.")
    assert "instead of 90.0 us, 1.11x" in plan.summary


@pytest.mark.thorough
def test_steps_before_which_time_was_up_are_named() -> None:
    def slow(subject: Subject) -> str:
        time.sleep(2.0)
        return "slept"

    steps = (BY_NAME["fp8:dynamic"], Step("late", "a slow step", slow))
    plan = dataclasses.replace(
        ol.optimize(net(), (X,), steps=["graph"], seconds=1e-3).plan, trials=()
    )
    assert plan.untried == ("graph",)
    assert plan.summary.startswith("Nothing was tried: the time was too short: ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose", lambda names, where: steps)
        plan = ol.optimize(net(), (X,), seconds=1.5).plan
    assert plan.untried == ("late",)
    assert plan.summary.startswith("Nothing that was tried pays (not tried: late): ")
    assert ol.Plan.from_json(plan.to_json()) == plan


@pytest.mark.thorough
def test_a_compiler_that_is_under_way_is_ended_by_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within the seconds, but for the end; its warm-up and the rest are left out, and said so."""

    def endless(subject: Subject) -> None:
        time.sleep(60)

    steps = (BY_NAME["inference-mode"], Step("endless", "a compiler", endless))
    monkeypatch.setattr(module, "choose", lambda names, where: steps)
    handler, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    plan = module.plan_in_time(
        *(net(), (X,), {}),
        max_error=0.0,
        seconds=3.0,
        steps=None,
        name="net",
        on_progress=lambda text, part: None,
    )
    assert time.monotonic() - began < 10
    assert [trial.step for trial in plan.trials if trial.round == "first"] == ["inference-mode"]
    assert any(said.startswith("Time was up before: endless") for said in plan.remarks)
    assert plan.eager.median_us > 0
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_where_time_is_up_at_once_the_time_is_that_of_warm_calls() -> None:
    calls = itertools.count()

    class Cold(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if next(calls) == 0:
                time.sleep(0.1)
            return x + 1

    cold = ol.optimize(Cold().eval(), (X,), seconds=1e-3).plan
    assert cold.eager.median_us < 50_000
    assert cold.eager.samples > 1

    fast = ol.optimize(net(), (X,), seconds=1e-3)
    assert fast.plan.steps == fast.plan.trials == ()
    assert fast.plan.remarks == ("Time was up before anything was tried.",)
    assert fast.plan.eager == fast.plan.result
    assert torch.equal(fast(X), net()(X))


@pytest.mark.parametrize(("cost", "steps"), [(90.0, ("inference-mode",)), (100.5, ())])
def test_where_time_is_up_before_the_end_the_times_are_those_of_the_trials(
    cost: float, steps: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Costs(Stated):
        def sample(self, call: Any, about_us: float) -> list[float]:
            return [cost if call.did else 100.0]

    monkeypatch.setattr(module, "timers_for", lambda device: (Costs(),))
    monkeypatch.setattr(module._Optimization, "_against_eager", lambda *_: None)
    fast = ol.optimize(net(), (X,), steps=["inference-mode"])
    assert fast.plan.steps == steps
    assert any("the times are those of the trials" in said for said in fast.plan.remarks)
    result = cost if steps else 100.0
    assert (fast.plan.eager.median_us, fast.plan.result.median_us) == (100.0, result)


def test_by_the_clock() -> None:
    """With real times: whatever is kept, the figures hold together."""
    fast = ol.optimize(net(), (X,), max_error=1e-3, seconds=2, steps=QUICK)
    plan = fast.plan
    assert plan.eager.median_us > 0
    assert plan.result.median_us <= plan.eager.median_us
    assert plan.speedup >= 1
    assert [t for t in plan.trials if t.round == "first"]


@pytest.mark.usefixtures("stated")
def test_a_module_that_cannot_be_copied_is_not_changed() -> None:
    model = net()
    model.lock = threading.Lock()
    before = contents(model)
    fast = ol.optimize(model, (X,), max_error=0.1, steps=[*QUICK, "half", "graph"])
    assert same(model, before)
    assert all(p.requires_grad for p in model.parameters())
    reasons = {t.step: t.reason for t in fast.plan.trials}
    assert reasons["fold-batchnorm"] == "a module behind the callable cannot be copied"
    assert reasons["half:bf16"] == "a module behind the callable cannot be copied"
    assert "inference-mode" in fast.plan.steps
    assert apart(fast(X), model(X)) <= 0.1
    training = ol.optimize(model.train(), (X,), steps=["eval", "inference-mode"])
    assert model.training
    assert "cannot be copied" in training.plan.remarks[0]


# Plans, saved and applied.


def made(steps: tuple[str, ...], max_error: float = 1e-4, **options: Any) -> ol.Plan:
    """A plan as a search would have left it."""
    timing = Timing(10.0, 1.0, 5)
    trial = Trial("eval", "eval mode", "kept", None, 0.0, timing, timing)
    fields: dict[str, Any] = {
        "workload": "net",
        "steps": steps,
        "trials": (trial, dataclasses.replace(trial, error=None, before=None, after=None)),
        "max_error": max_error,
        "error": 1e-7,
        "eager": timing,
        "result": timing,
        "environment": {"torch": "2", "gpu": None},
        **options,
    }
    return ol.Plan(**fields)


def test_a_plan_is_data() -> None:
    plan = made(("eval", "graph"), remarks=("said",))
    assert ol.Plan.from_json(plan.to_json()) == plan
    assert plan.without("eval").steps == ("graph",)
    for text in ("{}", "[]", '{"steps": 1}'):
        with pytest.raises(ValueError, match="not a plan"):
            ol.Plan.from_json(text)
    with pytest.raises(json.JSONDecodeError):
        ol.Plan.from_json("")


@pytest.mark.usefixtures("stated")
def test_a_plan_found_is_applied_again() -> None:
    model = net()
    found = ol.optimize(model, (X,), max_error=1e-4, steps=QUICK)
    plan = ol.Plan.from_json(found.plan.to_json())
    before = contents(model)
    fast = plan.apply(model, (X,))
    assert same(model, before)
    assert torch.equal(fast(X), found(X))
    assert fast.plan == plan
    again = lively(net())  # other weights, built alike
    with torch.no_grad():
        again[2].weight.mul_(2)
    assert apart(plan.apply(again, (X,))(X), again(X)) < 1e-6


def test_a_plan_without_steps_applies_to_any_callable() -> None:
    noise = made(()).apply(lambda x: x + torch.randn_like(x), (X,))
    assert noise(X).shape == X.shape
    dropout = made(("eval",)).apply(nn.Dropout(0.5).eval(), (X,))  # in eval mode already
    assert torch.equal(dropout(X), X)
    with pytest.raises(ValueError, match="no copy"):
        made(()).apply(NoCopy().eval(), (X,))


class NoCopy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def __deepcopy__(self, memo: object) -> NoCopy:
        raise ValueError("no copy")


def test_a_plan_for_a_model_of_another_structure_says_which_step_and_why() -> None:
    plan = made(("inference-mode", "fold-batchnorm", "merge-branches:parallel"))
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval(), torch.randn(2, 6)
    with pytest.raises(ol.ArgumentError) as caught:
        plan.apply(model, (x,))
    error = caught.value
    assert error.code == "OL403"
    assert error.what == (
        "`fold-batchnorm` does not apply here: no BatchNorm with running statistics runs in it; "
        "`merge-branches:parallel` does not apply here: "
        "no two layers that could be one read the same input"
    )
    assert 'plan.without("fold-batchnorm", "merge-branches:parallel")' in error.fix
    fast = plan.without("fold-batchnorm", "merge-branches:parallel").apply(model, (x,))
    assert torch.equal(fast(x), model(x))


def test_a_plan_on_a_machine_without_a_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    plan = made(("inference-mode", "int8:dynamic"), max_error=0.1)
    model, x = nn.Linear(32, 32).eval(), torch.randn(4, 32)
    with pytest.raises(ol.ArgumentError, match=r"`int8:dynamic`.*torchao is not installed"):
        plan.apply(model, (x,))
    assert torch.equal(plan.without("int8:dynamic").apply(model, (x,))(x), model(x))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_of_a_gpu_on_a_machine_without_says_so() -> None:
    plan = made(("inference-mode", "fp8:dynamic", "tf32", "graph"), max_error=0.1)
    model, x = nn.Linear(32, 32).eval(), torch.randn(4, 32)
    with pytest.raises(ol.ArgumentError) as caught:
        plan.apply(model, (x,))
    assert caught.value.what.count("it needs an NVIDIA GPU") == 2


def test_a_plan_of_a_later_release_says_so() -> None:
    with pytest.raises(ol.ArgumentError, match=r"`sparse`.*no such step"):
        made(("inference-mode", "sparse")).apply(nn.Linear(6, 6), (X,))


def test_a_plan_that_is_wrong_here_names_the_step() -> None:
    """Of other weights fewer bits may be too few."""
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    plan = made(("inference-mode", "half:bf16"), max_error=1e-5)
    with pytest.raises(ol.ArgumentError, match=r"`half:bf16` does not apply.*relative error"):
        plan.apply(model, (torch.randn(4, 32),))


def test_a_plan_for_train_mode_applies_in_eval_mode() -> None:
    plan = made(("eval", "inference-mode"))
    for model in (net(), net().train()):
        assert torch.equal(plan.apply(model, (X,))(X), net()(X))


def test_a_plan_of_merged_layers_holds_on_other_inputs() -> None:
    model, x = Attention().eval(), torch.randn(2, 5, 16)
    fast = made(("inference-mode", "merge-branches:parallel")).apply(model, (x,))
    other = torch.randn(3, 7, 16)
    assert apart(fast(other), model(other)) < 1e-6
    assert apart(fast(x, other[:2, :5]), model(x, other[:2, :5])) < 1e-6


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model, x = net().cuda(), X.cuda()
    exact = ol.optimize(model, (x,), seconds=30)
    assert torch.equal(exact(x), model(x))
    assert "graph" in exact.plan.steps
    fast = ol.optimize(model, (x,), max_error=1e-2, seconds=60)
    assert apart(fast(x), model(x)) <= 1e-2
    assert fast.plan.speedup >= 1
    again = ol.Plan.from_json(fast.plan.to_json()).apply(model, (x,))
    assert apart(again(x), model(x)) <= 1e-2


# Mistakes.


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_error": -1}, "max_error=-1"),
        ({"max_error": float("nan")}, "max_error=nan"),
        ({"seconds": 0}, "seconds=0"),
        ({"steps": ["grahp"]}, "no step is called grahp"),
        ({"steps": "graph"}, "steps='graph'"),
        ({"steps": []}, r"steps=\[\]"),
        ({"fn": nn.Linear}, "is not a callable"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], what: str) -> None:
    given = {"fn": nn.Linear(6, 6), "args": (X,), **options}
    with pytest.raises(ol.ArgumentError, match=what):
        ol.optimize(**given)


def test_a_near_name_is_offered() -> None:
    with pytest.raises(ol.ArgumentError) as caught:
        choose(["fold-batchnom"], "optimize")
    assert caught.value.fix == "steps=['fold-batchnorm']"


def test_a_name_without_its_way_is_all_of_them() -> None:
    assert {s.name for s in choose(["int8"], "")} == {"int8:dynamic", "int8:weight-only"}
    assert choose(["half:fp16"], "") == (BY_NAME["half:fp16"],)


def test_a_callable_without_tensors_is_named() -> None:
    with pytest.raises(ol.ArgumentError, match="returns no tensor"):
        ol.optimize(len, ([1],))
