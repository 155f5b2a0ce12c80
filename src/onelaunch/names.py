"""The names that code reads: what of an object could matter to a callable."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any, cast

_STORE_ATTR = dis.opmap["STORE_ATTR"]


@functools.lru_cache(maxsize=4096)
def names_read(code: types.CodeType) -> frozenset[str]:
    """The global and attribute names in a function's code, nested functions included.

    Strings that could be names count too, for `getattr` and `hasattr`.
    """
    names = set(code.co_names)
    if _STORE_ATTR in code.co_code[::2]:  # what is only stored is not read
        steps = [step for step in dis.get_instructions(code) if step.opcode in dis.hasname]
        names = {step.argval for step in steps if step.opname != "STORE_ATTR"}
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        if isinstance(constant, types.CodeType):
            names |= names_read(constant)
    return frozenset(names)


def functions_in(member: object) -> list[types.FunctionType]:
    """The functions behind a member of a class, however it is decorated."""
    found: dict[int, types.FunctionType] = {}
    waiting = [member]
    while waiting:
        member = waiting.pop(0)
        if isinstance(member, types.FunctionType):
            if id(member) not in found:  # one may wrap itself
                found[id(member)] = member
                waiting.append(member.__dict__.get("__wrapped__"))
        else:
            waiting += _behind(member)
    return list(found.values())


def _behind(member: object) -> list[object]:
    """What a decorator that makes no function has made something of."""
    inner: list[object] = []
    if isinstance(member, property):
        inner = [member.fget]
    elif isinstance(member, staticmethod | classmethod):
        inner = [cast(Any, member).__func__]
    elif isinstance(member, functools.singledispatchmethod):
        method: Any = member
        inner = list(method.dispatcher.registry.values())
    elif isinstance(member, _WITH_FUNC):
        inner = [cast(Any, member).func]
    elif isinstance(member, _CACHED):
        inner = [cast(Any, member).__wrapped__]
    return inner


_WITH_FUNC = (functools.partial, functools.partialmethod, functools.cached_property)
_CACHED = type(functools.lru_cache(len))


@functools.lru_cache(maxsize=4096)
def imports(code: types.CodeType) -> tuple[str, ...]:
    """The modules that a function's code imports as it runs."""
    found = [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*found, *(name for c in inner for name in imports(c)))


_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME")
_CALLS = ("CALL", "PRECALL", "PUSH_NULL", "KW_NAMES")
_PASSES = ("LOAD_", "BINARY_", "INPLACE_", "SWAP", "ROT_", "COPY", "DUP_TOP", "CACHE", *_CALLS)
"""What may lie between a read and the store of an assignment such as `n += k`."""


@functools.lru_cache(maxsize=4096)
def only_counts(code: types.CodeType, name: str, items: bool = False) -> bool:
    """Whether code does nothing with a number of this name but compute the next one: `n += 1`.

    Args:
        items: whether `name` is of a container, and the number is in it.
    """
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if _reads(step, name, items) and not _goes_back(steps, i, name, items):
            return False
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return all(only_counts(c, name, items) for c in inner)


def _reads(step: dis.Instruction, name: str, items: bool) -> bool:
    """Whether an attribute or variable of this name is read; a container's may be local. A method
    is no number."""
    if isinstance(step.argval, tuple):  # two variables at once
        return items and "LOAD" in step.opname and name in step.argval
    if step.argval != name or not step.opname.startswith("LOAD_"):
        return False
    if step.opname == "LOAD_ATTR" and sys.version_info >= (3, 12):
        return not (step.arg or 0) & 1
    if step.opname.startswith("LOAD_FAST"):
        return items
    return step.opname not in ("LOAD_METHOD", "LOAD_CLOSURE", "LOAD_CONST")


def _goes_back(steps: list[dis.Instruction], start: int, name: str, items: bool) -> bool:
    """Whether what was read at `start` is but part of the next number."""
    above = 1
    for i in range(start + 1, len(steps)):
        step = steps[i]
        above += dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname.startswith("CALL") and above < 2:  # it is an argument
            return False
        if items and step.opname == "STORE_SUBSCR":
            return steps[i - 1].opname.startswith(("SWAP", "ROT_"))
        if not items and step.opname in _STORES:
            return step.argval == name
        if not step.opname.startswith(_PASSES):
            return False
    return False


@functools.lru_cache(maxsize=4096)
def rewrites(code: types.CodeType, name: str, items: bool = False) -> bool:
    """Whether code reads a number of this name before it stores another one there."""
    steps = list(dis.get_instructions(code))
    read = False
    for i, step in enumerate(steps):
        if step.opname == "STORE_SUBSCR" if items else _stores(step, name):
            if read:
                return True
            if not items:
                break
        elif _reads(step, name, items):
            read = read or not items or _picks(steps[i + 1 : i + 5])
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return any(rewrites(c, name, items) for c in inner)


def _stores(step: dis.Instruction, name: str) -> bool:
    return step.opname in _STORES and step.argval == name


def _picks(steps: list[dis.Instruction]) -> bool:
    """Whether an item is read of what was loaded before."""
    for step in steps:
        if step.opname == "BINARY_SUBSCR" or step.argrepr == "[]":
            return True
        if not step.opname.startswith(_PASSES):
            return False
    return False
