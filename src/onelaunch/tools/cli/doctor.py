"""`onelaunch doctor`: what stops callables, and what the source of files shows.

torch takes seconds to import, and files alone do not need it.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from onelaunch.errors import ArgumentError, bad
from onelaunch.tools.cli import FAILED, FOUND, OK
from onelaunch.tools.cli.mistakes import check_files, read_saved
from onelaunch.tools.cli.progress import console_for_reports, progress
from onelaunch.tools.cli.target import (
    Json,
    Report,
    Traceback,
    deliver,
    import_torch,
    with_target,
)
from onelaunch.tools.doctor.diagnosis import Diagnosis, together
from onelaunch.tools.doctor.source.scan import files, scan
from onelaunch.tools.names import split
from onelaunch.tools.rules.selection import chosen, named, nearest
from onelaunch.tools.targets import located

if TYPE_CHECKING:
    from onelaunch.tools.bench.workload import OnProgress, Workload

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
    json: Json = None,
    report: Report = None,
    select: Annotated[
        str | None, typer.Option(help=f"Only these rules: {_CODES}. OL1 is all that begin so.")
    ] = None,
    ignore: Annotated[str | None, typer.Option(help=f"All but these rules: {_CODES}.")] = None,
    traceback: Traceback = False,
) -> int:
    """Name what stops a callable from being one launch, right and fast, by line."""
    rules = _rules("--select", select), _rules("--ignore", ignore)
    saved = [Path(target) for target in targets if target.endswith(".json")]
    targets = [target for target in targets if Path(target) not in saved]
    check_files("the diagnosis", "doctor", json, report=report)
    paths = [Path(target) for target in targets if _is_path(target)]
    list(files(path for path in paths if os.path.isfile(path)))  # refuses what is no Python
    callables = [target for target in targets if Path(target) not in paths]
    for target in callables:
        located(target, "doctor")
    console = console_for_reports()
    unread: list[ArgumentError] = []
    fix = "onelaunch doctor path.py:model --json found.json"
    found = [read_saved(file, Diagnosis, fix) for file in saved]
    found += [_of_source(paths, console, unread)] if paths else []
    found += _of_callables(callables, console, traceback)
    result = together(found).only(chosen(*rules))
    deliver(result, console, json, report)
    for error in unread:
        print(f"not read: {error.where}: {error.what}", file=sys.stderr)
    if unread:
        return FAILED
    return OK if result.clean else FOUND


def _rules(option: str, text: str | None) -> list[str]:
    """Read the rules that an option names."""
    words = split(text or "")
    unknown = [word for word in words if not named(word)]
    if text is not None and (unknown or not words):
        near = nearest(unknown[0]) if unknown else "host-read"
        what = f"no rule is called {unknown[0]!r}" if unknown else "no rule is named"
        why = "`onelaunch explain --list` prints all codes, names and severities"
        raise bad(what, option, why, f"{option} {near if near and named(near) else 'host-read'}")
    return words


def _is_path(target: str) -> bool:
    """Return whether a target is a file or folder, and no callable.

    Raises:
        ArgumentError: it is neither.
    """
    path = Path(target)
    fix = "onelaunch doctor path.py:model, or a file or folder"
    if os.path.isdir(path) and next(path.rglob("*.py"), None) is None:
        raise bad(f"{target} has no Python files", target, "the rules read Python", fix)
    if os.path.exists(path):  # no name is too long for it, as it is for `Path.exists`
        return True
    if ":" not in target:
        why = f"the path starts at the current folder, {Path.cwd()}"
        raise bad(f"there is no file or folder {target}", target, why, fix)
    return False


def _of_source(paths: list[Path], console: Console, unread: list[ArgumentError]) -> Diagnosis:
    """Diagnose files and folders, without running them; `unread` gets what is not Python."""
    with progress(console) as tell:
        tell("reading the source", 0.0)
        findings = scan(paths, unread)
    return Diagnosis(", ".join(map(str, paths)), tuple(findings), means=("source",))


def _of_callables(targets: list[str], console: Console, traceback: bool) -> list[Diagnosis]:
    """Load and diagnose targets, one after another.

    A module in eval mode is called without grad, as in a comparison; other callables see to that
    themselves. The warnings of a callable, which runs many times, are not shown.
    """
    if not targets:
        return []
    import_torch(console)
    import torch

    from onelaunch.tools.doctor.diagnose import examine
    from onelaunch.tools.doctor.emulated import emulated, install, streams

    install()

    def work(call: Workload, tell: OnProgress) -> Diagnosis:
        infers = isinstance(call.fn, torch.nn.Module) and not call.fn.training
        with torch.set_grad_enabled(not infers), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return examine(emulated(call), tell)

    found: list[Diagnosis] = []
    for target in targets:
        with streams():
            result = with_target(target, "doctor", console, work, traceback)
        found.append(replace(result, target=target))
    return found
