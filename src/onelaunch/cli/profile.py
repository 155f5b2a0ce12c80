"""`onelaunch profile`: where a call's time goes, and what each remedy can gain at most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from onelaunch.cli import OK
from onelaunch.cli.mistakes import check_file, tracebacks, write
from onelaunch.cli.progress import console_for_reports, ended_by_interrupts, progress, told
from onelaunch.errors import GraphError
from onelaunch.targets import located

if TYPE_CHECKING:
    from onelaunch.profiler.profile import Profile


def profile(
    target: Annotated[
        str,
        typer.Argument(
            help="A factory, path.py:name or module:name, that returns (callable, args)."
        ),
    ],
    json: Annotated[Path | None, typer.Option(help="Write the profile here as JSON.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of some eager and graphed calls here."),
    ] = None,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Where the target raises, show all of the way there."),
    ] = False,
) -> int:
    """Find where a call's time goes, what bounds it, and what each remedy can gain at most."""
    for file, holds in ((json, "the profile"), (trace, "the trace")):
        if file is not None:
            check_file(file, holds, "profile")
    located(target, "profile")
    console = console_for_reports()
    with tracebacks(traceback):
        result, ungraphed = _measure(target, trace, console)
    from onelaunch.report.profile import show_profile

    show_profile(result, console)
    if json is not None:
        write(json, result.to_json() + "\n", "profile")
    if trace is not None:
        console.print(f"\nThe trace, for https://ui.perfetto.dev: {escape(str(trace))}")
        if ungraphed is not None:
            console.print(escape(f"It has no graphed calls: {ungraphed}"))
    return OK


def _measure(target: str, trace: Path | None, console: Console) -> tuple[Profile, str | None]:
    """Load the target, profile it, and write a trace of it if that is asked for; say with it why
    the trace has no graphed calls."""
    with progress(console) as tell, ended_by_interrupts(console):
        tell("importing PyTorch", 0.0)
        from onelaunch.bench.target import load, raised
        from onelaunch.bench.workload import Workload
        from onelaunch.profiler.measure import profile
        from onelaunch.profiler.tracing import write_trace
    with told(f"loading {target}", console):
        fn, args, kwargs = load(target, "profile")
    with progress(console) as tell:
        try:
            result = profile(fn, args, kwargs, name=target, on_progress=tell)
            if trace is None:
                return result, None
            tell("tracing eager and graphed calls", 0.9)
            return result, write_trace(Workload(fn, args, kwargs), trace)
        except GraphError:
            raise
        except Exception as error:
            raise raised("the callable", error, target, "profile") from error
