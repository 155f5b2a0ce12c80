"""`onelaunch doctor`: what stops callables, and what the source of files shows.

torch takes seconds to import, and files alone do not need it.
"""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onelaunch.cli import FAILED, FOUND, OK
from onelaunch.cli.mistakes import check_file, check_report, read_saved, tracebacks, write
from onelaunch.cli.progress import console_for_reports, ended_by_interrupts, progress, told
from onelaunch.doctor.diagnosis import Diagnosis, together
from onelaunch.doctor.paths import shown
from onelaunch.doctor.source.configuration import Config, configuration
from onelaunch.doctor.source.scan import files, scan
from onelaunch.errors import ArgumentError, GraphError, bad
from onelaunch.report.findings import show_diagnosis
from onelaunch.targets import located

_CODES = "codes, names or severities, with commas"


def doctor(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="Factories, path.py:name or module:name, that return (callable, args); or files "
            "and folders, of which nothing is run; or files of --json, to show them again.",
        ),
    ],
    json: Annotated[Path | None, typer.Option(help="Write the findings here as JSON.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write them here as SARIF 2.1.0.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write them as one HTML page.")] = None,
    select: Annotated[
        str | None, typer.Option(help=f"Only these rules: {_CODES}. OL1 is all that begin so.")
    ] = None,
    ignore: Annotated[str | None, typer.Option(help=f"All but these rules: {_CODES}.")] = None,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Where a target raises, show all of the way there."),
    ] = False,
) -> int:
    """Name what stops a callable from being one launch, right and fast, by line."""
    config = _config(targets, select, ignore)
    saved = [Path(target) for target in targets if target.endswith(".json")]
    targets = [target for target in targets if Path(target) not in saved]
    for file in (json, sarif):
        if file is not None:
            check_file(file, "the diagnosis", "doctor")
    if report is not None:
        check_report(report, "the diagnosis", "doctor")
    paths = [Path(target) for target in targets if _is_path(target)]
    list(files([path for path in paths if path.is_file()], config))  # refuses what is no Python
    callables = [target for target in targets if Path(target) not in paths]
    for target in callables:
        located(target, "doctor")
    console = console_for_reports()
    unread: list[ArgumentError] = []
    fix = "onelaunch doctor path.py:model --json found.json"
    found = [read_saved(file, "diagnosis", Diagnosis.from_json, fix) for file in saved]
    found += [_of_source(paths, config, console, unread)] if paths else []
    with tracebacks(traceback):
        found += _of_callables(callables, console)
    result = together(found)
    result = replace(result, findings=tuple(config.chosen(result.findings)))
    show_diagnosis(result, console)
    if json is not None:
        write(json, result.to_json() + "\n", "doctor")
    if sarif is not None:
        write(sarif, result.to_sarif() + "\n", "doctor")
    if report is not None:
        from onelaunch.report.page.diagnosis import diagnosis_page

        write(report, diagnosis_page(result), "doctor")
        console.print(f"\nThe report: {report}", markup=False, highlight=False)
    for error in unread:
        print(f"not read: {error.where}: {error.what}", file=sys.stderr)
    if unread:
        return FAILED
    return OK if result.clean else FOUND


def _config(targets: list[str], select: str | None, ignore: str | None) -> Config:
    """Return the settings of the project of the first target, with those of the command line."""
    place = Path(targets[0] if Path(targets[0]).exists() else targets[0].rpartition(":")[0])
    config = configuration(place if place.exists() else Path.cwd())
    config = config.narrowed(select=_words("--select", select), where="--select")
    return config.narrowed(ignore=_words("--ignore", ignore), where="--ignore")


def _words(option: str, text: str | None) -> list[str]:
    """Read the rules that an option names."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if text is not None and not words:
        why = "`onelaunch explain --list` prints all codes, names and severities"
        raise bad("no rule is named", option, why, f"{option} host-read")
    return words


def _is_path(target: str) -> bool:
    """Return whether a target is a file or folder, and no callable.

    Raises:
        ArgumentError: it is neither.
    """
    path = Path(target)
    fix = "onelaunch doctor path.py:model, or a file or folder"
    if path.is_dir() and next(path.rglob("*.py"), None) is None:
        raise bad(f"{target} has no Python files", target, "the rules read Python", fix)
    if path.exists():
        return True
    if ":" not in target:
        why = f"the path starts at the current folder, {Path.cwd()}"
        raise bad(f"there is no file or folder {target}", target, why, fix)
    return False


def _of_source(
    paths: list[Path], config: Config, console: Console, unread: list[ArgumentError]
) -> Diagnosis:
    """Diagnose files and folders, without running them; `unread` gets what is not Python."""
    with progress(console) as tell:
        tell("reading the source", 0.0)
        findings = scan(paths, config, unread)
    return Diagnosis(", ".join(map(str, paths)), tuple(findings), means=("source",))


def _of_callables(targets: list[str], console: Console) -> list[Diagnosis]:
    """Load targets and diagnose them, one after another."""
    if not targets:
        return []
    with progress(console) as tell, ended_by_interrupts(console):
        tell("importing PyTorch", 0.0)
        from onelaunch.doctor import emulated

        emulated.install()
    return [_of_callable(target, console) for target in targets]


def _of_callable(target: str, console: Console) -> Diagnosis:
    """Load a target and diagnose it.

    A module in eval mode is called without grad, as in a comparison; other callables see to that
    themselves. stdout has the report alone. What the factory prints goes to stderr; what the
    callable prints and warns of, in each of its calls, goes nowhere.
    """
    from onelaunch.bench.target import load, raised
    from onelaunch.bench.workload import Workload
    from onelaunch.doctor.diagnose import examine
    from onelaunch.doctor.emulated import emulated, streams

    with told(f"loading {target}", console), redirect_stdout(sys.stderr), streams():
        fn, args, kwargs = load(target, "doctor")
    import torch

    infers = isinstance(fn, torch.nn.Module) and not fn.training
    unshown, grad = _Unshown(), torch.set_grad_enabled(not infers)
    with grad, progress(console) as tell, redirect_stdout(unshown), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = examine(emulated(Workload(fn, args, kwargs)), tell)
        except GraphError:
            raise
        except (Exception, SystemExit) as error:
            raise raised("the callable", error, target, "doctor") from error
    if unshown.lines:
        what = "1 line" if unshown.lines == 1 else f"{unshown.lines} lines"
        print(f"not shown: {what} that {target} printed while it was diagnosed", file=sys.stderr)
    return replace(result, target=target, file=_file_of(target) or result.file)


def _file_of(target: str) -> str | None:
    """Return the file of a target that was loaded."""
    place = target.rpartition(":")[0]
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    return None if file is None else shown(file)


class _Unshown(io.TextIOBase):
    """A stdout that shows nothing, and counts the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = 0

    def write(self, text: str, /) -> int:
        self.lines += text.count("\n")
        return len(text)

    def writable(self) -> bool:
        return True
