"""The command `onelaunch`.

Exit codes: 0; 1, an engine gave wrong results; 2, the command could not do its work; 130, stopped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from onelaunch import bench
from onelaunch.bench.environment import environment, version
from onelaunch.bench.target import load, raised
from onelaunch.driver.cuda import capabilities
from onelaunch.errors import CATALOGUE, ArgumentError, GraphError
from onelaunch.report import show, to_html

OK, WRONG, FAILED, STOPPED = 0, 1, 2, 130
# Newer versions of typer carry click inside, older ones import it: this is its class in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
WIDTH = 140  # of a table that goes to a file or a pipe

_NOTHING = ("interrupted", "missing")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print("onelaunch", version("onelaunch") or "of a source tree")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Run a PyTorch callable as one CUDA graph launch, and see whether it pays."""


@app.command()
def compare(
    target: Annotated[
        str,
        typer.Argument(
            help="A factory, path.py:name or module:name, that returns (callable, args)."
        ),
    ],
    engines: Annotated[
        str | None, typer.Option(help=f"Only these, with commas: {', '.join(bench.ENGINES)}.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to time at most, all engines.")] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write the comparison here as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write it here as one HTML page.")] = None,
) -> int:
    """Run every engine on the same input: checked against float64, then timed."""
    for file in (json, report):
        if file is not None:
            _check_file(file)
    names = None if engines is None else [n.strip() for n in engines.split(",") if n.strip()]
    bench.choose(names)  # a wrong name is told before a model is loaded
    fn, args, kwargs = load(target)
    console = _console()
    bar = _progress(console)
    # Where nothing is shown, rich leaves an empty line.
    with bar if console.is_terminal else contextlib.nullcontext():
        task = bar.add_task("starting", total=1.0)

        def on_progress(text: str, part: float) -> None:
            bar.update(task, description=text, completed=part)

        try:
            result = bench.compare(
                fn,
                args,
                kwargs,
                engines=names,
                seconds=seconds,
                name=target,
                on_progress=on_progress,
            )
        except GraphError:
            raise
        except Exception as error:
            raise raised("the callable", error, target) from error
    if result.interrupted and all(row.status in _NOTHING for row in result.rows):
        return STOPPED
    show(result, console)
    if json is not None:
        _write(json, result.to_json() + "\n")
    if report is not None:
        _write(report, to_html(result))
        console.print(f"\nThe report: {escape(str(report))}")
    return WRONG if result.wrong else OK


@app.command()
def info() -> int:
    """Say what this machine supports, and which way inputs and outputs travel here."""
    here = environment()
    found = capabilities()
    lines = {**here, "recordings": "CUDA graphs" if here["gpu"] else "the tape: no GPU here"}
    if here["gpu"]:
        nodes = "nodes of the graph, re-pointed by each call"
        lines["copies"] = nodes if found.memcpy_nodes else "launches before and after the replay"
        lines["rebind"] = "yes, where proven" if found.rebind else "no, inputs are copied"
        lines["versions"] = found.versions
    if found.why_not:
        lines["because"] = found.why_not
    console = _console()
    for name, value in lines.items():
        console.print(Text(f"{name:>26}  {value or '-'}"))
    return OK


@app.command("explain")
def explain_code(code: Annotated[str, typer.Argument(help="A code, such as OL101.")]) -> int:
    """Say what an error code means, and what to write instead."""
    key = code.strip().strip("[]").upper()
    entry = CATALOGUE.get(key)
    if entry is None:
        known = f"the codes are {', '.join(CATALOGUE)}"
        raise ArgumentError(
            "OL401", f"there is no code {code}", why=known, fix="onelaunch explain OL101"
        )
    console = _console()
    console.print(Text(f"{key}: {entry.title}", style="bold"))
    console.print(Text(f"why:  {entry.why}"))
    console.print(Text(f"fix:  {entry.fix}"))
    return OK


def _check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before the work of which it is to tell."""
    folder = file.absolute().parent
    why = "the comparison is written there"
    if not folder.is_dir():
        raise _bad(f"there is no folder {file.parent}", str(file), why)
    if file.is_dir():
        raise _bad(f"{file} is a folder", str(file), why, f"the name of a file: {file}/result")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise _bad(f"{file} cannot be written", str(file), why, "a file that you may write")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise _bad(
            f"{file} could not be written: {error.strerror}", str(file), str(error)
        ) from error


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _bad(what: str, where: str, why: str, fix: str = "onelaunch compare --help") -> ArgumentError:
    return ArgumentError("OL401", what, where=where, why=why, fix=fix)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; messages go to stderr, without a traceback."""
    try:
        code = app(args=argv, prog_name="onelaunch", standalone_mode=False)
    except GraphError as error:
        print(f"{type(error).__name__} {error}", file=sys.stderr)
        return FAILED
    except UsageError as error:
        print(f"ArgumentError {_usage(error)}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    if code == STOPPED:  # typer's too
        print("stopped before there was anything to show", file=sys.stderr)
    return code if isinstance(code, int) else OK


def _usage(error: Exception) -> ArgumentError:
    """A mistake on the command line in the form that all errors have."""
    message = getattr(error, "format_message", error.__str__)() or "no command is given"
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "onelaunch")
    why = "the command line could not be understood"
    return ArgumentError("OL401", message, where=command, why=why, fix=f"{command} --help")


def main() -> None:
    sys.exit(run())
