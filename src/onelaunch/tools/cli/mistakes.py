"""The answers to mistakes on the command line, and to code of the user's that raises."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Generator
from pathlib import Path
from traceback import print_exception
from typing import TypeVar

from onelaunch.errors import GraphError, bad
from onelaunch.tools.report.result import Result

R = TypeVar("R", bound=Result)


class ToolError(Exception):
    """An error of onelaunch's own, and none of a target."""


def _check_file(file: Path, holds: str, command: str) -> None:
    folder = file.absolute().parent
    why, fix = f"{holds} is written there", f"onelaunch {command} --help"
    try:
        if not folder.is_dir():
            fix = f"mkdir -p {shlex.quote(str(file.parent))}"
            raise bad(f"there is no folder {file.parent}", str(file), why, fix)
        if file.is_dir():
            raise bad(f"{file} is a folder", str(file), why, f"the name of a file: {file}/result")
        writable = os.access(file if file.exists() else folder, os.W_OK)
    except OSError as error:  # a name that is too long, say
        raise bad(f"{file} cannot be written: {error.strerror}", str(file), why, fix) from error
    if not writable:
        raise bad(f"{file} cannot be written", str(file), why, "a file that you may write")


def check_files(holds: str, command: str, *files: Path | None, report: Path | None = None) -> None:
    """Refuse files that cannot be written, and a page that cannot be drawn, before the work."""
    for file in (*files, report):
        if file is not None:
            _check_file(file, holds, command)
    if report is not None:
        from onelaunch.tools.report.page import CHARTS, can_draw

        if not can_draw():
            what = f"the charts of --report need {CHARTS}, which is not installed"
            why = "it brings Vega-Lite, which draws them, for a page that opens offline"
            raise bad(what, "--report", why, f"pip install {CHARTS}")


def write(file: Path, text: str, command: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except (OSError, UnicodeError) as error:
        what = f"{file} could not be written: {getattr(error, 'strerror', None) or 'no text'}"
        raise bad(what, str(file), str(error), f"onelaunch {command} --help") from error


def read_saved(file: Path, kind: type[R], fix: str) -> R:
    """Read a saved result.

    Args:
        fix: the command that writes one.

    Raises:
        ArgumentError: OL401: there is no such file, or it is something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        said, why = getattr(error, "strerror", None) or "it is no text", f"it is {kind.noun}"
        raise bad(f"{file} cannot be read: {said}", str(file), why, fix) from error
    try:
        return kind.from_json(text)
    except ValueError as error:
        lacks = error.__cause__
        why = f"it has no {lacks}" if isinstance(lacks, KeyError) else str(error)
        what = f"{file} is not {kind.noun} that onelaunch wrote"
        raise bad(what, str(file), why, fix) from error


@contextlib.contextmanager
def tracebacks(shown: bool) -> Generator[None]:
    """Print the traceback of an exception of the user's code, if that is asked for."""
    try:
        yield
    except (GraphError, ToolError) as error:
        if shown and error.__cause__ is not None:
            print_exception(error.__cause__)
        raise
