"""`onelaunch optimize`: the inference checklist on a callable, each step tried and measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onelaunch.errors import bad
from onelaunch.tools.cli import OK
from onelaunch.tools.cli.mistakes import check_files
from onelaunch.tools.cli.progress import console_for_reports
from onelaunch.tools.cli.target import (
    Report,
    Target,
    Traceback,
    deliver,
    import_torch,
    with_target,
)
from onelaunch.tools.names import known, split
from onelaunch.tools.targets import located

if TYPE_CHECKING:
    from onelaunch.tools.bench.workload import OnProgress, Workload
    from onelaunch.tools.checklist.plan import Plan

STEPS = (
    *("eval", "inference-mode", "graph", "fold-batchnorm", "drop-bias", "merge-branches", "half"),
    *("channels-last", "pad-channels", "cudnn-benchmark", "tf32", "inductor", "int8", "fp8"),
)
"""The names in `checklist.steps`, without their ways; a test compares the two."""


def optimize(
    target: Target,
    max_error: Annotated[
        float, typer.Option(help="The largest relative error; 0: the same results bit for bit.")
    ] = 0.0,
    seconds: Annotated[
        float, typer.Option(help="How long all of it may take, once the target is loaded.")
    ] = 60.0,
    steps: Annotated[
        str | None, typer.Option(help=f"Only these, with commas: {', '.join(STEPS)}.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Write the plan here, as JSON, to be applied.")
    ] = None,
    report: Report = None,
    traceback: Traceback = False,
) -> int:
    """Try the inference checklist on a copy: each step checked, measured, and kept if it pays."""
    names = None
    if steps is not None:
        where, example = "--steps", "graph"
        names = known(split(steps), STEPS, "step", where, "--steps ", example, _is_step)
    if not seconds > 0:
        why = "the search takes a number of seconds above 0"
        raise bad(f"--seconds is {seconds:g}", "--seconds", why, "--seconds 60")
    if not 0 <= max_error < float("inf"):
        why = "it is a relative error: 0 for bit for bit, or 1e-2, say"
        raise bad(f"--max-error is {max_error:g}", "--max-error", why, "--max-error 1e-2")
    check_files("the plan", "optimize", plan, report=report)
    located(target, "optimize")
    console = console_for_reports()
    import_torch(console)
    from onelaunch.tools.checklist.optimize import plan_in_time
    from onelaunch.tools.checklist.shown import code

    options: dict[str, Any] = {"max_error": max_error, "seconds": seconds, "steps": names}

    def work(call: Workload, tell: OnProgress) -> Plan:
        parts = call.fn, call.args, call.kwargs
        return plan_in_time(*parts, name=target, on_progress=tell, **options)

    found = with_target(target, "optimize", console, work, traceback)
    printed = {"code": code(str(plan))} if plan and found.steps else {}
    deliver(found, console, plan, report, **printed)
    return OK


def _is_step(name: str) -> bool:
    return name.partition(":")[0] in STEPS
