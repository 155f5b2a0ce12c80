"""The page of a plan."""

from __future__ import annotations

from onelaunch.bench.profile import us
from onelaunch.checklist.plan import Plan, Trial
from onelaunch.report.charts.steps import kept, steps, title
from onelaunch.report.page.elements import (
    Html,
    code,
    element,
    environment,
    facts,
    figure,
    joined,
    pairs,
    paragraph,
    section,
)
from onelaunch.report.page.frame import page

CODE = (
    "import onelaunch as ol\n"
    "from pathlib import Path\n\n"
    'plan = ol.Plan.from_json(Path("plan.json").read_text())  # of --plan plan.json\n'
    "fast = plan.apply(model, args)"
)
OUTCOMES = {
    "no gain": "No gain",
    "wrong": "Above the error that is allowed",
    "failed": "Failed",
    "not possible": "Not possible here",
}


def plan_page(plan: Plan) -> str:
    """Write a plan as one HTML file: the answer, the waterfall of its steps, those refused."""
    body = joined(
        [
            section("What each step takes off", figure(steps(plan)), _kept(plan)),
            section("Tried, and not kept", *_refused(plan)),
            environment(plan.environment),
        ]
    )
    return page(f"{plan.workload}: onelaunch optimize", _answer(plan), body)


def _answer(plan: Plan) -> Html:
    times = plan.eager.median_us / plan.result.median_us
    if plan.steps:
        many = f"{len(plan.steps)} step{'s' * (len(plan.steps) > 1)}"
        head = f"{many} make it run {times:.2f}x as fast"
        head = head if len(plan.steps) > 1 else head.replace("make", "makes")
    else:
        head = plan.summary.partition(":")[0]
    allowed = f" ({plan.max_error:.0e} is allowed)" if plan.max_error else ""
    return joined(
        [
            paragraph(f"onelaunch optimize · {plan.workload}", "kicker"),
            element("h1", head),
            facts(
                [
                    ("per call", us(plan.result.median_us)),
                    ("as it was given", us(plan.eager.median_us)),
                    (f"relative error{allowed}", f"{plan.error:.1e}"),
                ]
            ),
            code(CODE if plan.steps else "", "The code that applies the plan"),
            *(paragraph(said, "small") for said in plan.remarks),
        ]
    )


def _kept(plan: Plan) -> Html:
    """Say what each step did, where it says so."""
    said = [(title(trial), trial.reason) for trial in kept(plan) if trial.reason]
    return joined([element("h3", "What they did"), pairs(said)]) if said else Html("")


def _refused(plan: Plan) -> list[Html]:
    """List the trials of no use by their outcome, with reason, times and error."""
    parts: list[Html] = []
    for outcome, heading in OUTCOMES.items():
        found = [trial for trial in plan.trials if trial.outcome == outcome]
        if found:
            listed = pairs((_name(trial), _why_not(trial)) for trial in found)
            parts.append(joined([element("h3", heading), listed]))
    return parts


def _name(trial: Trial) -> str:
    return title(trial) if trial.round == "first" else f"{title(trial)} ({trial.round})"


def _why_not(trial: Trial) -> str:
    said = [trial.reason] if trial.reason else []
    if trial.before is not None and trial.after is not None:
        said.append(f"{us(trial.before.median_us)} without it, {us(trial.after.median_us)} with it")
    if trial.error is not None and "error" not in (trial.reason or ""):
        said.append(f"relative error {trial.error:.1e}")
    return "; ".join(said)
