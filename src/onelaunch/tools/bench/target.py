"""The callable and the arguments that ``path.py:name`` or ``module:name`` stand for."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from onelaunch.errors import ArgumentError, describe_type
from onelaunch.frames.origins import is_installed
from onelaunch.source import PACKAGE
from onelaunch.tools.bench.reference import message_of, said
from onelaunch.tools.targets import FIX, Command, bad_target, located, named

TOOLS = os.path.join(PACKAGE, "tools", "")
TargetCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
DONE: dict[Command, str] = {
    "compare": "compared",
    "doctor": "diagnosed",
    "optimize": "optimized",
    "profile": "profiled",
}


def load(target: str, command: Command = "compare") -> TargetCall:
    """Import a factory and call it.

    A file in a package (a folder with ``__init__.py``) is imported as a module of that package, as
    pytest does it: its relative and absolute imports work from any folder. Another file is imported
    with its own folder on the path, as ``python file.py`` does it.

    Args:
        target: ``path.py:name`` or ``module:name`` of a function without arguments that returns
            ``(callable, args)`` or ``(callable, args, kwargs)``.

    Raises:
        ArgumentError: OL401: no such target, it does not import, or it returns another shape.
    """
    place, name = named(target, command)
    module = _import(target, place, command)
    factory = getattr(module, name, None)
    if factory is None:
        raise _unknown(target, place, name, module, command)
    if isinstance(factory, nn.Module):
        what = f"`{name}` is {describe_type(factory)}, not a function that makes one"
        raise bad_target(target, what, "the arguments must come with it")
    if not callable(factory):
        raise bad_target(
            target, f"`{name}` is not callable", "the factory is called without arguments"
        )
    if needed := _needed(factory):
        raise bad_target(
            target, f"`{name}` needs {needed}", "the factory is called without arguments"
        )
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise raised(f"`{name}()`", error, target, command) from error
    return _checked(target, name, made)


def _needed(factory: Callable[..., Any]) -> str:
    """Return the names of the parameters that a factory cannot do without; "" for none."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return ""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return ", ".join(p.name for p in parameters if p.default is p.empty and p.kind not in kinds)


def _unknown(target: str, place: str, name: str, module: Any, command: Command) -> ArgumentError:
    """Make the error for a name that the module lacks, with the nearest that it has."""
    own = [
        n
        for n, v in vars(module).items()
        if callable(v)
        and not n.startswith("_")
        and getattr(v, "__module__", None) == module.__name__
    ]
    close = difflib.get_close_matches(name, own, 1)
    fix = f"onelaunch {command} {place}:{close[0]}" if close else FIX
    why = f"it has {', '.join(sorted(own)) or 'nothing that can be called'}"
    return bad_target(target, f"{place} has no `{name}`", why, fix)


def _import(target: str, place: str, command: Command) -> Any:
    root, module = located(target, command)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise raised(f"importing {place}", error, target, command) from error


def _checked(target: str, name: str, made: object) -> TargetCall:
    parts = cast(tuple[Any, ...], made) if isinstance(made, tuple) else ()
    why = "the arguments must come with it"
    if len(parts) in (2, 3):
        fn, args, kwargs = (*parts, {})[:3]
        if not callable(fn):
            why = "its first part is not callable"
        elif not isinstance(args, (tuple, list)):
            why = "its second part must be a tuple of arguments: (net, (images,)) for one"
        elif not isinstance(kwargs, Mapping):
            why = "its third part must be a dict"
        else:
            return fn, tuple(args), dict(kwargs)
    raise bad_target(target, f"`{name}()` returned {_shape(made)}", why)


def _shape(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in cast(tuple[Any, ...], made))})"
    return "None" if made is None else describe_type(made)


def raised(what: str, error: BaseException, target: str, command: Command) -> ArgumentError:
    """Make the error for code of the user's that raised, with their line."""
    message = message_of(error)
    why = f"it must run by itself before it can be {DONE[command]}"
    fix = f"onelaunch {command} {target} --traceback    # shows every line on the way there"
    if command in ("compare", "optimize") and "does not require grad" in message:
        what_is = "the engines are compared" if command == "compare" else "steps are measured"
        why = f"{what_is} in inference, without grad, and this runs a backward"
        fix = "return the forward alone: `return net, (images,)`"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        fix = f"`pip install` the package that has `{package}`, or name another factory"
    return ArgumentError(
        "OL401",
        f"{what} raised {type(error).__name__}: {message}",
        where=f"{target}{_line(error)}",
        why=why,
        fix=fix,
    )


_CALLS = re.compile(r"(fn|call|timed|workload)\(")
"""Lines of the tools that call the user's callable, where C raises for it: a missing argument."""


def own_fault(error: BaseException, target: str, command: Command) -> str | None:
    """Return the message for an exception of a line of the tools; None if their callee raised it.

    An exception of the callable's has frames of its own inside of the tools' frames.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.startswith(TOOLS):
        return None
    line = frames[-1].line or ""
    if _CALLS.search(line):
        return None
    return (
        f"onelaunch itself failed: {said(error)}\n"
        f"  where: {frames[-1].filename}:{frames[-1].lineno}: {line}\n"
        "  why:   this is a fault of onelaunch, and none of the callable\n"
        f"  fix:   report it, with what this prints: onelaunch {command} {target} --traceback"
    )


def _line(error: BaseException) -> str:
    """Find the innermost line that is neither onelaunch's nor of an installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f", at {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (is_installed(frame.filename) or frame.filename.startswith("<")):
            return f", at {frame.filename}:{frame.lineno}: {frame.line}"
    return ""
