"""A reader of bytecode: the loads and stores of a function, each with a symbol for its object.

`watch` gives the symbols their values when the function has run.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import cast

from onelaunch.frames.operands import JUMPS, LEAVE_OTHERS, OperandStack, is_slice
from onelaunch.frames.stack import (
    MEMBER,
    UNKNOWN,
    Load,
    Loads,
    Symbol,
    Use,
    summed_up,
    without_offset,
)
from onelaunch.identity import id


@functools.lru_cache(maxsize=16384)
def loads_of(code: types.CodeType) -> Loads:
    """Read a function's code. Costs about 10 us for each of its lines, once."""
    return _Reader(code).read()


class _Reader(OperandStack):
    """A reader that follows the stack through a function's instructions, in their order."""

    def __init__(self, code: types.CodeType) -> None:
        super().__init__()
        self._steps = list(dis.get_instructions(code))
        self._loads: list[Load] = []
        self._summary = Loads(
            free=frozenset(code.co_freevars) | frozenset(code.co_cellvars),
            cleared=frozenset(s.argval for s in self._steps if s.opname in _CLEARS),
            offsets=[step.offset for step in self._steps],
        )
        self._first = Symbol("variable", key=code.co_varnames[0]) if code.co_varnames else UNKNOWN
        self._stored = {s.argval for s in self._steps if s.opname in _STORES}
        self._assigned_at: dict[str, list[int]] = {}
        """variable -> the offsets of its assignments."""
        self._assigned_inside = _assigned_inside(code)
        self._stores_items = any(s.opname in _STORES_ITEMS for s in self._steps)
        self._branch_end = 0
        """The end of the last branch so far. A run may skip the instructions before it."""
        self._returned = False
        self._counters: dict[int, Symbol] = {}
        self._stores: Counter[Symbol] = Counter()
        self._loaded: set[Symbol] = set()
        self._always_stored: set[Symbol] = set()
        """Places that were stored before any load, whichever branches ran."""

    def read(self) -> Loads:
        for index, step in enumerate(self._steps):
            if step.offset in self._at:
                self._stack = self._joined(self._stack, self._at.pop(step.offset))
            handler = _HANDLERS.get(step.opname)
            if handler is not None:
                handler(self, step, index)
            else:
                self._other(step)
            if step.opcode in JUMPS and isinstance(step.argval, int):
                if step.argval < step.offset:
                    self._summary.backward.append((step.offset, step.argval))
                if step.opname not in LEAVE_OTHERS:
                    self._jump(step, self._stack)
                self._branch_end = max(self._branch_end, step.argval)
            self._returned |= step.opname.startswith("RETURN")
            if step.opname in _ENDS:
                self._stack = []
        self._summary.inside = frozenset(self._assigned_inside)
        self._summary.once = frozenset(filter(self._is_assigned_once, self._assigned_at))
        counted = Counter(self._counters.values())
        for number, counter in self._counters.items():
            if counted[counter] != self._stores[counter]:  # something else is stored there, too
                self._loads[number] = Load(self._loads[number].place)
        for number in self._unescaped.values():
            place = self._loads[number].place
            if id(place) in self._indexed:
                self._loads[number] = Load(place, Use.ITEMS)
        return summed_up(self._summary, self._loads)

    def _is_assigned_once(self, name: str) -> bool:
        (first, *others), summary = self._assigned_at[name], self._summary
        again = others or any(to <= first < source for source, to in summary.backward)
        return not (again or name in summary.cleared or name in self._assigned_inside)

    def _note(self, place: Symbol, index: int) -> None:
        items = place.kind == "item"
        may_grow = self._stores_items if items else place.key in self._stored
        use, bare = Use.READ, without_offset(place)
        self._loaded.add(bare)
        if bare in self._always_stored:
            use = Use.NONE
        elif self._steps[index + 1].argval in _GROWING:
            use = Use.GROWS
        elif may_grow and _only_counts(self._steps, index, place.key, items):
            use = Use.GROWS  # if it is this place that is stored
            self._counters[len(self._loads)] = bare
        self._loads.append(Load(place, use))
        if use is Use.READ:
            self._unescaped[id(place)] = len(self._loads) - 1

    def _store(self, place: Symbol, step: dis.Instruction) -> None:
        self._loads.append(Load(place, stores=True))
        bare = without_offset(place)
        self._stores[bare] += 1
        if step.offset >= self._branch_end:
            if bare not in self._loaded:
                self._always_stored.add(bare)
            if not self._returned:
                self._summary.sure.append((step.offset, place))

    # The instructions that matter, by the place that they load.

    def constant(self, step: dis.Instruction, index: int) -> None:
        self._stack.append(Symbol("constant", key=step.argval))

    def variable(self, step: dis.Instruction, index: int) -> None:
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        for name in names:
            symbol = Symbol("variable", key=name)
            self._stack.append(symbol)
            if name in self._summary.free and "DEREF" in step.opname:
                self._note(symbol, index)  # and not its cell, for a function inside

    def store_variable(self, step: dis.Instruction, index: int) -> None:
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        for position, name in enumerate(names):
            if position and step.opname == "STORE_FAST_LOAD_FAST":
                self._stack.append(Symbol("variable", key=name))
                continue
            self._summary.assigned.setdefault(name, []).append(self._pop())
            self._assigned_at.setdefault(name, []).append(step.offset)
            if name in self._summary.free and step.opname == "STORE_DEREF":
                self._store(Symbol("variable", key=name), step)

    def variable_or_name(self, step: dis.Instruction, index: int) -> None:
        """Note a name in the body of a class, which may be one of the class's own."""
        self._pop()
        if step.opname == "LOAD_FROM_DICT_OR_DEREF":
            self.variable(step, index)
        else:
            self.global_(step, index)

    def global_(self, step: dis.Instruction, index: int) -> None:
        symbol = Symbol("global", key=step.argval)
        null = step.opname == "LOAD_GLOBAL" and (step.arg or 0) & 1
        self._note(symbol, index)
        if null and sys.version_info < (3, 13):
            self._stack += [UNKNOWN, symbol]
        elif null:
            self._stack += [symbol, UNKNOWN]
        else:
            self._stack.append(symbol)

    def store_global(self, step: dis.Instruction, index: int) -> None:
        self._pop()
        self._store(Symbol("global", key=step.argval), step)

    def attribute(self, step: dis.Instruction, index: int) -> None:
        base = self._pop()
        method = step.opname == "LOAD_METHOD" or (
            sys.version_info >= (3, 12) and (step.arg or 0) & 1
        )
        symbol = self._attribute(base, step.argval, step.offset, index)
        self._stack += [symbol, base] if method else [symbol]

    def _attribute(self, base: Symbol, name: str, offset: int, index: int) -> Symbol:
        if name == "__dict__":
            return self._namespace(base, index)
        symbol = Symbol("attribute", base, name, offset=offset)
        self._note(symbol, index)
        return symbol

    def _namespace(self, base: Symbol, index: int) -> Symbol:
        """Return the symbol of an object's `__dict__`. It is opaque unless a known name follows."""
        first, second = self._steps[index + 1 : index + 3]
        if first.opname == "CONTAINS_OP":
            named = bool(self._stack) and self._stack[-1].kind == "constant"
        elif first.argval == "get":
            named = second.opname == "LOAD_CONST"
        else:
            by_key = _is_subscript(second) or second.opname.endswith("_SUBSCR")
            named = first.opname == "LOAD_CONST" and by_key
        if not named:
            self._summary.opaque.append(base)
        return Symbol("namespace", base)

    def super_attribute(self, step: dis.Instruction, index: int) -> None:
        *_, base = self._pops(3)
        symbol = self._attribute(base, step.argval, step.offset, index)
        self._stack += [symbol, base] if (step.arg or 0) & 1 else [symbol]

    def store_attribute(self, step: dis.Instruction, index: int) -> None:
        base = self._pop()
        self._pop()
        self._store(Symbol("attribute", base, step.argval), step)

    def item(self, step: dis.Instruction, index: int) -> None:
        key = self._pop()
        if is_slice(key):
            self._slice(step, index)
            return
        base = self._pop(indexed=key.kind == "constant")
        symbol = _item(base, key, step.offset)
        self._note(symbol, index)
        self._stack.append(symbol)

    def slice_(self, step: dis.Instruction, index: int) -> None:
        self._pops(2)
        self._slice(step, index)

    def _slice(self, step: dis.Instruction, index: int) -> None:
        """Note `layers[1:]`, a container of elements of another."""
        base = self._pop()
        self._note(Symbol("item", base, parts=(UNKNOWN,), offset=step.offset), index)
        element = Symbol("element", base, offset=step.offset)
        self._stack.append(Symbol("parts", parts=(element,), offset=step.offset))

    def operator(self, step: dis.Instruction, index: int) -> None:
        if _is_subscript(step):
            self.item(step, index)
        else:
            self._other(step)

    def contains(self, step: dis.Instruction, index: int) -> None:
        """Note `"scale" in layer.__dict__`."""
        key, place = self._pops(2)
        self._note(_item(place, key, step.offset, MEMBER), index)
        self._stack.append(UNKNOWN)

    def store_item(self, step: dis.Instruction, index: int) -> None:
        key = self._pop()
        base = self._pop(indexed=key.kind == "constant")
        self._pop()
        self._store(_item(base, key), step)

    def store_slice(self, step: dis.Instruction, index: int) -> None:
        _, base, *_ = self._pops(4)
        self._store(Symbol("item", base, parts=(UNKNOWN,)), step)

    def unpack(self, step: dis.Instruction, index: int) -> None:
        base = self._pop()
        count = step.arg or 0
        if base.kind == "parts" and len(base.parts) == count:
            self._stack += base.parts[::-1]
        else:
            if step.opname == "UNPACK_EX":  # `first, *rest = layers`
                count = (count & 0xFF) + (count >> 8) + 1
            self._stack += [Symbol("element", base, offset=step.offset)] * count

    def matched(self, step: dis.Instruction, index: int) -> None:
        """Note `case Layer(scale=scale)`, or a pattern by position."""
        base, _, names = self._pops(3)
        if step.arg:
            self._summary.opaque.append(base)
        keys: tuple[str, ...] = names.key if isinstance(names.key, tuple) else ()
        values = [self._attribute(base, key, step.offset, index) for key in keys]
        self._stack.append(Symbol("parts", parts=(*[UNKNOWN] * (step.arg or 0), *values)))

    def matched_keys(self, step: dis.Instruction, index: int) -> None:
        """Note `case {"scale": scale}`."""
        base, names = self._stack[-2:] if len(self._stack) > 1 else (UNKNOWN, UNKNOWN)
        if names.kind == "constant" and isinstance(names.key, tuple):
            keys = [Symbol("constant", key=key) for key in cast(tuple[object, ...], names.key)]
        else:
            keys = list(names.parts) if names.kind == "parts" else [UNKNOWN]
        values = [Symbol("item", base, parts=(key,), offset=step.offset) for key in keys]
        for place in values:
            self._note(place, index)
        self._stack.append(Symbol("parts", parts=tuple(values)))

    def imported(self, step: dis.Instruction, index: int) -> None:
        level, _ = self._pops(2)
        symbol = Symbol("module", key=step.argval, parts=(level,), offset=step.offset)
        self._summary.calls.append(symbol)
        self._stack.append(symbol)

    def imported_from(self, step: dis.Instruction, index: int) -> None:
        base = self._stack[-1] if self._stack else UNKNOWN
        self._stack.append(self._attribute(base, step.argval, step.offset, index))

    def call(self, step: dis.Instruction, index: int) -> None:
        if step.opname == "CALL_KW":
            self._pop()
        arguments = self._pops((step.arg or 0) + 2)
        self._called(arguments[:2], arguments[2:], index)

    def intrinsic(self, step: dis.Instruction, index: int) -> None:
        if step.argrepr != "INTRINSIC_LIST_TO_TUPLE":  # of spread arguments, from 3.12 on
            self._other(step)

    def call_spread(self, step: dis.Instruction, index: int) -> None:
        count = 4 if sys.version_info >= (3, 14) else 3 + ((step.arg or 0) & 1)
        *front, spread, first = self._pops(count) if count == 4 else (*self._pops(3), None)
        function = next((s for s in front if s.kind != "unknown"), UNKNOWN)
        # Any of the first arguments may be any of the elements; a method has its object, too.
        each = Symbol("element", spread, offset=step.offset)
        arguments = [each, each, each] if first is None else [each, each, each, first]
        self._called([function, function.base or UNKNOWN], arguments, index)

    def _called(self, front: list[Symbol], arguments: Iterable[Symbol], index: int) -> None:
        # The callable, and NULL or the object whose method it is.
        first, second = front
        told = [s for s in front if s.kind != "unknown"]
        if len(told) == 2:
            function, arguments = first, (second, *arguments)
        else:
            function = told[0] if told else UNKNOWN
        arguments = tuple(arguments)
        if function.kind == "global" and function.key == "super" and len(arguments) != 1:
            # Attributes of `super()` are attributes of the object. 3.12 has an instruction for it.
            self._stack.append(arguments[1] if arguments else self._first)
            return
        offset, base = self._steps[index].offset, function.base
        if function.kind == "global" and function.key == "vars" and len(arguments) == 1:
            self._stack.append(self._namespace(arguments[0], index)._replace(offset=offset))
            return
        symbol = Symbol("call", function, parts=arguments, offset=offset)
        if function.kind == "attribute" and base and function.key in _PUTS:
            given = [s for s in arguments if s is not base]
            if function.key in _PUTS_EACH:
                given = [Symbol("element", s, offset=offset) for s in given]
            self._summary.grown.setdefault(without_offset(base), []).extend(given)
        if function.key == "get" and base and base.kind == "namespace" and base.base:
            item = _item(base, arguments[1] if len(arguments) > 1 else UNKNOWN, offset)
            if item.kind == "attribute":
                self._note(item, index)
                symbol = Symbol("either", parts=(item, *arguments[2:]))
            else:
                self._summary.opaque.append(base.base)
        if symbol.kind == "call":
            self._summary.calls.append(symbol)
        self._stack.append(symbol)


