"""Callees whose code is not read (C, or machinery), and the reads of their arguments that they may
make."""

from __future__ import annotations

import functools
import types
from typing import cast

from onelaunch.frames.origins import is_machinery
from onelaunch.frames.peek import BUILTIN, class_member


def is_unread(function: object) -> bool:
    """Return whether a callee is no Python code that would be seen."""
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return is_machinery(function.__code__.co_filename)
    if id(function) in _HARMLESS:
        return False
    if isinstance(function, type):
        return id(function) in BUILTIN or function.__module__ in ("itertools", "collections")
    if isinstance(function, functools.partial):
        return is_unread(cast(functools.partial[object], function).func)
    # An object that C calls: `operator.attrgetter("scale")`.
    return isinstance(function, _OF_C) or is_called_by_c(type(function))


def is_called_by_c(kind: type) -> bool:
    return isinstance(class_member(kind, "__call__"), types.WrapperDescriptorType)


ASK = frozenset(map(id, (vars, dir, type, getattr, hasattr)))
"""ids of functions that give, or ask for, attributes of their arguments."""
READS_ALL = frozenset(
    {"copy", "copyreg", "dataclasses", "inspect", "json", "operator", "pickle", "_pickle", "pprint"}
)
"""Modules whose functions read any attribute of their arguments."""
_OF_C = (
    *(types.BuiltinFunctionType, types.MethodWrapperType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
)


_HARMLESS = set(
    map(id, (isinstance, issubclass, callable, id, len, type, hasattr, getattr, super, hash))
)
