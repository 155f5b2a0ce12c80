"""A saved plan on a callable: its steps taken without a search, and compared with the callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from onelaunch.errors import ArgumentError
from onelaunch.tools.bench.entry import isolated
from onelaunch.tools.bench.reference import Case, said, snapshot
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.checklist.build import ChangedCall, Refusal, build, quiet
from onelaunch.tools.checklist.check import judged
from onelaunch.tools.checklist.modes import EVAL
from onelaunch.tools.checklist.optimize import Optimized, checked, compiles
from onelaunch.tools.checklist.plan import Plan
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.steps import BY_NAME

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
    with isolated(workload.device, compiles(steps)):
        built, steps = _built(plan, workload, steps)
        if steps:  # without any it is the callable itself
            _compare(plan, workload, steps, built)
        with quiet():
            built.warm()
    return Optimized(built.call, plan)


def _built(plan: Plan, workload: Workload, steps: list[Step]) -> tuple[ChangedCall, list[Step]]:
    """Take the steps; name every step that is not possible."""
    reasons: dict[str, str] = {}
    while True:
        try:
            built = build(workload, steps)
        except Refusal as refusal:
            if refusal.step is not EVAL:  # a model in eval mode has nothing to do
                reasons[refusal.step.name] = str(refusal)
            steps = [step for step in steps if step is not refusal.step]
        except Exception as error:
            if not steps:
                raise  # it is nobody's
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


def _compare(plan: Plan, workload: Workload, steps: list[Step], built: ChangedCall) -> None:
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


def _mistake(built: ChangedCall, case: Case, max_error: float) -> str | None:
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