def _item(base: Symbol, key: Symbol, offset: int = -1, member: str | None = None) -> Symbol:
    """Return the symbol of an item. Those of an object's `__dict__` are its attributes."""
    if base.kind == "namespace" and key.kind == "constant" and base.base is not None:
        return Symbol("attribute", base.base, key.key, offset=offset)
    return Symbol("item", base, member, (key,), offset)


def _assigned_inside(code: types.CodeType) -> set[str]:
    """Return the variables of a function that functions inside may assign."""
    names: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and constant.co_freevars:
            names |= _assigned_inside(constant)
            if not _ASSIGNS_FREE.isdisjoint(constant.co_code[::2]):
                steps = dis.get_instructions(constant)
                names |= {step.argval for step in steps if step.opcode in _ASSIGNS_FREE}
    return names


def _is_subscript(step: dis.Instruction) -> bool:
    """Return whether an instruction gives an item. Python 3.14 has an operator for it."""
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _only_counts(steps: list[dis.Instruction], start: int, name: str, items: bool) -> bool:
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
        if not items and step.opname in _STORES:
            return computed and above <= 0 and step.argval == name
        if step.opname == "BINARY_OP" and not _is_subscript(step):
            if step.argrepr not in ("+", "+=", "-="):
                return False
            computed = True
        elif not (_is_subscript(step) or step.opname.startswith(_PASSES)):
            return False
    return False


