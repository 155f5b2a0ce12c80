"""`onelaunch compare`: every way to run a callable, side by side."""

from __future__ import annotations

import contextlib
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from onelaunch.cli import FAILED, OK, STOPPED, WRONG
from onelaunch.cli.apart import Apart
from onelaunch.cli.mistakes import check_file, check_report, tracebacks
from onelaunch.cli.progress import console_for_reports, ended_by_interrupts, progress, told
from onelaunch.cli.saved import refuse_options, saved_files, show_comparison, show_saved
from onelaunch.errors import GraphError, bad
from onelaunch.targets import located

if TYPE_CHECKING:
    from onelaunch.bench import Comparison
    from onelaunch.bench.target import TargetCall

ENGINES = (
    *("eager", "no_grad", "inference_mode", "by-hand", "make_graphed_callables"),
    *("compile", "reduce-overhead", "max-autotune", "cudagraphs"),
    *("torchscript", "torchscript-script", "aotinductor", "onnxruntime", "onnxruntime-cudagraphs"),
    *("tensorrt", "tensorrt-cudagraphs", "openxla", "tvm"),
    *("onelaunch", "onelaunch-rebind", "onelaunch-static", "onelaunch-compile"),
    *("onelaunch-max-autotune", "bare", "bare_compiled"),
)
"""The names in `bench.ENGINES`, which would import torch; a test compares the two."""


def compare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="A factory, path.py:name or module:name, that returns (callable, args). Or a "
            "file of --json, to show it again; or two of them, before and after.",
        ),
    ],
    engines: Annotated[
        str | None, typer.Option(help=f"Only these, with commas: {', '.join(ENGINES)}.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to time at most, all engines.")] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write the comparison here as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write it here as one HTML page.")] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Run each engine in a process of its own.")
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(
            help="How long such a process may take, in seconds, for building, and for each round; "
            "300 by default."
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE=PATH", help="Run an engine with this Python; may be given again."
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE", help="Print a script that reproduces the row of an engine instead."
        ),
    ] = None,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Where the target raises, show all of the way there."),
    ] = False,
) -> int:
    """Run every engine on the same input: checked against float64, then timed."""
    target = targets[0]
    names = _engines(engines)
    if not seconds > 0:
        why = "timing takes a number of seconds above 0"
        raise bad(f"--seconds is {seconds:g}", "--seconds", why, "--seconds 10")
    if json is not None:
        check_file(json, "the comparison", "compare")
    if report is not None:
        check_report(report, "the comparison", "compare")
    apart = Apart.of(isolate, limit, python or [], names, ENGINES)
    console = console_for_reports()
    if saved := saved_files(targets):
        given = {"--engines": names, "--script": script, "--isolate": isolate}
        given |= {"--limit": limit, "--python": python}
        refuse_options(saved, [option for option, value in given.items() if value])
        return show_saved(saved, console, json, report)
    located(target, "compare")
    with tracebacks(traceback):
        if script is not None:
            return _print_script(target, script, seconds, console)
        result = _measure(target, names, seconds, apart, console)
    measured = any(row.wall for row in result.rows)
    if result.interrupted and not measured and not result.wrong:
        return STOPPED
    show_comparison(result, console, json, report)
    if result.wrong:
        return WRONG
    return OK if measured else FAILED


def _measure(
    target: str, names: list[str] | None, seconds: float, apart: Apart, console: Console
) -> Comparison:
    """Load the target, and compare the engines on it."""
    fn, args, kwargs = _load(target, console)
    from onelaunch import bench
    from onelaunch.bench.target import raised

    engines = [apart.engine(engine, target) for engine in bench.choose(names)]
    with progress(console) as tell:
        try:
            return bench.compare(
                fn, args, kwargs, engines=engines, seconds=seconds, name=target, on_progress=tell
            )
        except GraphError:
            raise
        except Exception as error:
            raise raised("the callable", error, target, "compare") from error


def _load(target: str, console: Console) -> TargetCall:
    with progress(console) as tell, ended_by_interrupts(console):
        tell("importing PyTorch", 0.0)
        from onelaunch.bench.target import load
    with told(f"loading {target}", console):
        return load(target, "compare")


def _print_script(target: str, name: str, seconds: float, console: Console) -> int:
    """Print the script of an engine, and nothing else, on stdout."""
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, 1) or ["eager"]
        why = f"the engines are {', '.join(ENGINES)}"
        raise bad(f"no engine is called {name}", "--script", why, f"--script {near[0]}")
    with contextlib.redirect_stdout(sys.stderr):
        call = _load(target, console)
    from onelaunch.bench import ENGINES as FOUND
    from onelaunch.bench.script import script
    from onelaunch.bench.workload import Workload

    print(script(FOUND[name], Workload(*call), target, seconds), end="")
    return OK


def _engines(text: str | None) -> list[str] | None:
    """Read the names that `--engines` was given."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ENGINES]
    if names and not unknown:
        return names
    near = [match for name in names for match in difflib.get_close_matches(name, ENGINES, 1)]
    what = f"no engine is called {' or '.join(unknown)}" if unknown else "no engine is named"
    why = f"the engines are {', '.join(ENGINES)}"
    raise bad(what, "--engines", why, f"--engines {','.join(near) or 'eager,onelaunch'}")
