"""Numbers that are only counted: `n += k`, told by the instructions of the assignment."""

from __future__ import annotations

import dis

STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME")
_CALLS = ("CALL", "PRECALL", "PUSH_NULL", "KW_NAMES")
_PASSES = ("LOAD_", "SWAP", "COPY", "CACHE", *_CALLS)
"""Prefixes of instructions between the read and the store of an assignment such as `n += k`."""
_BY_SWAP = ("SWAP", "STORE_ATTR", "STORE_SUBSCR")
"""Instructions after a swap in such an assignment."""


def is_subscript(step: dis.Instruction) -> bool:
    """Return whether an instruction gives an item. Python 3.14 has an operator for it."""
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def only_counts(
    steps: list[dis.Instruction],
    start: int,
    name: str,
    *,
    items: bool = False,
) -> bool:
    """Return whether the value read at `start` is only a term of the number stored there next.

    Args:
        items: True for an item of a container; False for an attribute or variable `name`.
    """
    above, computed = 1, False
    for i in range(start + 1, len(steps)):
        step = steps[i]
        above += dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname.startswith("CALL") and above < 2:  # it is an argument
            return False
        if step.opname == "SWAP" and not steps[i + 1].opname.startswith(_BY_SWAP):
            return False  # of `a.n, a.k = a.k, a.n + 1`
        if items and step.opname == "STORE_SUBSCR":
            return computed and above <= 0 and steps[i - 1].opname.startswith("SWAP")
        if not items and step.opname in STORES:
            return computed and above <= 0 and step.argval == name
        if step.opname == "BINARY_OP" and not is_subscript(step):
            if step.argrepr not in ("+", "+=", "-="):
                return False
            computed = True
        elif not (is_subscript(step) or step.opname.startswith(_PASSES)):
            return False
    return False
