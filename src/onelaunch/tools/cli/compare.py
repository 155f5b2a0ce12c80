"""`onelaunch compare`: every way to run a callable, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onelaunch.errors import bad
from onelaunch.tools.cli import FAILED, OK, STOPPED, WRONG
from onelaunch.tools.cli.apart import placing
from onelaunch.tools.cli.mistakes import check_files, read_saved
from onelaunch.tools.cli.progress import console_for_reports
from onelaunch.tools.cli.target import (
    Json,
    Report,
    Traceback,
    deliver,
    given_options,
    import_torch,
    with_target,
)
from onelaunch.tools.names import known, split
from onelaunch.tools.targets import located

if TYPE_CHECKING:
    from onelaunch.tools.bench import Comparison
    from onelaunch.tools.bench.workload import OnProgress, Workload

ENGINES = (
    *("eager", "no_grad", "inference_mode", "by-hand", "make_graphed_callables"),
    *("compile", "reduce-overhead", "max-autotune", "cudagraphs"),
    *("torchscript", "torchscript-script", "aotinductor"),
    *("onnxruntime", "tensorrt", "openxla", "tvm"),
    *("onelaunch", "onelaunch-rebind", "onelaunch-static", "onelaunch-parallel"),
    "onelaunch-compile",
    *("onelaunch-max-autotune", "bare", "bare_compiled"),
)
"""The names in `bench.ENGINES`, which would import torch; a test compares the two."""


def compare(
    target: Annotated[
        str,
        typer.Argument(
            help="A factory, path.py:name or module:name, that returns (callable, args). Or a "
            "file of --json, to show it again."
        ),
    ],
    engines: Annotated[
        str | None, typer.Option(help=f"Only these, with commas: {', '.join(ENGINES)}.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to time at most, all engines.")] = 10.0,
    json: Json = None,
    report: Report = None,
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
    traceback: Traceback = False,
) -> int:
    """Run every engine on the same input: checked against float64, then timed."""
    names = None
    if engines is not None:
        example = "eager,onelaunch"
        names = known(split(engines), ENGINES, "engine", "--engines", "--engines ", example)
    if not seconds > 0:
        why = "timing takes a number of seconds above 0"
        raise bad(f"--seconds is {seconds:g}", "--seconds", why, "--seconds 10")
    check_files("the comparison", "compare", json, report=report)
    placed = placing(isolate, limit, python or [], names, ENGINES)
    console = console_for_reports()
    if target.endswith(".json"):
        given = {"--engines": names, "--isolate": isolate, "--limit": limit, "--python": python}
        result = _saved(Path(target), given_options(given))
        deliver(result, console, json, report)
        return WRONG if result.wrong else OK
    located(target, "compare")
    import_torch(console)
    from onelaunch.tools import bench

    def work(given: Workload, tell: OnProgress) -> Comparison:
        chosen = [placed(engine, target) for engine in bench.choose(names)]
        options: dict[str, Any] = {"engines": chosen, "seconds": seconds, "name": target}
        return bench.compare(given.fn, given.args, given.kwargs, on_progress=tell, **options)

    result = with_target(target, "compare", console, work, traceback)
    measured = any(row.wall for row in result.rows)
    if result.interrupted and not measured and not result.wrong:
        return STOPPED
    deliver(result, console, json, report)
    if result.wrong:
        return WRONG
    return OK if measured else FAILED


def _saved(file: Path, given: str) -> Comparison:
    """Read a comparison that was saved, in which nothing runs.

    Args:
        given: the options that were given for a run.
    """
    if given:
        what = f"{given} cannot be applied to a saved comparison"
        why = "it is shown as it was measured, and nothing is run"
        raise bad(what, given, why, f"onelaunch compare {file}")
    from onelaunch.tools.bench import Comparison

    fix = "onelaunch compare path.py:model --json result.json"
    return read_saved(file, Comparison, fix)
