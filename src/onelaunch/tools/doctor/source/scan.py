"""Files are read: those named, and the Python files of folders."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from onelaunch.errors import ArgumentError, bad
from onelaunch.finding import Finding
from onelaunch.tools.doctor.source.comments import kept
from onelaunch.tools.doctor.source.lint import lint
from onelaunch.tools.doctor.spot import shown
from onelaunch.tools.rules.findings import merged

_CONCERNS = re.compile(
    r"\A(?=.*\b(torch|onelaunch)\b)(?=.*\b(def forward|graph|make_graphed_callables|compile)\b)",
    re.S,
)
_NOT_OWN = frozenset({"__pycache__", "node_modules", "site-packages"})
_FIX = "onelaunch doctor path.py"


def scan(paths: Iterable[str | Path], unread: list[ArgumentError] | None = None) -> list[Finding]:
    """Find faults in files, and in the Python files of folders; nothing is run.

    Args:
        unread: is given the errors of files in folders that cannot be read or are not Python,
            instead of raising.

    Raises:
        ArgumentError: OL401: there is no such file, it cannot be read, or it is not Python.
    """
    found: list[Finding] = []
    named = {Path(path) for path in paths}
    for file in files(named, unread):
        try:
            data = _read(file)
            if file not in named and not _CONCERNS.search(data.decode(errors="replace")):
                continue
            found += scan_text(str(file), data)
        except ArgumentError as error:
            if unread is None or file in named:
                raise
            unread.append(error)
    return kept(merged(found))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError) -> ArgumentError:
    what = f"{path} cannot be read: {error.strerror}"
    return bad(what, shown(str(path)), "the rules read the source of files", _FIX)


def files(paths: Iterable[str | Path], unread: list[ArgumentError] | None = None) -> Iterator[Path]:
    """Return the Python files of paths, each once, in order; those named themselves always.

    Args:
        unread: is given the errors of folders in folders that cannot be read, instead of raising.
    """
    known: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            why = f"the path starts at the current folder, {Path.cwd()}"
            raise bad(f"there is no file {path}", str(path), why, _FIX)
        if path.suffix not in (".py", "") and path.is_file():  # a notebook parses as Python, too
            why = "the rules read `.py` files, and files without a suffix"
            raise bad(f"{path} is not a file of Python", str(path), why, _FIX)
        for file in _inside(path, unread) if path.is_dir() else [path]:
            if file.absolute() not in known:
                known.add(file.absolute())
                yield file


def _inside(folder: Path, unread: list[ArgumentError] | None) -> Iterator[Path]:
    """Return the files in a folder, less what nobody wrote there: caches, environments."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        if unread is None:
            raise _unreadable(folder, error) from error
        unread.append(_unreadable(folder, error))
        return
    for path in paths:
        if path.name.startswith(".") or path.name in _NOT_OWN:
            continue
        if path.is_dir():
            if not path.is_symlink() and not (path / "pyvenv.cfg").exists():
                yield from _inside(path, unread)
        elif path.suffix == ".py":
            yield path


def scan_text(file: str, data: bytes) -> list[Finding]:
    """Find the faults of a program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own escapes, say
            tree = ast.parse(data, file)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f"{shown(file)}:{line}" if line else shown(file)
        why = "the rules read the source as Python does"
        raise bad(f"{file} is not Python: {error}", where, why, _FIX) from error
    with suppress(RecursionError):  # an expression deeper than the interpreter can follow
        return lint(shown(file), data.decode(errors="replace"), tree)
    return []
