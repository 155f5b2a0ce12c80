"""Stores that each run of a function's code makes."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple

_PLACE_STORES = {dis.opmap["STORE_ATTR"], dis.opmap["STORE_SUBSCR"]}


class SureStore(NamedTuple):
    """A store that every run makes: ``self.size = len(x)``, or ``self.sizes["x"] = len(x)``.

    Attributes:
        offset: the offset of its instruction.
        variable, path: the variable, and the attributes from it to the object.
        key: the attribute, or the key.
        item: True for an item.
    """

    offset: int
    variable: str
    path: tuple[str, ...]
    key: object
    item: bool


@functools.lru_cache(maxsize=4096)
def sure_stores(code: types.CodeType) -> tuple[SureStore, ...]:
    """Return the stores that every run makes that gets past them. A jump may skip a store in a
    branch or a loop, and exception handlers may skip any."""
    if code.co_exceptiontable or _PLACE_STORES.isdisjoint(code.co_code[::2]):
        return ()
    steps = list(dis.get_instructions(code))
    assigned = {step.argval for step in steps if step.opname.startswith("STORE_FAST")}
    found: list[SureStore] = []
    beyond = 0  # where the furthest jump until here leads
    for number, step in enumerate(steps):
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            beyond = max(beyond, step.argval)
        if step.opname.startswith("RETURN"):
            beyond = len(code.co_code)
        if beyond <= step.offset and step.opcode in _PLACE_STORES:
            store = _store(steps[: number + 1])
            if store is not None and store.variable not in assigned:
                found.append(store)
    return tuple(found)


def _store(steps: list[dis.Instruction]) -> SureStore | None:
    """Return the store of the last instruction, if a chain of attributes leads to its object."""
    last = steps.pop()
    item = last.opcode == dis.opmap["STORE_SUBSCR"]
    key = last.argval
    if item:
        constant = steps.pop()
        if constant.opname != "LOAD_CONST":
            return None
        key = constant.argval
    path: list[str] = []
    while steps and steps[-1].opname == "LOAD_ATTR":
        path.insert(0, steps.pop().argval)
    if not steps or not steps[-1].opname.startswith("LOAD_FAST"):
        return None
    name = steps[-1].argval
    variable = name[-1] if isinstance(name, tuple) else name
    return SureStore(last.offset, variable, tuple(path), key, item)
