"""The subcommands of `onelaunch`, their options, and the answers to mistakes in them.

torch takes seconds to import, so only the functions that need it do.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from onelaunch.cli import FAILED, OK, STOPPED, WRONG
from onelaunch.cli.doctor import doctor
from onelaunch.cli.explain import explain
from onelaunch.cli.mistakes import bad, check_file, tracebacks, write
from onelaunch.cli.progress import console_for_reports, ended_by_interrupts, progress
from onelaunch.errors import ArgumentError, GraphError

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

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor)
app.command()(explain)


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
        raise bad(f"--seconds is {seconds:g}", "--seconds", why, "--seconds 10")
    for file in (json, report):
        if file is not None:
            check_file(file, "the comparison", "compare")
    console = console_for_reports()
    with tracebacks(traceback):
        result = _measure(target, names, seconds, console)
    measured = any(row.wall for row in result.rows)
    if result.interrupted and not measured and not result.wrong:
        return STOPPED
    from onelaunch.report.html import to_html
    from onelaunch.report.table import show

    show(result, console)
    if json is not None:
        write(json, result.to_json() + "\n", "compare")
    if report is not None:
        write(report, to_html(result), "compare")
        console.print(f"\nThe report: {escape(str(report))}")
    if result.wrong:
        return WRONG
    return OK if measured else FAILED


def _measure(
    target: str, engines: list[str] | None, seconds: float, console: Console
) -> Comparison:
    """Load the target, and compare the engines on it."""
    with progress(console) as tell:
        with ended_by_interrupts(console):
            tell("importing PyTorch", 0.0)
            from onelaunch import bench
            from onelaunch.bench.target import load, raised

        tell(f"loading {target}", 0.0)
    fn, args, kwargs = load(target, "compare")  # no bar meanwhile: it may print, or ask something
    with progress(console) as tell:
        try:
            return bench.compare(
                fn, args, kwargs, engines=engines, seconds=seconds, name=target, on_progress=tell
            )
        except GraphError:
            raise
        except Exception as error:
            raise raised("the callable", error, target, "compare") from error


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
    console = console_for_reports()
    for name, value in lines.items():
        console.print(Text(f"{name:>26}  {value or '-'}"))
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
