"""`onelaunch optimize`: the inference checklist on a callable, each step tried and measured."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from onelaunch.cli import OK
from onelaunch.cli.mistakes import check_file, check_report, tracebacks, unlike, write
from onelaunch.cli.progress import console_for_reports, ended_by_interrupts, progress, told
from onelaunch.errors import GraphError, bad
from onelaunch.targets import located

if TYPE_CHECKING:
    from onelaunch.checklist.plan import Plan

STEPS = (
    *("eval", "inference-mode", "graph", "fold-batchnorm", "drop-bias", "merge-branches", "half"),
    *("channels-last", "pad-channels", "cudnn-benchmark", "tf32", "inductor", "int8", "fp8"),
)
"""The names in `checklist.steps`, without their ways; a test compares the two."""
SECONDS = 60.0


def optimize(
    target: Annotated[
        str,
        typer.Argument(
            help="A factory, path.py:name or module:name, that returns (callable, args)."
        ),
    ],
    max_error: Annotated[
        float | None,
        typer.Option(
            help="The largest relative error; 0, by default: the same results bit for bit."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="How long all of it may take, once the target is loaded; 60 by default."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help=f"Only these, with commas: {', '.join(STEPS)}.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Write the plan here, as JSON, to be applied.")
    ] = None,
    apply: Annotated[
        Path | None, typer.Option(help="Apply this plan and measure it, without a search.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write it here as one HTML page.")] = None,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Where the target raises, show all of the way there."),
    ] = False,
) -> int:
    """Try the inference checklist on a copy: each step checked, measured, and kept if it pays."""
    names = _names(steps)
    if seconds is not None and not seconds > 0:
        why = "the search takes a number of seconds above 0"
        raise bad(f"--seconds is {seconds:g}", "--seconds", why, "--seconds 60")
    if max_error is not None and not 0 <= max_error < float("inf"):
        why = "it is a relative error: 0 for bit for bit, or 1e-2, say"
        raise bad(f"--max-error is {max_error:g}", "--max-error", why, "--max-error 1e-2")
    if apply is not None:
        _refuse_options({"--steps": names, "--max-error": max_error, "--seconds": seconds})
    if plan is not None:
        check_file(plan, "the plan", "optimize")
    if report is not None:
        check_report(report, "the plan", "optimize")
    saved = None if apply is None else _read(apply, target)
    located(target, "optimize")
    console = console_for_reports()
    with tracebacks(traceback):
        found = _found(target, max_error or 0.0, seconds or SECONDS, names, saved, console)
    from onelaunch.cli.plan_table import show_plan

    show_plan(found, console, apply or plan)
    if plan is not None:
        write(plan, found.to_json() + "\n", "optimize")
    if report is not None:
        from onelaunch.report.page.plan import plan_page

        write(report, plan_page(found), "optimize")
        console.print(f"\nThe report: {report}", markup=False, highlight=False)
    return OK


def _refuse_options(options: Mapping[str, object]) -> None:
    """Refuse options of a search where a saved plan is applied, without one."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        names = " and ".join(given)
        what = f"{names} {'is' if len(given) == 1 else 'are'} given with --apply"
        why = "a plan is applied as it was saved, with its own steps and error, without a search"
        fix = f"leave out {names}, or --apply"
        if "--steps" in given:
            fix += "; in Python `plan.without(...)` leaves out steps"
        raise bad(what, given[0], why, fix)


def _found(
    target: str,
    max_error: float,
    seconds: float,
    steps: list[str] | None,
    saved: str | None,
    console: Console,
) -> Plan:
    """Load the target; search for a plan, or apply the saved one and measure it."""
    with progress(console) as tell, ended_by_interrupts(console):
        tell("importing PyTorch", 0.0)
        from onelaunch.bench.target import load, raised
        from onelaunch.checklist.apply import measure
        from onelaunch.checklist.optimize import plan_in_time
    given = _plan(saved, target) if saved is not None else None
    with told(f"loading {target}", console):
        fn, args, kwargs = load(target, "optimize")
    options: dict[str, Any] = {"max_error": max_error, "seconds": seconds, "steps": steps}
    with progress(console) as tell:
        try:
            if given is not None:
                return measure(given, fn, args, kwargs, name=target, on_progress=tell)
            return plan_in_time(fn, args, kwargs, name=target, on_progress=tell, **options)
        except GraphError:
            raise
        except Exception as error:
            raise raised("the callable", error, target, "optimize") from error


def _plan(text: str, target: str) -> Plan:
    from onelaunch.checklist.plan import Plan

    try:
        return Plan.from_json(text)
    except ValueError as error:
        fix = f"onelaunch optimize {target} --plan plan.json"
        raise bad("the file holds no plan", "--apply", unlike(error), fix) from error


def _read(file: Path, target: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fix = f"onelaunch optimize {target} --plan {file}"
        raise bad(f"{file} cannot be read", "--apply", str(error), fix) from error


def _names(text: str | None) -> list[str] | None:
    """Read the names that `--steps` was given."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name.partition(":")[0] not in STEPS]
    if names and not unknown:
        return names
    near = [match for name in names for match in difflib.get_close_matches(name, STEPS, 1)]
    what = f"no step is called {' or '.join(unknown)}" if unknown else "no step is named"
    raise bad(
        what, "--steps", f"the steps are {', '.join(STEPS)}", f"--steps {','.join(near) or 'graph'}"
    )
