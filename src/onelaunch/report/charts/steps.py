"""The steps of a plan as a waterfall, from the callable as it was given to the result."""

from __future__ import annotations

from onelaunch.bench.profile import us
from onelaunch.checklist.plan import Plan, Trial
from onelaunch.report.charts.chart import Chart, Spec, in_rows, time_axis, x_axis

HEAD = ("step", "before", "after", "gain", "rel. error")


def kept(plan: Plan) -> list[Trial]:
    """Return the trial in which each step of the plan was last found to pay."""
    tried = [t for t in plan.trials if t.outcome == "kept" and t.round != "final"]  # is of all
    last = {trial.step: trial for trial in tried}
    return [last[step] for step in plan.steps if step in last]


def title(trial: Trial) -> str:
    """Return the name of a trial's step, with a capital where it begins with a word."""
    first = trial.title.partition(" ")[0]
    capital = first.isalpha() and first.islower()
    return trial.title[0].upper() + trial.title[1:] if capital else trial.title


def steps(plan: Plan) -> Chart:
    """Draw what each kept step takes off the wall time.

    Each was measured in turn with the same callable without it, so the parts are ratios: they are
    chained from the callable as it was given on.
    """
    longest = max(plan.eager.median_us, plan.result.median_us)
    level, bars, rows = plan.eager.median_us, list[tuple[str, str, float, float, str]](), []
    bars.append(("As it was given", us(level), 0.0, level, "whole"))
    for trial in kept(plan):
        ratio = _ratio(trial)
        after = level * (ratio or 1.0)
        longest = max(longest, after)
        change = after / level - 1
        shown = f"{change:+.0%}" if ratio is not None else "not timed"
        bars.append((title(trial), shown, after, level, "gain" if after <= level else "loss"))
        rows.append(_figures(trial, shown))
        level = after
    bars.append(("Result", us(plan.result.median_us), 0.0, plan.result.median_us, "result"))
    divisor, unit = time_axis(longest)
    values: list[Spec] = [
        {
            "name": name,
            "shown": shown.replace(" us", " µs"),
            "best": kind == "result",
            "low": low / divisor,
            "high": high / divisor,
            "kind": kind,
        }
        for name, shown, low, high, kind in bars
    ]
    return Chart(
        name="steps",
        title="What each step takes off",
        caption="From the callable as it was given to the result, by the steps that are kept, in "
        "the order of the plan. Each step was timed in turns with the same callable without it; "
        "the first and the last bar are times of their own.",
        alternative=f"A waterfall from {us(plan.eager.median_us)} to {us(plan.result.median_us)} "
        f"per call in {len(rows)} steps.",
        spec=in_rows(values, _layers(), x_axis(f"{unit} per call", domainMax=longest / divisor)),
        head=HEAD,
        rows=tuple(rows),
    )


def _ratio(trial: Trial) -> float | None:
    if trial.before is None or trial.after is None:
        return None
    return trial.after.median_us / trial.before.median_us


def _figures(trial: Trial, shown: str) -> tuple[str, ...]:
    return (
        title(trial),
        "" if trial.before is None else us(trial.before.median_us),
        "" if trial.after is None else us(trial.after.median_us),
        shown,
        "" if trial.error is None else f"{trial.error:.1e}",
    )


def _layers() -> list[Spec]:
    colours = [("gain", "accent-soft"), ("loss", "warn"), ("result", "accent")]
    return [
        {
            "name": "steps",
            "mark": {"type": "bar", "height": 14, "yOffset": 6, "cornerRadius": 1},
            "encoding": {
                "x": "low",
                "x2": {"field": "high"},
                "color": {
                    "condition": [
                        {"test": f"datum.kind === '{kind}'", "value": f"var(--{colour})"}
                        for kind, colour in colours
                    ],
                    "value": "var(--bar)",
                },
            },
        }
    ]
