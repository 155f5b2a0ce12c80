"""The stand-in for a number in a run, and what it notes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onelaunch.capture.scalar_trace import Term, swapped
from onelaunch.frames.reads import StandIn
from onelaunch.optimizers.capturable import is_real

if TYPE_CHECKING:
    from onelaunch.capture.numbers import NumberStandIns


class Node:
    """The inside of a stand-in, which torch hands on by itself; it asks this for the value.

    Attributes:
        moved: what was added to the number, if the callable moves it on; else None.
    """

    __slots__ = ("__weakref__", "moved", "numbers", "term", "value")

    def __init__(
        self, numbers: NumberStandIns, term: int, value: float, moved: int | None = None
    ) -> None:
        self.numbers, self.term, self.value, self.moved = numbers, term, value, moved

    def plain(self) -> Any:
        """Return the value, which is then not followed."""
        self.numbers.escape(self.term)
        return self.value

    def moves_with(self, other: Node) -> bool:
        """Return whether another number is the same one, moved on."""
        leaves = self.numbers.trace.leaves
        return leaves(self.term) == leaves(other.term)

    def guard_float(self, file: str, line: int) -> float:
        """Return the value to torch."""
        return self.numbers.handed(self)

    def __getattr__(self, name: str) -> Any:
        self.plain()
        raise AttributeError(name)

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False


def node_of(value: Any) -> Node | None:
    """Return the node of a stand-in, whose class torch may have changed; None for another value."""
    if isinstance(value, torch.SymFloat):
        node: Any = value.node
        return node if type(node) is Node else None
    return None


class Number(StandIn, torch.SymFloat):
    """A number that notes what is computed from it; to Python code a float, or an int.

    It is no subclass of float: C code would read the value of a subclass unnoticed. It is of the
    class for which torch has symbolic numbers.
    """

    node: Node

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.node.value)

    def asked(self, function: object) -> None:
        if function is type:
            self.node.numbers.give_up(self.node.term)
        else:
            self.node.numbers.fix_kinds(self.node.term)

    def fixed(self) -> Any:
        return self.node.plain()

    def __bool__(self) -> bool:
        return _decided(self, operator.ne, 0)


def _value(value: Any) -> Any:
    return value.node.value if type(value) is Number else value


def _term(value: Any) -> Any:
    return Term(value.node.term) if type(value) is Number else value


def _computed(number: Number, operation: Callable[[Any, Any], Any], other: Any) -> Any:
    if _is_counted(number) or _is_counted(other):
        if operation in (operator.add, operator.sub) and type(other) is int:
            return number.node.numbers.incremented(number.node, operation(0, other))
        return operation(_plain(number), _plain(other))
    try:
        result = operation(number.node.value, _value(other))
    except Exception:  # other numbers may raise none, and go another way
        _read_all(number, other)
        raise
    if not is_real(result):  # a power may be complex
        _read_all(number, other)
        return result
    numbers = number.node.numbers
    term = numbers.trace.term(operation, Term(number.node.term), _term(other), result)
    return numbers.stand_in(term, result)


def _is_counted(value: Any) -> bool:
    return type(value) is Number and value.node.moved is not None


def _decided(number: Number, compare: Callable[[Any, Any], Any], other: Any) -> bool:
    outcome = bool(compare(number.node.value, _value(other)))
    trace = number.node.numbers.trace
    trace.decided(compare, Term(number.node.term), _term(other), outcome)
    return outcome


def _plain(value: Any) -> Any:
    return value.node.plain() if type(value) is Number else value


def _read_all(*values: Any) -> None:
    for value in values:
        _plain(value)


def _binary(operation: Callable[[Any, Any], Any], then: Callable[..., Any]) -> Any:
    def method(self: Number, other: Any) -> Any:
        if type(other) is Number or issubclass(type(other), Real):
            return then(self, operation, other)
        if isinstance(other, Tensor):
            return NotImplemented  # which takes it as a number
        return operation(_plain(self), other)

    return method


def _unary(operation: Callable[[Any], Any]) -> Any:
    def computed(a: Any, _: None) -> Any:
        return operation(a)

    def method(self: Number) -> Any:
        return _computed(self, computed, None)

    return method


def _read(operation: Callable[..., Any]) -> Any:
    def method(self: Number, *others: Any) -> Any:
        return operation(_plain(self), *map(_plain, others))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _how: Any = getattr(operator, _name)
    _reversed: Any = _how if _name == "add" else swapped(_how)
    setattr(Number, f"__{_name}__", _binary(_how, _computed))
    setattr(Number, f"__r{_name}__", _binary(_reversed, _computed))
for _name in ("lshift", "rshift", "and_", "or_", "xor"):
    _how = getattr(operator, _name)
    _name = _name.strip("_")
    setattr(Number, f"__{_name}__", _read(_how))
    setattr(Number, f"__r{_name}__", _read(swapped(_how)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _binary(getattr(operator, _name), _decided))
for _name in ("neg", "abs"):
    setattr(Number, f"__{_name}__", _unary(getattr(operator, _name)))
for _name, _how in (
    *(("divmod", divmod), ("rdivmod", swapped(divmod)), ("round", round), ("format", format)),
    *(("int", int), ("float", float), ("complex", complex), ("index", operator.index)),
    *(("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)),
    *(("hash", hash), ("repr", repr), ("str", str), ("invert", operator.invert)),
):
    setattr(Number, f"__{_name}__", _read(_how))
