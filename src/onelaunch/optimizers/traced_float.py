"""Traced floats: numbers of an optimizer that a recording follows from call to call.

A kernel holds a learning rate as it was during the capture, often in a larger expression
(``1 - lr * weight_decay``). So the capture gets a `TracedFloat` in its place: a float whose value
occurs nowhere else, and which notes what is computed from it. The driver finds these values in the
recorded kernels, and each call can write others there. The kernels and arguments are eager's, so
the results are eager's, bit for bit.
"""

from __future__ import annotations

import ctypes
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Compute = Callable[[Any, Any], Any]


@dataclass(slots=True)
class ScalarTrace:
    """A trace of the terms computed from some numbers, and of the comparisons that they decided.

    Attributes:
        values: the value of every term in the capture, the numbers among them.
    """

    values: list[float] = field(default_factory=list)
    _terms: list[tuple[Compute, Any, Any]] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)
    _outcomes: list[tuple[Compute, Any, Any, bool]] = field(default_factory=list)
    _leaves: int = 0
    looked_up: bool = False
    """True if a number was a key of a dict: the result for other numbers is unknown."""

    def number(self, value: float) -> TracedFloat:
        """Add a number from which terms are computed."""
        return TracedFloat.of(value, self, self.leaf(value))

    def leaf(self, value: float) -> int:
        """Add a number from which terms are computed, and return its position among the terms."""
        self._terms.append((_leaf, self._leaves, None))
        self._leaves += 1
        self.values.append(value)
        return len(self.values) - 1

    def compute(self, operation: Compute, a: Any, b: Any) -> Any:
        """Return the result of an operation, one of whose operands is a number of this trace."""
        result = operation(_plain(a), _plain(b))
        if not isinstance(result, float):
            return result  # a power may be complex
        result = float(result)  # a NumPy number, if an operand is one
        index = self.term(operation, self._operand(a), self._operand(b), result)
        return TracedFloat.of(result, self, index)

    def term(self, operation: Compute, a: Any, b: Any, value: float) -> int:
        """Note a result, and return its position; operands are plain numbers and `Term`s."""
        term = operation, a, b
        key = repr(term)  # in which 0.0 and -0.0 differ
        if key not in self._known:  # an optimizer may compute it for each parameter anew
            self._known[key] = len(self.values)
            self._terms.append(term)
            self.values.append(value)
        return self._known[key]

    def decide(self, operation: Compute, a: Any, b: Any) -> bool:
        """Return the outcome of a comparison, which other numbers must not change."""
        result = bool(operation(_plain(a), _plain(b)))
        self.decided(operation, self._operand(a), self._operand(b), result)
        return result

    def decided(self, operation: Compute, a: Any, b: Any, outcome: bool) -> None:
        """Note the outcome of a comparison; operands as in `term`."""
        self._outcomes.append((operation, a, b, outcome))

    def evaluate(self, numbers: Sequence[float]) -> list[float] | None:
        """Return every term for other numbers; None if they would change a comparison.

        Terms with NumPy numbers are computed as NumPy does, perhaps in single precision. As many
        operations as the callable's Python made: 0.2 us each.
        """
        terms = self.evaluated(numbers)
        try:
            return None if terms is None else list(map(float, terms))
        except (ArithmeticError, TypeError):  # a power may be complex
            return None

    def evaluated(self, numbers: Sequence[float]) -> list[Any] | None:
        """Return the same, integers and all."""
        values: list[Any] = []
        if self.looked_up and list(numbers) != [self.values[i] for i in self._places()]:
            return None

        def value(operand: Any) -> Any:
            return values[operand.index] if type(operand) is Term else operand

        try:
            for operation, a, b in self._terms:
                values.append(numbers[a] if operation is _leaf else operation(value(a), value(b)))
            unchanged = all(
                bool(operation(value(a), value(b))) is was
                for operation, a, b, was in self._outcomes
            )
            return values if unchanged else None
        except (ArithmeticError, TypeError):
            return None

    def _places(self) -> list[int]:
        return [i for i, (operation, _, _) in enumerate(self._terms) if operation is _leaf]

    def leaves(self, index: int) -> set[int]:
        """Return the numbers, by position, that a term was computed from."""
        operation, a, b = self._terms[index]
        if operation is _leaf:
            return {a}
        inner = [operand.index for operand in (a, b) if type(operand) is Term]
        return {leaf for term in inner for leaf in self.leaves(term)}

    def _operand(self, value: Any) -> Any:
        return (
            Term(value.index)
            if type(value) is TracedFloat and value.trace is self
            else _plain(value)
        )


@dataclass(slots=True, frozen=True)
class Term:
    """An operand that is a term itself."""

    index: int


def _plain(value: Any) -> Any:
    return float.__pos__(value) if type(value) is TracedFloat else value


def _leaf(a: Any, b: Any) -> Any:
    """Mark a term that is one of the numbers."""
    raise AssertionError((a, b))


def _negate(a: float, _: None) -> float:
    return -a


def _absolute(a: float, _: None) -> float:
    return abs(a)


def _truth(a: float, _: None) -> bool:
    return bool(a)


def swapped(operation: Compute) -> Compute:
    """Return an operation that takes its operands the other way round."""
    return lambda a, b: operation(b, a)


class TracedFloat(float):
    """A float that notes in its trace what is computed from it; otherwise a plain float."""

    __slots__ = ("index", "trace")
    trace: ScalarTrace
    index: int

    @staticmethod
    def of(value: float, trace: ScalarTrace, index: int) -> TracedFloat:
        made = TracedFloat(value)
        made.trace, made.index = trace, index
        return made

    def __hash__(self) -> int:
        """Note the use as a key of a dict: the lookup would fail for any other number."""
        self.trace.looked_up = True
        return float.__hash__(self)


def _arithmetic(operation: Compute) -> Callable[[TracedFloat, Any], Any]:
    def method(self: TracedFloat, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented  # a tensor takes it as a number
        return self.trace.compute(operation, self, other)

    return method


def _comparison(operation: Compute) -> Callable[[TracedFloat, Any], Any]:
    def method(self: TracedFloat, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.trace.decide(operation, self, other)

    return method


def _single(operation: Compute) -> Callable[[TracedFloat], Any]:
    return lambda self: self.trace.compute(operation, self, None)


def _itself(self: TracedFloat) -> TracedFloat:
    return self


def _decides(self: TracedFloat) -> bool:
    return self.trace.decide(_truth, self, None)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _how: Compute = getattr(operator, _name)
    setattr(TracedFloat, f"__{_name}__", _arithmetic(_how))
    setattr(TracedFloat, f"__r{_name}__", _arithmetic(swapped(_how)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(TracedFloat, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name, _method in (
    ("neg", _single(_negate)),
    ("abs", _single(_absolute)),
    ("pos", _itself),
    ("bool", _decides),
):
    setattr(TracedFloat, f"__{_name}__", _method)


_NEAR_ZERO = 0.0137


def unmistakable(value: float, generator: random.Random) -> float:
    """Return a number near `value` that occurs nowhere else; nearer to zero unless that is zero.

    Rounded to single precision, its reciprocal differs from the reciprocal of the rounded number,
    as it does for a quarter of all numbers: a kernel may hold either, so they must not be equal.
    """
    number = value
    for _ in range(100):  # beyond the range of single precision there is none
        number = (value or _NEAR_ZERO) * (1 - generator.uniform(0.001, 0.008))
        rounded = _rounded(number)
        if rounded and _rounded(1 / number) != _rounded(1 / rounded):
            break
    return number


def _rounded(value: float) -> float:
    return ctypes.c_float(value).value
