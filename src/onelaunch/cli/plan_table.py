"""A plan in the terminal: what was tried, and the code to apply what is kept."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from onelaunch.bench.profile import us
from onelaunch.checklist.plan import Plan, Trial
from onelaunch.report.cells import timing

_STYLE = {"kept": "bold green", "wrong": "red", "failed": "yellow", "not possible": "dim"}
_AGAIN = {"first": "", "recheck": ", again", "final": ""}


def show_plan(plan: Plan, console: Console, file: Path | None) -> None:
    """Print the trials, the result in a sentence, and the code.

    Args:
        file: where the plan is saved, or None.
    """
    console.print()
    if plan.trials:
        console.print(_table(plan))
        console.print()
    where = plan.environment.get("gpu") or plan.environment.get("cpu") or "this machine"
    allowed = f"up to {plan.max_error:.0e}" if plan.max_error else "0: bit for bit"
    head = f"{plan.workload} on {where}, torch {plan.environment.get('torch')}."
    console.print(Text(f"{head} Relative error against float64: {allowed}.", style="dim"))
    for said in plan.remarks:
        console.print(Text(said, style="yellow"))
    console.print()
    console.print(Text(plan.summary, style="bold"))
    if plan.steps:
        console.print()
        console.print(Syntax(_code(file), "python", background_color="default"))


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "outcome", "error", "before", "after", "gain", "remark"):
        numbers = name in ("error", "before", "after", "gain")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=numbers)
    for trial in plan.trials:
        table.add_row(*map(Text, _cells(trial)), style=_STYLE.get(trial.outcome))
    return table


def _cells(trial: Trial) -> tuple[str, ...]:
    before = "" if trial.before is None else us(trial.before.median_us)
    return (
        f"{trial.step}{_AGAIN[trial.round]}",
        trial.outcome,
        "" if trial.error is None else f"{trial.error:.1e}",
        before,
        timing(trial.after),
        "" if trial.gain is None else f"{trial.gain:.2f}x",
        trial.reason or "",
    )


def _code(file: Path | None) -> str:
    return (
        "from pathlib import Path\n"
        "import onelaunch as ol\n"
        f'plan = ol.Plan.from_json(Path("{file or "plan.json"}").read_text())'
        + ("" if file else "  # written by --plan plan.json")
        + "\nfast = plan.apply(model, args)\n"
    )