_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME")
_CALLS = ("CALL", "PRECALL", "PUSH_NULL", "KW_NAMES")
_PASSES = ("LOAD_", "SWAP", "COPY", "CACHE", *_CALLS)
"""Prefixes of instructions between the read and the store of an assignment such as `n += k`."""
_BY_SWAP = ("SWAP", "STORE_ATTR", "STORE_SUBSCR")
"""Instructions after a swap in such an assignment."""
_ASSIGNS_FREE = {dis.opmap["STORE_DEREF"], dis.opmap["DELETE_DEREF"]}
_GROWING = frozenset({"append", "extend", "appendleft", "add", "update", "insert"})
"""Methods that make a container grow."""
_PUTS_EACH = frozenset({"extend", "extendleft", "update"})
_PUTS = _PUTS_EACH | {"append", "appendleft", "add", "insert", "put", "setdefault"}
"""Methods that put their arguments, or the elements of these, into a container."""
_CLEARS = ("DELETE_FAST", "DELETE_DEREF", "DELETE_NAME", "LOAD_FAST_AND_CLEAR")
_STORES_ITEMS = ("STORE_SUBSCR", "STORE_SLICE")
_ENDS = frozenset(
    (
        *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD"),
        *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT"),
    )
)

_Handler = Callable[[_Reader, dis.Instruction, int], None]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), _Reader.constant),
    **dict.fromkeys(
        (
            *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST"),
            *("LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_DEREF"),
            *("LOAD_CLASSDEREF", "LOAD_CLOSURE"),
        ),
        _Reader.variable,
    ),
    **dict.fromkeys(
        ("STORE_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_DEREF"),
        _Reader.store_variable,
    ),
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME"), _Reader.global_),
    **dict.fromkeys(
        ("LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF"), _Reader.variable_or_name
    ),
    **dict.fromkeys(("STORE_GLOBAL", "STORE_NAME"), _Reader.store_global),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), _Reader.attribute),
    "LOAD_SUPER_ATTR": _Reader.super_attribute,
    "STORE_ATTR": _Reader.store_attribute,
    "BINARY_SUBSCR": _Reader.item,
    "BINARY_OP": _Reader.operator,
    "BINARY_SLICE": _Reader.slice_,
    "BUILD_SLICE": _Reader.made_slice,
    "STORE_SLICE": _Reader.store_slice,
    "STORE_SUBSCR": _Reader.store_item,
    "CONTAINS_OP": _Reader.contains,
    **dict.fromkeys(
        ("GET_ITER", "GET_YIELD_FROM_ITER", "GET_AWAITABLE", "PRECALL", "KW_NAMES"),
        _Reader.unchanged,
    ),
    "FOR_ITER": _Reader.next_,
    **dict.fromkeys(("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"), _Reader.jump_or_pop),
    **dict.fromkeys(("UNPACK_SEQUENCE", "UNPACK_EX"), _Reader.unpack),
    "SEND": _Reader.send,
    "END_SEND": _Reader.sent,
    **dict.fromkeys(("BEFORE_WITH", "BEFORE_ASYNC_WITH"), _Reader.entered),
    "LOAD_SPECIAL": _Reader.special,
    "MATCH_CLASS": _Reader.matched,
    "MATCH_KEYS": _Reader.matched_keys,
    **dict.fromkeys(("BUILD_TUPLE", "BUILD_LIST", "BUILD_SET"), _Reader.parts),
    **dict.fromkeys(("LIST_EXTEND", "SET_UPDATE"), _Reader.extended),
    **dict.fromkeys(("LIST_APPEND", "SET_ADD", "MAP_ADD"), _Reader.append),
    "COPY": _Reader.copy,
    "SWAP": _Reader.swap,
    "IMPORT_NAME": _Reader.imported,
    "IMPORT_FROM": _Reader.imported_from,
    **dict.fromkeys(("CALL", "CALL_KW"), _Reader.call),
    "CALL_FUNCTION_EX": _Reader.call_spread,
    "CALL_INTRINSIC_1": _Reader.intrinsic,
}
