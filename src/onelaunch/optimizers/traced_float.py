"""Numbers of an optimizer that a recording takes from `param_groups` at each call.

A kernel holds a learning rate as it was during the capture, often as part of a larger expression
(``1 - lr * weight_decay``). So the capture is given a `TracedFloat` in its place: a float of a
value that occurs nowhere else, which remembers what is computed from it. The driver finds where the
recorded kernels hold those values, and each call may have others written there. They are the
kernels of eager with the same arguments, so the results are eager's, bit for bit.
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
    """What was computed from some numbers, and which comparisons they decided.

    Attributes:
        values: of every term, the numbers themselves among them, in the capture.
    """

    values: list[float] = field(default_factory=list[float])
    _terms: list[tuple[Compute, Any, Any]] = field(default_factory=list[tuple[Compute, Any, Any]])
    _known: dict[str, int] = field(default_factory=dict[str, int])
    _outcomes: list[tuple[Compute, Any, Any, bool]] = field(
        default_factory=list[tuple[Compute, Any, Any, bool]]
    )
    _leaves: int = 0
    looked_up: bool = False
    """Whether a dict was asked for one: what it gave is not known for others."""

    def number(self, value: float) -> TracedFloat:
        """One more of the numbers that all else is computed from."""
        self._terms.append((_leaf, self._leaves, None))
        self._leaves += 1
        self.values.append(value)
        return TracedFloat.of(value, self, len(self.values) - 1)

    def compute(self, how: Compute, a: Any, b: Any) -> Any:
        """The result of an operation, one of whose operands is a number of this trace."""
        result = how(_plain(a), _plain(b))
        if not isinstance(result, float):
            return result  # a power may be complex
        result = float(result)  # of numpy, as one of the operands
        term = how, self._operand(a), self._operand(b)
        key = repr(term)  # in which 0.0 and -0.0 differ
        if key not in self._known:  # an optimizer may compute it for each parameter anew
            self._known[key] = len(self.values)
            self._terms.append(term)
            self.values.append(result)
        return TracedFloat.of(result, self, self._known[key])

    def decide(self, how: Compute, a: Any, b: Any) -> bool:
        """The outcome of a comparison, which other values must not turn round."""
        result = bool(how(_plain(a), _plain(b)))
        self._outcomes.append((how, self._operand(a), self._operand(b), result))
        return result

    def evaluate(self, numbers: Sequence[float]) -> list[float] | None:
        """Every term for other numbers; None where they would decide a comparison otherwise.

        What is computed with numbers of numpy is computed as they do, in single precision perhaps.
        As many operations as the callable's Python made: 0.2 us each.
        """
        values: list[Any] = []
        if self.looked_up and list(numbers) != [self.values[i] for i in self._places()]:
            return None

        def value(operand: Any) -> Any:
            return values[operand.index] if type(operand) is _Term else operand

        try:
            for how, a, b in self._terms:
                values.append(numbers[a] if how is _leaf else how(value(a), value(b)))
            same = all(bool(how(value(a), value(b))) is was for how, a, b, was in self._outcomes)
            return list(map(float, values)) if same else None
        except (ArithmeticError, TypeError):  # a power may be complex
            return None

    def _places(self) -> list[int]:
        return [i for i, (how, _, _) in enumerate(self._terms) if how is _leaf]

    def leaves(self, index: int) -> set[int]:
        """The numbers, by position, that a term was computed from."""
        how, a, b = self._terms[index]
        if how is _leaf:
            return {a}
        inner = [operand.index for operand in (a, b) if type(operand) is _Term]
        return {leaf for term in inner for leaf in self.leaves(term)}

    def _operand(self, value: Any) -> Any:
        return (
            _Term(value.index)
            if type(value) is TracedFloat and value.trace is self
            else _plain(value)
        )


@dataclass(slots=True, frozen=True)
class _Term:
    index: int


def _plain(value: Any) -> Any:
    return float.__pos__(value) if type(value) is TracedFloat else value


def _leaf(a: Any, b: Any) -> Any:
    """Marks a term that is one of the numbers."""
    raise AssertionError((a, b))


def _negate(a: float, _: None) -> float:
    return -a


def _absolute(a: float, _: None) -> float:
    return abs(a)


def _truth(a: float, _: None) -> bool:
    return bool(a)


def _swapped(how: Compute) -> Compute:
    return lambda a, b: how(b, a)


class TracedFloat(float):
    """A float that notes in its trace what is computed from it. To all else it is a float."""

    __slots__ = ("index", "trace")
    trace: ScalarTrace
    index: int

    @staticmethod
    def of(value: float, trace: ScalarTrace, index: int) -> TracedFloat:
        made = TracedFloat(value)
        made.trace, made.index = trace, index
        return made

    def __hash__(self) -> int:
        """A key of a dict, that other numbers would not find: none of them may stand in for it."""
        self.trace.looked_up = True
        return float.__hash__(self)


def _arithmetic(how: Compute) -> Callable[[TracedFloat, Any], Any]:
    def method(self: TracedFloat, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented  # a tensor takes it as a number
        return self.trace.compute(how, self, other)

    return method


def _comparison(how: Compute) -> Callable[[TracedFloat, Any], Any]:
    def method(self: TracedFloat, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.trace.decide(how, self, other)

    return method


def _single(how: Compute) -> Callable[[TracedFloat], Any]:
    return lambda self: self.trace.compute(how, self, None)


def _itself(self: TracedFloat) -> TracedFloat:
    return self


def _decides(self: TracedFloat) -> bool:
    return self.trace.decide(_truth, self, None)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _how: Compute = getattr(operator, _name)
    setattr(TracedFloat, f"__{_name}__", _arithmetic(_how))
    setattr(TracedFloat, f"__r{_name}__", _arithmetic(_swapped(_how)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(TracedFloat, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name, _method in (
    ("neg", _single(_negate)),
    ("abs", _single(_absolute)),
    ("pos", _itself),
    ("bool", _decides),
):
    setattr(TracedFloat, f"__{_name}__", _method)


_SOME = 0.0137


def unmistakable(value: float, generator: random.Random) -> float:
    """A number near `value`, nearer to zero unless that is zero, that occurs nowhere else.

    In single precision its reciprocal differs from that of itself rounded, as it does for a quarter
    of all numbers: a kernel may hold either, and must be told which.
    """
    number = value
    for _ in range(100):  # beyond the range of single precision there is none
        number = (value or _SOME) * (1 - generator.uniform(0.001, 0.008))
        rounded = _rounded(number)
        if rounded and _rounded(1 / number) != _rounded(1 / rounded):
            break
    return number


def _rounded(value: float) -> float:
    return ctypes.c_float(value).value
