"""The subcommands of `onelaunch`, their options, and the answers to mistakes in them.

torch takes seconds to import, so only the functions that need it do.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from onelaunch.errors import ArgumentError, GraphError
from onelaunch.tools.cli import FAILED, OK, STOPPED
from onelaunch.tools.cli.compare import compare
from onelaunch.tools.cli.doctor import doctor
from onelaunch.tools.cli.explain import explain
from onelaunch.tools.cli.mistakes import ToolError
from onelaunch.tools.cli.optimize import optimize
from onelaunch.tools.cli.profile import profile
from onelaunch.tools.cli.progress import console_for_reports

# Newer versions of typer carry click inside, older ones import it: this is its class in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(compare)
app.command()(doctor)
app.command()(profile)
app.command()(explain)
app.command()(optimize)


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
def info() -> int:
    """List what this machine supports, and how inputs reach a recording on it."""
    from onelaunch.driver.cuda import capabilities
    from onelaunch.tools.bench.environment import environment

    here = environment()
    found = capabilities()
    of_gpu = "CUDA graphs" if found.records else "none, calls run eagerly"
    lines = {**here, "recordings": of_gpu if here["gpu"] else "the tape: no GPU here"}
    if here["gpu"]:
        lines["rebind"] = "yes, where proven" if found.rebind else "no, inputs are copied"
        lines["versions"] = found.versions
    if found.why_not:
        lines["because"] = found.why_not
    console = console_for_reports()
    for name, value in lines.items():
        console.print(Text(f"{name:>26}  {value or '-'}"))
    return OK


def execute(argv: Sequence[str] | None) -> int:
    """Run the subcommand that these arguments name; its exit code, mistakes told on stderr."""
    try:
        code = app(args=argv, prog_name="onelaunch", standalone_mode=False)
    except (GraphError, ToolError) as error:
        print(f"{type(error).__name__} {error}", file=sys.stderr)
        return FAILED
    except UsageError as error:
        print(f"ArgumentError {_usage(error)}", file=sys.stderr)
        return FAILED
    except typer.Abort:  # Ctrl-C, as typer passes it on
        return STOPPED
    except SystemExit:  # by which typer answers a pipe that nobody reads
        return FAILED
    return code if isinstance(code, int) else OK


def _usage(error: Exception) -> ArgumentError:
    """Return a mistake on the command line in the form that all errors have."""
    message = getattr(error, "format_message", error.__str__)() or "no command is given"
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "onelaunch")
    why = "the command line could not be understood"
    return ArgumentError("OL401", message, where=command, why=why, fix=f"{command} --help")
