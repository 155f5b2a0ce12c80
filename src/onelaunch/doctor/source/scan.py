"""Files are read: what would be inside a graph, and what of that is at fault."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from onelaunch.doctor.paths import shown
from onelaunch.doctor.source.blocking import Blocking
from onelaunch.doctor.source.comments import kept
from onelaunch.doctor.source.configuration import Config
from onelaunch.doctor.source.program import Class, Definition, Function, Program
from onelaunch.doctor.source.reader import Reader
from onelaunch.doctor.source.silent import Silent
from onelaunch.doctor.source.values import Value
from onelaunch.errors import ArgumentError
from onelaunch.rules.finding import Finding, merged

_CONCERNS = re.compile(r"\btorch\b|\bonelaunch\b")
_GRAPHS = re.compile(r"\bgraph\b|\bmake_graphed_callables\b|\bcompile\b")
_NOT_OWN = frozenset({"__pycache__", "node_modules", "site-packages"})
_DEFINES = re.compile(r"\n.*\b(?:def|class|lambda)\b")
_MODULES = re.compile(r"\bdef forward\b")


def scan(
    paths: Iterable[str | Path],
    config: Config | None = None,
    unread: list[ArgumentError] | None = None,
) -> list[Finding]:
    """Find faults in files, and in the Python files of folders; nothing is run.

    Only what would be inside a graph counts: the `forward` of modules, what is handed to `graph`,
    `make_graphed_callables` or `torch.compile`, the body of ``with torch.cuda.graph(...)``, and the
    functions of the same file that those call.

    Args:
        config: what to leave out in folders; its choice of rules is not made here.
        unread: is given the errors of files in folders that are not Python, instead of raising.

    Raises:
        ArgumentError: OL401: there is no such file, or it is not Python.
    """
    found: list[Finding] = []
    named = {Path(path) for path in paths}
    for file in files(named, config or Config()):
        try:
            found += scan_text(str(file), file.read_bytes()) if file in named else scan_file(file)
        except ArgumentError as error:
            if unread is None or file in named:
                raise
            unread.append(error)
    return kept(merged(found))


def files(paths: Iterable[str | Path], config: Config) -> Iterator[Path]:
    """Return the Python files of paths, each once, in order; those named themselves always."""
    known: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise ArgumentError(
                "OL401",
                f"there is no file {path}",
                where=str(path),
                why=f"the path starts at the current folder, {Path.cwd()}",
                fix="onelaunch doctor path.py",
            )
        if path.suffix not in (".py", "") and path.is_file():  # a notebook parses as Python, too
            raise ArgumentError(
                "OL401",
                f"{path} is not a file of Python",
                where=str(path),
                why="the rules read `.py` files, and files without a suffix",
                fix="onelaunch doctor path.py",
            )
        for file in _inside(path, path, config) if path.is_dir() else [path]:
            if file.absolute() not in known:
                known.add(file.absolute())
                yield file


def _inside(folder: Path, top: Path, config: Config) -> Iterator[Path]:
    """Return the files in a folder, less what nobody wrote there: caches, environments."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _NOT_OWN or config.excludes(path, top):
            continue
        if path.is_dir():
            if not path.is_symlink() and not (path / "pyvenv.cfg").exists():
                yield from _inside(path, top, config)
        elif path.suffix == ".py":
            yield path


def scan_file(file: Path) -> list[Finding]:
    """Find the faults of one file, which is not parsed where nothing in it is of concern."""
    data = file.read_bytes()
    text = data.decode(errors="replace")
    if not (_CONCERNS.search(text) and (_MODULES.search(text) or _GRAPHS.search(text))):
        return []
    return scan_text(str(file), data)


def scan_text(file: str, data: bytes) -> list[Finding]:
    """Find the faults of a program."""
    reader = _reader(file, data)
    _guarded(reader.run_file)
    text = data.decode(errors="replace")
    if _GRAPHS.search(text):
        for function in _graphing(reader.program):
            _guarded(partial(reader.read_silently, function))
    _read_roots(reader)
    return _without_doubles(reader.found)


