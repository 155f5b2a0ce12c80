"""The target of a command: loaded, run without a word on stdout, and its result given out."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from onelaunch.errors import GraphError
from onelaunch.tools.cli.mistakes import ToolError, tracebacks, write
from onelaunch.tools.cli.progress import ended_by_interrupts, progress, told
from onelaunch.tools.cli.streams import unshown
from onelaunch.tools.report.result import Result
from onelaunch.tools.targets import Command

if TYPE_CHECKING:
    from onelaunch.tools.bench.workload import OnProgress, Workload

T = TypeVar("T")
Target = Annotated[
    str,
    typer.Argument(help="A factory, path.py:name or module:name, that returns (callable, args)."),
]
Json = Annotated[Path | None, typer.Option(help="Write the result here as JSON.")]
Report = Annotated[Path | None, typer.Option(help="Write it here as one HTML page.")]
Traceback = Annotated[
    bool, typer.Option("--traceback", help="Where the target raises, show all of the way there.")
]


def import_torch(console: Console) -> None:
    """Import PyTorch and all that runs a target, which takes seconds."""
    with progress(console) as tell, ended_by_interrupts(console):
        tell("importing PyTorch", 0.0)
        importlib.import_module("onelaunch.tools.bench.target")


def with_target(
    target: str,
    command: Command,
    console: Console,
    work: Callable[[Workload, OnProgress], T],
    traceback: bool,
) -> T:
    """Load a target and give it to `work`, which runs it.

    stdout has the result alone: prints of the factory go to stderr, and those of the callable are
    counted.

    Raises:
        ArgumentError: OL401: the target cannot be loaded, or raises.
        ToolError: onelaunch itself fails.
    """
    from onelaunch.tools.bench.target import DONE, load, own_fault, raised
    from onelaunch.tools.bench.workload import Workload

    with tracebacks(traceback):
        with told(f"loading {target}", console), contextlib.redirect_stdout(sys.stderr):
            workload = Workload(*load(target, command))
        with progress(console) as tell, unshown(target, DONE[command]):
            try:
                return work(workload, tell)
            except GraphError:
                raise
            except (Exception, SystemExit) as error:
                if (fault := own_fault(error, target, command)) is not None:
                    raise ToolError(fault) from error
                raise raised("the callable", error, target, command) from error


def deliver(
    result: Result,
    console: Console,
    json: Path | None = None,
    report: Path | None = None,
    **changed: Any,
) -> None:
    """Print a result, and write the files that were asked for.

    Args:
        changed: the parts of the document to print otherwise than on the page.
    """
    from onelaunch.tools.report.page import page
    from onelaunch.tools.report.terminal import show

    document = result.document()
    if document.command != "doctor":
        console.print()
    show(replace(document, **changed), console)
    if json is not None:
        write(json, result.to_json() + "\n", document.command)
    if report is not None:
        write(report, page(document), document.command)
        console.print(f"\nThe report: {report}", markup=False, highlight=False)


def given_options(options: Mapping[str, object]) -> str:
    """Name the options that were given, with ``and``; "" for none."""
    given = (option for option, value in options.items() if value is not None)
    return " and ".join(option for option in given if options[option] is not False)
