"""A plan as a document: the answer, a waterfall of its steps, and all that was tried."""

from __future__ import annotations

from onelaunch.tools.bench.environment import known, machine_of
from onelaunch.tools.bench.shown import timing
from onelaunch.tools.checklist.plan import Plan, Trial
from onelaunch.tools.report.document import Bars, Document, Layer, ReportTable, Style
from onelaunch.tools.report.units import us

HEAD = ("step", "outcome", "error", "before", "after", "gain")
_STYLES: dict[str, Style] = {
    "kept": "best",
    "wrong": "bad",
    "failed": "warn",
}
_KEPT = "all that is kept"


def document(plan: Plan) -> Document:
    """Show the gain and the code that applies the plan, then each step with its reason."""
    tried = [trial for trial in plan.trials if trial.outcome != "not possible"]
    said = [(_name(t), f"{_title(t)}: {t.reason}") for t in plan.trials if t.reason]
    allowed = f" ({plan.max_error:.0e} is allowed)" if plan.max_error else ""
    limit = f"up to {plan.max_error:.0e}" if plan.max_error else "eager's, bit for bit"
    return Document(
        command="optimize",
        title=plan.workload,
        answer=(plan.summary,),
        facts=(
            ("per call", us(plan.result.median_us)),
            ("as it was given", us(plan.eager.median_us)),
            (f"relative error{allowed}", "-" if plan.error is None else f"{plan.error:.1e}"),
        ),
        code=code() if plan.steps else "",
        parts=(
            _waterfall(plan),
            ReportTable(
                "All that was tried",
                HEAD if tried else (),
                tuple(map(_cells, tried)),
                styles=tuple(_STYLES.get(trial.outcome, "") for trial in tried),
            ),
            ReportTable("Reasons", (), tuple(said)),
        ),
        context=(
            f"{plan.workload} on {machine_of(plan.environment)}. Relative error against float64: "
            f"{limit}.",
        ),
        remarks=plan.remarks,
        environment=known(plan.environment),
    )


def code(file: str = "") -> str:
    """Write the code that applies a plan.

    Args:
        file: where the plan is saved, if it is.
    """
    note = "" if file else "  # which --plan plan.json writes"
    return (
        "import onelaunch as ol\nfrom pathlib import Path\n\n"
        f'plan = ol.Plan.from_json(Path("{file or "plan.json"}").read_text()){note}\n'
        "fast = plan.apply(model, args)"
    )


def kept(plan: Plan) -> list[Trial]:
    """Return the trial in which each step of the plan was last found to pay."""
    tried = [t for t in plan.trials if t.outcome == "kept" and t.round != "final"]  # is of all
    last = {trial.step: trial for trial in tried}
    return [last[step] for step in plan.steps if step in last]


def _cells(trial: Trial) -> tuple[str, ...]:
    return (
        _name(trial),
        trial.outcome,
        "" if trial.error is None else f"{trial.error:.1e}",
        "" if trial.before is None else us(trial.before.median_us),
        timing(trial.after),
        "" if trial.gain is None else f"{trial.gain:.2f}x",
    )


def _name(trial: Trial) -> str:
    return (
        _KEPT if trial.round == "final" else f"{trial.step}{', again' * (trial.round != 'first')}"
    )


def _waterfall(plan: Plan) -> Bars:
    """Draw what each kept step takes off the wall time.

    Each step was timed in turns with the same callable without it. So the parts are ratios, chained
    from the callable as it was given.
    """
    level, end = plan.eager.median_us, plan.result.median_us
    bars = [("As it was given", us(level), 0.0, level, "whole")]
    for trial in kept(plan):
        after = level / (trial.gain or 1.0)
        shown = "not timed" if trial.gain is None else f"{after / level - 1:+.0%}"
        bars.append((_title(trial), shown, after, level, "gain" if after <= level else "loss"))
        level = after
    bars.append(("Result", us(end), 0.0, end, "result"))
    names = ("name", "shown", "low", "high", "kind")
    colours = (("gain", "accent-soft"), ("loss", "warn"), ("result", "accent"))
    return Bars(
        name="steps",
        title="What each step takes off",
        caption="From the callable as it was given to the result, by the steps that are kept, in "
        "the order of the plan. Each step was timed in turns with the same callable without it; "
        "the first and the last bar are times of their own.",
        values=tuple(
            {**dict(zip(names, bar, strict=True)), "best": bar[-1] == "result"} for bar in bars
        ),
        layers=(Layer("high", "low", kinds=colours),),
    )


def _title(trial: Trial) -> str:
    """Return the name of a trial's step, with a capital where it begins with a word."""
    first = trial.title.partition(" ")[0]
    capital = first.isalpha() and first.islower()
    return trial.title[0].upper() + trial.title[1:] if capital else trial.title