def scan_functions(file: str, data: bytes, lines: set[int], root: int | None) -> list[Finding]:
    """Find the faults of functions that ran, on the lines that ran.

    Args:
        lines: those that ran.
        root: the first line of the function that was called; None: it is in another file.
    """
    reader = _reader(file, data)
    _guarded(reader.run_file)
    for function in _that_ran(reader, lines):
        node = function.node
        marks = getattr(node, "decorator_list", ())
        entry = root == min([node.lineno, *(mark.lineno for mark in marks)])
        value = Value("function", target=function, bound=_object(function))
        _guarded(partial(reader.read_root, value, entry=entry))
    return [f for f in _without_doubles(reader.found) if f.line in lines]


def _that_ran(reader: Reader, lines: set[int]) -> list[Function]:
    """Return the functions of which lines ran, those inside others too."""
    for function in _own_functions(reader.program):
        inner = _DEFINES.search(reader.program.text_of(function.node), 1)
        if inner is not None and _ran(function.node, lines):
            _guarded(partial(reader.read_silently, function))
    found = [function for function in _own_functions(reader.program) if _ran(function.node, lines)]
    return found + [reader.defined[node] for node in reader.defined if _ran(node, lines)]


def _ran(node: Definition, lines: set[int]) -> bool:
    first = node.body[0] if isinstance(node.body, list) else node.body
    return any(first.lineno <= line <= (node.end_lineno or 0) for line in lines)


def _reader(file: str, data: bytes) -> Reader:
    return Reader(_program(file, data), [Blocking(), Silent()])


def _program(file: str, data: bytes) -> Program:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own escapes, say
            tree = ast.parse(data, file)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise ArgumentError(
            "OL401",
            f"{file} is not Python: {error}",
            where=f"{shown(file)}:{line}" if line else shown(file),
            why="the rules read the source as Python does",
            fix=f'leave it out: `exclude = ["{Path(file).name}"]` under [tool.onelaunch.doctor]',
        ) from error
    return Program(shown(file), data.decode(errors="replace"), tree)


def _read_roots(reader: Reader) -> None:
    """Read what the file graphs, then the modules that nobody was seen to graph."""
    for owner in reader.program.classes.values():
        for function in owner.methods.values():
            before = len(reader.roots)
            reader.note_decorated(Value("function", target=function, bound=_object(function)))
            del reader.roots[before + 1 :]
    entries = [value for value in reader.roots if _function(value) is not None]
    for value in entries:
        _guarded(partial(reader.read_root, value, entry=True))
    seen = {_function(value) for value in entries}
    for owner in reader.program.classes.values():
        forward = owner.find("forward") if owner.is_module else None
        if forward is not None and forward not in seen and owner.methods.keys() - {"__init__"}:
            value = Value("instance", target=owner)
            _guarded(partial(reader.read_root, value, entry=False))


def _guarded(read: Callable[[], None]) -> None:
    """Read, unless an expression is nested deeper than the interpreter can follow."""
    try:
        read()
    except RecursionError:
        return


def _function(value: Value) -> Function | None:
    if value.kind == "function":
        return value.target
    owner: Class = value.target
    return owner.find("forward" if owner.is_module else "__call__")


def _object(function: Function) -> Value | None:
    if function.owner is None or not function.method:
        return None
    return Value("instance", target=function.owner, place="self")


def _graphing(program: Program) -> Iterator[Function]:
    """Return the functions of the file that graph something, or capture it."""
    for function in _own_functions(program):
        if _GRAPHS.search(program.text_of(function.node)):
            yield function


def _own_functions(program: Program) -> Iterator[Function]:
    yield from program.functions.values()
    for owner in program.classes.values():
        yield from owner.methods.values()


def _without_doubles(found: list[Finding]) -> list[Finding]:
    """Return findings without reads of a number that an update of the same number reports."""
    updated = {f.what.split("`")[1] for f in found if f.code == "OL508"}
    return merged([f for f in found if f.code != "OL504" or f.what.split("`")[1] not in updated])
