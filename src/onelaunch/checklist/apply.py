"""A saved plan on a callable: its steps taken without a search, and compared with the callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch

from onelaunch.bench.environment import environment
from onelaunch.bench.reference import Case, make_reference, said, snapshot
from onelaunch.bench.timers import timers_for
from onelaunch.bench.workload import OnProgress, Workload
from onelaunch.checklist.build import Built, Refusal, build, quiet
from onelaunch.checklist.check import check, judged
from onelaunch.checklist.modes import EVAL
from onelaunch.checklist.optimize import FINAL_SECONDS, Optimized, checked, isolated
from onelaunch.checklist.plan import Plan
from onelaunch.checklist.step import Step
from onelaunch.checklist.steps import BY_NAME
from onelaunch.checklist.subject import modules_behind
from onelaunch.checklist.turns import in_turns
from onelaunch.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


def apply(
    plan: Plan, fn: Callable[P, R], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Optimized[P, R]:
    """See `Plan.apply`."""
    workload = checked(fn, args, kwargs, "Plan.apply")
    unknown = [name for name in plan.steps if name not in BY_NAME]
    if unknown:
        raise _refused(plan, dict.fromkeys(unknown, "this release has no such step"))
    steps = [BY_NAME[name] for name in plan.steps]
    with isolated(workload.device, steps):
        built, steps = _built(plan, workload, steps)
        _compare(plan, workload, steps, built)
        with quiet():
            built.warm()
    return Optimized(built.call, plan)


def measure(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    name: str,
    on_progress: OnProgress,
) -> Plan:
    """Apply a plan, and return it with the error and the times of this machine.

    Raises:
        ArgumentError: OL403, as from `Plan.apply`.
    """
    many = len(plan.steps)
    on_progress(f"applying {many} step{'s' * (many != 1)}", 0.1)
    fast = apply(plan, fn, args, kwargs)
    workload = checked(fn, args, kwargs)
    steps = [BY_NAME[step] for step in plan.steps]
    with isolated(workload.device, steps):
        modes = build(workload, [step for step in steps if step is EVAL and _trains(workload)])
        on_progress("float64 reference", 0.3)
        reference = make_reference(
            replace(workload, fn=modes.call), torch.Generator().manual_seed(0)
        )
        on_progress("checking the result", 0.5)
        found = check(fast, workload, reference, plan.max_error)
        if found.wrong is not None:
            raise _refused(plan, {" + ".join(plan.steps): found.wrong})
        on_progress("the result against the original", 0.8)
        eager = build(workload, ())
        eager.warm()
        built = Built(fast, {}, workload.copy_inputs())
        turns = in_turns(eager, built, timers_for(workload.device)[0], FINAL_SECONDS)
    before, after = turns.timings
    return replace(
        plan,
        workload=name,
        trials=(),
        error=found.error,
        eager=before,
        result=after,
        environment=environment(),
        remarks=("Applied as it was saved, and measured here.",),
    )


def _trains(workload: Workload) -> bool:
    return any(m.training for root in modules_behind(workload) for m in root.modules())


def _built(plan: Plan, workload: Workload, steps: list[Step]) -> tuple[Built, list[Step]]:
    """Take the steps; name all of those that are not possible."""
    reasons: dict[str, str] = {}
    while True:
        try:
            built = build(workload, steps)
        except Refusal as refusal:
            if refusal.step is not EVAL:  # a model in eval mode has nothing to do
                reasons[refusal.step.name] = str(refusal)
            steps = [step for step in steps if step is not refusal.step]
        except Exception as error:
            raise _refused(plan, {_culprit(workload, steps): said(error)}) from error
        else:
            if reasons:
                raise _refused(plan, reasons)
            return built, steps


def _culprit(workload: Workload, steps: list[Step]) -> str:
    """Name the first step with which it cannot be built."""
    for count in range(1, len(steps)):
        try:
            build(workload, steps[:count])
        except Exception:  # noqa: BLE001  the error is known; this asks whose it is
            return steps[count - 1].name
    return steps[-1].name


def _compare(plan: Plan, workload: Workload, steps: list[Step], built: Built) -> None:
    """Compare the result with the callable's own on the arguments."""
    modes = [step for step in steps if step is EVAL]
    with torch.no_grad():
        eager = snapshot(build(workload, modes)())
    case = Case((workload.args, workload.kwargs), eager, eager)
    why = _mistake(built, case, plan.max_error)
    if why is None:
        return
    for count in range(1, len(steps)):  # whose it is
        said_so = _mistake(build(workload, steps[:count]), case, plan.max_error)
        if said_so is not None:
            raise _refused(plan, {steps[count - 1].name: said_so})
    raise _refused(plan, {steps[-1].name: why})


def _mistake(built: Built, case: Case, max_error: float) -> str | None:
    try:
        with quiet():
            return judged(snapshot(built()), case, max_error)[1]
    except Exception as error:  # noqa: BLE001  a compiler may raise anything
        return said(error)


def _refused(plan: Plan, reasons: Mapping[str, str]) -> ArgumentError:
    what = "; ".join(f"`{name}` does not apply here: {why}" for name, why in reasons.items())
    names = ", ".join(f'"{name}"' for name in reasons)
    return ArgumentError(
        "OL403",
        what,
        where=f"the plan for {plan.workload}",
        fix=f"plan.without({names}).apply(model, args), or search anew: ol.optimize(model, args)",
    )
