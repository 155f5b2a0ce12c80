"""Functions, behind whatever decorates them, and the names in their code."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, cast

from onelaunch.identity import id


@functools.lru_cache(maxsize=4096)
def names_read(code: types.CodeType) -> frozenset[str]:
    """Return the global and attribute names in a function's code, nested functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_read(constant)
    return frozenset(names)


def functions_in(member: object) -> list[types.FunctionType]:
    """Return the functions behind a member of a class, however it is decorated."""
    found: dict[int, types.FunctionType] = {}
    waiting = [member]
    while waiting:
        member = waiting.pop(0)
        if isinstance(member, types.FunctionType):
            if id(member) not in found:  # a function may wrap itself
                found[id(member)] = member
                waiting.append(member.__dict__.get("__wrapped__"))
        else:
            waiting += behind(member)
    return list(found.values())


def behind(member: object) -> Iterator[object]:
    """Return the functions wrapped by a descriptor (property, partial, cached_property...)."""
    if isinstance(member, property):
        yield from (f for f in (member.fget, member.fset) if f is not None)
    elif isinstance(member, staticmethod | classmethod):
        yield cast(Any, member).__func__
    elif isinstance(member, functools.singledispatchmethod):
        yield from cast(Any, member).dispatcher.registry.values()
    elif isinstance(member, _WITH_FUNC):
        yield cast(Any, member).func
    elif isinstance(member, _CACHED):
        yield cast(Any, member).__wrapped__


_WITH_FUNC = (functools.partial, functools.partialmethod, functools.cached_property)
_CACHED = type(functools.lru_cache(len))
