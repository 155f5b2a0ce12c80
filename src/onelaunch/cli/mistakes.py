"""The answers to mistakes on the command line, and to code of the user's that raises."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Callable, Generator
from pathlib import Path
from traceback import print_exception
from typing import TypeVar

from onelaunch.errors import GraphError, bad

T = TypeVar("T")


def check_file(file: Path, holds: str, command: str) -> None:
    """Refuse a file that cannot be written, before the work that it is to hold.

    Args:
        holds: what is written there, such as ``"the comparison"``.
    """
    folder = file.absolute().parent
    why, fix = f"{holds} is written there", f"onelaunch {command} --help"
    try:
        if not folder.is_dir():
            fix = f"mkdir -p {shlex.quote(str(file.parent))}"
            raise bad(f"there is no folder {file.parent}", str(file), why, fix)
        if file.is_dir():
            raise bad(f"{file} is a folder", str(file), why, f"the name of a file: {file}/result")
        writable = os.access(file if file.exists() else folder, os.W_OK)
        if writable:
            _refuse_full(file)
    except OSError as error:  # a name that is too long, say
        raise bad(f"{file} cannot be written: {error.strerror}", str(file), why, fix) from error
    if not writable:
        raise bad(f"{file} cannot be written", str(file), why, "a file that you may write")


def _refuse_full(file: Path) -> None:
    """Raise the error of a disk or a device that is full.

    A device is asked by writing a byte, but for a terminal, which would show it.
    """
    if file.is_char_device():
        with file.open("wb", buffering=0) as device:
            if not device.isatty():
                device.write(b"\n")
    elif hasattr(os, "statvfs") and (file.is_file() or not file.exists()):
        disk = os.statvfs(file.absolute().parent)
        if disk.f_blocks and not disk.f_bfree:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_report(file: Path, holds: str, command: str) -> None:
    """Refuse a page that cannot be written or drawn, before the work that it is to show."""
    from onelaunch.report.page.frame import EXTRA, can_draw

    check_file(file, holds, command)
    if not can_draw():
        what = "the charts of --report need vl-convert-python, which is not installed"
        why = "it brings Vega-Lite, which draws them, for a page that opens offline"
        raise bad(what, "--report", why, f"pip install '{EXTRA}'")


def write(file: Path, text: str, command: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        what = f"{file} could not be written: {error.strerror}"
        raise bad(what, str(file), str(error), f"onelaunch {command} --help") from error


def read_saved(file: Path, noun: str, parse: Callable[[str], T], fix: str) -> T:
    """Read a result that ``--json`` wrote.

    Args:
        noun: what it is, such as ``"comparison"``.
        parse: makes it of the text; raises ValueError of another text.
        fix: the command that writes one.

    Raises:
        ArgumentError: there is no such file, or it holds something else.
    """
    try:
        return parse(file.read_text())
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror}"
        why = f"a target that ends in .json is a saved {noun}"
        raise bad(what, str(file), why, fix) from error
    except ValueError as error:
        what = f"{file} is not a {noun} that --json wrote"
        raise bad(what, str(file), unlike(error), fix) from error


def unlike(error: ValueError) -> str:
    """Say what keeps a file from being a saved result: a key that it lacks, or its JSON."""
    lacks = error.__cause__
    return f"it has no {lacks}" if isinstance(lacks, KeyError) else str(error)


@contextlib.contextmanager
def tracebacks(shown: bool) -> Generator[None]:
    """Print the traceback of an exception of the user's code, if that is asked for."""
    try:
        yield
    except GraphError as error:
        if shown and error.__cause__ is not None:
            print_exception(error.__cause__)
        raise
