"""The names that code reads: what of an object could matter to a callable."""

from __future__ import annotations

import dis
import functools
import types

from torch import nn

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


@functools.lru_cache(maxsize=4096)
def attributes_read(kind: type) -> frozenset[str]:
    """The names that methods of a class, `__init__` apart, could read of an instance."""
    names: set[str] = {"training", "forward"}
    for parent in kind.__mro__:
        if parent in (nn.Module, object):
            continue
        for key, member in vars(parent).items():
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if key != "__init__" and isinstance(function, types.FunctionType):
                names |= names_read(function.__code__)
    return frozenset(names)
