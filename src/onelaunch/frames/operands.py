"""The operand stack of a function's code, followed through its branches and loops."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable

from onelaunch.frames.stack import UNKNOWN, Symbol
from onelaunch.identity import id


class OperandStack:
    """The symbols on the operand stack at each instruction, in the order of the code."""

    def __init__(self) -> None:
        self._stack: list[Symbol] = []
        self._at: dict[int, list[Symbol]] = {}
        """offset of a later instruction -> the stack with which others jump there."""
        self._unescaped: dict[int, int] = {}
        """id of a symbol that only gave items by known keys so far -> number of its load."""
        self._indexed: set[int] = set()
        """ids of symbols with an item that was loaded or stored."""

    def _jump(self, step: dis.Instruction, stack: list[Symbol]) -> None:
        """Note the stack with which an instruction jumps. Others may jump to the same place."""
        known = self._at.get(step.argval)
        self._at[step.argval] = list(stack) if known is None else self._joined(known, stack)

    def _joined(self, one: list[Symbol], other: list[Symbol]) -> list[Symbol]:
        if len(one) != len(other):  # a handler of exceptions does not know what lies below
            return list(max(one, other, key=len))
        for a, b in zip(one, other, strict=True):
            if a is not b:
                self._unescaped.pop(id(a), None)
                self._unescaped.pop(id(b), None)
        return [
            a if a is b else Symbol("either", parts=(a, b)) for a, b in zip(one, other, strict=True)
        ]

    def _pop(self, indexed: bool = False) -> Symbol:
        symbol = self._stack.pop() if self._stack else UNKNOWN
        if indexed:
            self._indexed.add(id(symbol))
        else:
            self._unescaped.pop(id(symbol), None)
        return symbol

    def _pops(self, count: int) -> list[Symbol]:
        return [self._pop() for _ in range(count)][::-1]

    def _other(self, step: dis.Instruction) -> None:
        """Apply an instruction with unknown results."""
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        self._pops(max(0, -effect))
        if effect > 0:
            self._stack += [Symbol("unknown") for _ in range(effect)]
        elif self._stack and not step.opname.startswith(_KEEPS):
            self._pop()
            self._stack.append(UNKNOWN)

    # Instructions that load no place outside of the frame.

    def unchanged(self, step: dis.Instruction, index: int) -> None:
        """Leave the stack as it is: an iterator stands for its container."""

    def next_(self, step: dis.Instruction, index: int) -> None:
        base = self._stack[-1] if self._stack else UNKNOWN
        # At the end it pops the iterator. From 3.12 the instruction there pops two values.
        after = [*self._stack, UNKNOWN] if sys.version_info >= (3, 12) else self._stack[:-1]
        self._jump(step, after)
        self._stack.append(Symbol("element", base, offset=step.offset))

    def jump_or_pop(self, step: dis.Instruction, index: int) -> None:
        """Note `a or b` of Python 3.11, which jumps with the value of `a`."""
        self._jump(step, self._stack)
        self._pop()

    def send(self, step: dis.Instruction, index: int) -> None:
        """Note the result of `yield from`, which the instruction jumps to the end with."""
        *below, base, _ = self._stack if len(self._stack) > 1 else (UNKNOWN, UNKNOWN)
        result = Symbol("element", base, offset=step.offset)
        kept = [base] if sys.version_info >= (3, 12) else []
        self._jump(step, [*below, *kept, result])
        self._stack = [*below, base, Symbol("unknown")]

    def sent(self, step: dis.Instruction, index: int) -> None:
        result = self._pop()
        self._pop()
        self._stack.append(result)

    def entered(self, step: dis.Instruction, index: int) -> None:
        """Note `with context as value`."""
        self._stack.append(Symbol("element", self._pop(), offset=step.offset))
        self._stack.insert(-1, Symbol("unknown"))

    def special(self, step: dis.Instruction, index: int) -> None:
        base = self._pop()
        self._stack += [Symbol("attribute", base, step.argrepr, offset=step.offset), base]

    def parts(self, step: dis.Instruction, index: int) -> None:
        self._stack.append(Symbol("parts", parts=tuple(self._pops(step.arg or 0))))

    def append(self, step: dis.Instruction, index: int) -> None:
        """Add a part to a comprehension's result, which lies below the iterators of its loops."""
        self._extend(step.arg or 1, self._pops(2 if step.opname == "MAP_ADD" else 1))

    def extended(self, step: dis.Instruction, index: int) -> None:
        """Note `[*layers]`."""
        more = Symbol("element", self._pop(), offset=step.offset)
        self._extend(step.arg or 1, [more])

    def _extend(self, place: int, more: Iterable[Symbol]) -> None:
        if len(self._stack) < place:
            return
        old = self._stack[-place]
        new = Symbol("parts", parts=(*(old.parts if old.kind == "parts" else (old,)), *more))
        if old is UNKNOWN:  # whatever it is, others are UNKNOWN, too
            self._stack[-place] = new
            return
        for stack in (self._stack, *self._at.values()):  # where a comprehension's loops end, too
            stack[:] = [new if symbol is old else symbol for symbol in stack]

    def copy(self, step: dis.Instruction, index: int) -> None:
        place = step.arg or 1
        deep = len(self._stack) >= place
        self._stack.append(self._stack[-place] if deep else UNKNOWN)

    def swap(self, step: dis.Instruction, index: int) -> None:
        place = step.arg or 1
        if len(self._stack) >= place:
            stack = self._stack
            stack[-1], stack[-place] = stack[-place], stack[-1]

    def made_slice(self, step: dis.Instruction, index: int) -> None:
        self._pops(step.arg or 2)
        self._stack.append(_SLICE)


_SLICE = Symbol("unknown", key=slice)


def is_slice(key: Symbol) -> bool:
    return key is _SLICE or (key.kind == "constant" and isinstance(key.key, slice))


_KEEPS = (
    *("POP", "STORE", "DELETE", "NOP", "RESUME", "CACHE", "PRECALL", "KW_NAMES", "JUMP"),
    *("END_FOR", "LIST_", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "SETUP_ANNOTATIONS"),
    *("NOT_TAKEN",),
)
"""Prefixes of instructions that do not replace the top of the stack."""
LEAVE_OTHERS = ("FOR_ITER", "SEND", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
"""Jumps that leave another stack at their end than where they go on."""
JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
