"""Callees whose code is not read (C, or machinery), and their possible reads of their arguments."""

from __future__ import annotations

import functools
import operator
import types
from typing import Any, cast

from onelaunch.frames.origins import is_machinery, is_standard_machinery
from onelaunch.frames.peek import (
    BUILTIN,
    FORMATS,
    attributes_of,
    class_member,
    facts_of_type,
    object_of,
)


def is_unread(function: object) -> bool:
    """Return whether the watch does not see a callee's code."""
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return is_machinery(function.__code__.co_filename)
    if id(function) in _HARMLESS:
        return False
    if isinstance(function, type):  # of C: its objects may keep the arguments
        return not function.__flags__ & _HEAP or function.__module__ in ("itertools", "collections")
    if isinstance(function, functools.partial):
        return is_unread(cast(functools.partial[object], function).func)
    # An object that C calls: `operator.attrgetter("scale")`.
    return isinstance(function, _C_FUNCTIONS) or is_called_by_c(type(function))


def is_inert(function: Any) -> bool:
    """Return whether a call of a function reads nothing of its arguments that its own code does not
    tell. May be False for such a call, too."""
    kind = type(function)
    if kind is types.MethodType and type(function.__func__) is types.FunctionType:
        function = function.__func__
        return function.__module__ not in _NOTED and "__objclass__" not in function.__dict__
    if kind is types.FunctionType:
        standard = is_standard_machinery(function.__code__.co_filename)
        return not standard and function.__module__ not in _READ_ALL
    if kind is types.BuiltinFunctionType:
        noted = function.__module__ in _NOTED and function not in _CALL_NOTHING
        return not (noted or isinstance(function.__self__, dict) or is_format(function))
    if kind is type:
        if id(function) in BUILTIN:
            return function in _NUMBERS or issubclass(function, BaseException)
        return function.__module__ not in _NOTED and class_member(function, "__objclass__") is None
    module = facts_of_type(function).module
    if module is None:
        return False
    inside = (attributes_of(function) if module else None) or _NONE
    return inside.get("__module__", module) not in _NOTED and "__objclass__" not in inside


def is_called_by_c(kind: type) -> bool:
    return isinstance(class_member(kind, "__call__"), types.WrapperDescriptorType)


def is_getattr(function: object) -> bool:
    """Return whether a callee reads an attribute of an object by name, and nothing else."""
    if id(function) in _NAMED:
        return True
    return isinstance(function, _C_SLOTS) and function.__name__ == "__getattribute__"


def reads_attributes(function: object) -> bool:
    """Return whether an unseen callee reads attributes of its arguments."""
    if isinstance(function, functools.partial):
        return reads_attributes(cast(functools.partial[object], function).func)
    named = getattr(function, "__module__", None) in _READ_ALL
    return named or id(function) in _OPEN or is_getattr(function) or is_format(function)


def paths_of(getter: operator.attrgetter[Any]) -> tuple[str, ...]:
    return cast(Any, getter).__reduce__()[1]


def names_of(getter: operator.attrgetter[Any]) -> list[str]:
    return [name for path in paths_of(getter) for name in path.split(".")]


def is_format(function: Any) -> bool:
    """Return whether a callee is `str.format`, bound or not, whose text may name attributes."""
    bound = isinstance(function, types.BuiltinFunctionType)
    of = type(function.__self__) if bound else getattr(function, "__objclass__", None)
    return of is str and function.__name__ in FORMATS


def hands_on(function: object) -> bool:
    """Return whether a callee of C may call the functions among its arguments, as `map` does."""
    if isinstance(function, types.MethodDescriptorType):
        return function.__objclass__ is list  # `layers.sort(key=...)`
    return id(function) in BUILTIN or getattr(function, "__module__", None) in _HAND_ON


def is_of_dict(function: Any) -> bool:
    """Return whether a callee is a dict's method in C, bound or not."""
    if isinstance(function, types.BuiltinFunctionType):
        return isinstance(function.__self__, dict)
    return getattr(function, "__objclass__", None) is dict


@functools.lru_cache(maxsize=4096)
def is_method(kind: type, code: types.CodeType) -> bool:
    """Return whether code is a method or a property's getter of a class's objects, and may read
    their attributes. `isinstance` asks for what is compared anyway."""
    member = class_member(kind, code.co_name)
    of = getattr(member, "fget", member)
    return getattr(of, "__code__", None) is code and code.co_name not in _ASK_FOR_OTHERS


def taken_apart(function: object) -> tuple[object, tuple[object, ...]]:
    """Return the function behind partials and methods of C, and the arguments that they bind."""
    given: tuple[object, ...] = ()
    while isinstance(function, functools.partial):
        partial = cast(functools.partial[object], function)
        function, given = partial.func, (*partial.args, *partial.keywords.values(), *given)
    if isinstance(function, _C_METHODS) and (of := object_of(function)) is not None:
        given = (of, *given)
    return function, given


_NAMED = frozenset(map(id, (getattr, hasattr)))
_OPEN = frozenset(map(id, (vars, dir)))
_READ_ALL = frozenset(
    {"copy", "copyreg", "dataclasses", "inspect", "json", "operator", "pickle", "_pickle", "pprint"}
)
"""Modules whose functions read any attribute of their arguments."""
_HAND_ON = frozenset({"builtins", "functools", "_functools", "itertools"})
_NOTED = _READ_ALL | _HAND_ON
ITEM_METHODS = frozenset({"get", "__getitem__", "pop", "setdefault", "__contains__"})
"""Methods of dicts that read the item of a key."""
READ_WHOLE = frozenset(
    {"values", "items", "copy", "popitem", "__or__", "__ror__", "__eq__", "__ne__"}
)
"""Methods of dicts that read every item."""
CHANGE = frozenset({"update", "__setitem__", "__ior__", "__delitem__", "clear"})
"""Methods of dicts that only change items. Those of a namespace are told by their names alone."""
_ASK_FOR_OTHERS = ("__instancecheck__", "__subclasscheck__", "__get__")
_C_SLOTS = (types.WrapperDescriptorType, types.MethodWrapperType)
_C_METHODS = (types.BuiltinFunctionType, types.MethodWrapperType)
_C_FUNCTIONS = (*_C_METHODS, types.MethodDescriptorType, types.WrapperDescriptorType)
_NONE: dict[str, Any] = {}
_HEAP = 1 << 9
"""The flag of classes that are made at run time: Py_TPFLAGS_HEAPTYPE."""

_NUMBERS = (bool, int, float, complex, range, slice)
_CALL_NOTHING = {len, callable, id, hash, issubclass}
_HARMLESS = set(
    map(id, (isinstance, issubclass, callable, id, len, type, hasattr, getattr, super, hash))
)
