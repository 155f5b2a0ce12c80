"""The subcommands of `onelaunch`, their options, and the answers to mistakes in them.

torch takes seconds to import, so only the functions that need it do.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from onelaunch.cli import FAILED, OK, STOPPED, STOPPED_EARLY, WRONG
from onelaunch.cli.progress import progress
from onelaunch.errors import CATALOGUE, ArgumentError, GraphError

if TYPE_CHECKING:
    from onelaunch.bench import Comparison

ENGINES = (
    *("eager", "no_grad", "inference_mode", "by-hand", "make_graphed_callables"),
    *("compile", "reduce-overhead", "max-autotune", "cudagraphs"),
    *("torchscript", "torchscript-script", "aotinductor", "onnxruntime"),
    *("tensorrt", "openxla", "tvm"),
    *("onelaunch", "onelaunch-rebind", "onelaunch-static", "onelaunch-compile"),
    *("onelaunch-max-autotune", "bare", "bare_compiled"),
)
"""The names in `bench.ENGINES`, which would import torch; a test compares the two."""
# Newer versions of typer carry click inside, older ones import it: this is its class in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
WIDTH = 140  # of a table that goes to a file or a pipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        try:
            version = importlib.metadata.version("onelaunch")
        except importlib.metadata.PackageNotFoundError:
            version = "of a source tree"
        print("onelaunch", version)
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
    """Run a PyTorch callable as one CUDA graph launch, and see if it pays."""


@app.command()
def compare(
    target: Annotated[
        str,
        typer.Argument(
            help="A factory, path.py:name or module:name, that returns (callable, args)."
        ),
    ],
    engines: Annotated[
        str | None, typer.Option(help=f"Only these, with commas: {', '.join(ENGINES)}.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to time at most, all engines.")] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write the comparison here as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write it here as one HTML page.")] = None,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Where the target raises, show all of the way there."),
    ] = False,
) -> int:
    """Run every engine on the same input: checked against float64, then timed."""
    names = _engines(engines)
    if not seconds > 0:
        why = "timing takes a number of seconds above 0"
        raise _bad(f"--seconds is {seconds:g}", "--seconds", why, "--seconds 10")
    for file in (json, report):
        if file is not None:
            _check_file(file)
    console = _console()
    with _tracebacks(traceback):
        result = _measure(target, names, seconds, console)
    measured = any(row.wall for row in result.rows)
    if result.interrupted and not measured and not result.wrong:
        return STOPPED
    from onelaunch.report import show, to_html

    show(result, console)
    if json is not None:
        _write(json, result.to_json() + "\n")
    if report is not None:
        _write(report, to_html(result))
        console.print(f"\nThe report: {escape(str(report))}")
    if result.wrong:
        return WRONG
    return OK if measured else FAILED


@contextlib.contextmanager
def _ended_by_interrupts(console: Console) -> Generator[None]:
    """End the process at Ctrl-C: a module under import may swallow a KeyboardInterrupt."""

    def end(*_: object) -> None:
        console.show_cursor(True)
        print(STOPPED_EARLY, file=sys.stderr, flush=True)
        os._exit(STOPPED)

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _measure(
    target: str, engines: list[str] | None, seconds: float, console: Console
) -> Comparison:
    """Load the target, and compare the engines on it."""
    with progress(console) as tell:
        with _ended_by_interrupts(console):
            tell("importing PyTorch", 0.0)
            from onelaunch import bench
            from onelaunch.bench.target import load, raised

        tell(f"loading {target}", 0.0)
    fn, args, kwargs = load(target)  # no bar meanwhile: it may print, or ask something
    with progress(console) as tell:
        try:
            return bench.compare(
                fn, args, kwargs, engines=engines, seconds=seconds, name=target, on_progress=tell
            )
        except GraphError:
            raise
        except Exception as error:
            raise raised("the callable", error, target) from error


@app.command()
def info() -> int:
    """List the abilities of this machine, and the way of inputs and outputs on it."""
    from onelaunch.bench.environment import environment
    from onelaunch.driver.cuda import capabilities

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
    """Explain an error code, with the code to write instead."""
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
    raise _bad(what, "--engines", why, f"--engines {','.join(near) or 'eager,onelaunch'}")


@contextlib.contextmanager
def _tracebacks(shown: bool) -> Generator[None]:
    """Print the traceback of an exception of the user's code, if that is asked for."""
    try:
        yield
    except GraphError as error:
        if shown and error.__cause__ is not None:
            print_exception(error.__cause__)
        raise


def _check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before the work that it is to hold."""
    folder = file.absolute().parent
    why = "the comparison is written there"
    try:
        if not folder.is_dir():
            raise _bad(f"there is no folder {file.parent}", str(file), why)
        if file.is_dir():
            raise _bad(f"{file} is a folder", str(file), why, f"the name of a file: {file}/result")
        writable = os.access(file if file.exists() else folder, os.W_OK)
    except OSError as error:  # a name that is too long, say
        raise _bad(f"{file} cannot be written: {error.strerror}", str(file), why) from error
    if not writable:
        raise _bad(f"{file} cannot be written", str(file), why, "a file that you may write")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise _bad(
            f"{file} could not be written: {error.strerror}", str(file), str(error)
        ) from error


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _bad(what: str, where: str, why: str, fix: str = "onelaunch compare --help") -> ArgumentError:
    return ArgumentError("OL401", what, where=where, why=why, fix=fix)


def execute(argv: Sequence[str] | None) -> int:
    """Run the subcommand that these arguments name; its exit code, mistakes told on stderr."""
    try:
        code = app(args=argv, prog_name="onelaunch", standalone_mode=False)
    except GraphError as error:
        print(f"{type(error).__name__} {error}", file=sys.stderr)
        return FAILED
    except UsageError as error:
        print(f"ArgumentError {_usage(error)}", file=sys.stderr)
        return FAILED
    except typer.Abort:  # Ctrl-C, as typer passes it on
        return STOPPED
    return code if isinstance(code, int) else OK


def _usage(error: Exception) -> ArgumentError:
    """A mistake on the command line in the form that all errors have."""
    message = getattr(error, "format_message", error.__str__)() or "no command is given"
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "onelaunch")
    why = "the command line could not be understood"
    return ArgumentError("OL401", message, where=command, why=why, fix=f"{command} --help")
