"""What a run computes from numbers, so that each call can compute it from others."""

from __future__ import annotations

import ctypes
import operator
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from onelaunch.optimizers.capturable import is_real

Compute = Callable[[Any, Any], Any]
Computed = Callable[..., tuple[Any, ...] | None]
Step = int | Callable[[Any], Any]
"""An amount that is added to a number, or a function of the number."""

_SIGNS: dict[Compute, str] = {
    getattr(operator, name): sign
    for name, sign in zip(
        ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne"),
        ("+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!="),
        strict=True,
    )
}
"""Operations that are computed without a call."""
_TIGHTEST: dict[tuple[Compute, bool], Compute] = {
    (operation, outcome): min if outcome is (operation in (operator.lt, operator.le)) else max
    for operation in (operator.lt, operator.le, operator.gt, operator.ge)
    for outcome in (True, False)
}
"""A comparison and its outcome -> the choice between two bounds of a number."""


@dataclass(slots=True, frozen=True)
class Term:
    """An operand that is a term itself."""

    index: int


@dataclass(slots=True, eq=False)
class ScalarTrace:
    """A trace of the terms computed from some numbers, and of the comparisons that they decided."""

    values: list[Any] = field(default_factory=list)
    """The value of every term in the run, the numbers among them."""
    _terms: list[tuple[Compute, Any, Any]] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)
    _outcomes: dict[str, tuple[Compute, Any, Any, bool]] = field(default_factory=dict)
    leaf_values: list[Any] = field(default_factory=list)
    """The numbers from which terms are computed."""

    def leaf(self, value: float) -> int:
        """Add a number from which terms are computed, and return its position among the terms."""
        self._terms.append((_leaf, len(self.leaf_values), None))
        self.leaf_values.append(value)
        self.values.append(value)
        return len(self.values) - 1

    def term(self, operation: Compute, a: Any, b: Any, value: Any) -> int:
        """Note a result, and return its position; operands are plain numbers and `Term`s."""
        term = operation, a, b
        key = repr(term)  # in which 0.0 and -0.0 differ
        if key not in self._places:  # an optimizer may compute it for each parameter anew
            self._places[key] = len(self.values)
            self._terms.append(term)
            self.values.append(value)
        return self._places[key]

    def decided(self, operation: Compute, a: Any, b: Any, outcome: bool) -> None:
        """Note the outcome of a comparison, which other numbers must not change; operands as in
        `term`. Of several bounds of a term the tightest is kept."""
        tightest = None if type(b) is Term or b != b else _TIGHTEST.get((operation, outcome))
        key = repr((operation, a, outcome, tightest or b))
        known = self._outcomes.get(key)
        if tightest is not None and known is not None:
            b = tightest(known[2], b)
        self._outcomes[key] = operation, a, b, outcome

    def compiled(
        self,
        terms: Sequence[int],
        constant: Collection[int] = (),
        kinds: Sequence[type | None] = (),
    ) -> Computed:
        """Return a function of other numbers that returns the values of some terms. It returns None
        if the numbers would change a comparison, or if a term has no value for them. Costs 0.03 us
        for each operation that the callable's Python made. `constant`: the numbers, by position,
        that keep their values and are not passed. `kinds`: the type that each number must have;
        None: any type of numbers."""
        source = _Source()
        computed, operand = source.computed, source.operand
        leaves = {at: term[1] for at, term in enumerate(self._terms) if term[0] is _leaf}
        parameters = ", ".join(f"t{at}" for at, leaf in leaves.items() if leaf not in constant)
        lines = [f"def computed({parameters}):", " try:"]
        for (at, leaf), kind in zip(leaves.items(), kinds, strict=False):
            right = f"is_real(t{at})" if kind is None else f"type(t{at}) is {kind.__name__}"
            if leaf not in constant:
                lines += [f"  if not {right}:", "   return None"]
        for at, term in enumerate(self._terms):
            if at not in leaves:
                lines.append(f"  t{at} = {computed(*term)}")
            elif leaves[at] in constant:
                lines.append(f"  t{at} = {operand(self.leaf_values[leaves[at]])}")
        for *compared, was in self._outcomes.values():
            lines += [f"  if {'not ' if was else ''}{computed(*compared)}:", "   return None"]
        lines.append(f"  return ({''.join(f't{at}, ' for at in terms)})")
        lines += [" except (ArithmeticError, TypeError):", "  return None"]
        return source.function(lines)

    def function(self, term: int) -> Callable[[Any], Any]:
        """Return a function of the one number that a term is computed from: 0.1 us."""
        source, needed, waiting = _Source(), {term}, [term]
        while waiting:
            _, a, b = self._terms[waiting.pop()]
            new = {o.index for o in (a, b) if type(o) is Term} - needed
            needed |= new
            waiting += new
        lines: list[str] = []
        for at in sorted(needed):
            leaf = self._terms[at][0] is _leaf
            value = source.computed(*self._terms[at]) if not leaf else "number"
            lines.append(f" t{at} = {value}")
        return source.function(["def computed(number):", *lines, f" return t{term}"])

    def leaves(self, index: int) -> set[int]:
        """Return the numbers, by position, that a term was computed from."""
        operation, a, b = self._terms[index]
        if operation is _leaf:
            return {a}
        inner = [operand.index for operand in (a, b) if type(operand) is Term]
        return {leaf for term in inner for leaf in self.leaves(term)}


class _Source:
    """The text of a function of numbers, and the constants in it."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"is_real": is_real}

    def operand(self, value: Any) -> str:
        if type(value) is Term:
            return f"t{value.index}"
        self._names[f"c{len(self._names)}"] = value
        return f"c{len(self._names) - 1}"

    def computed(self, operation: Compute, a: Any, b: Any) -> str:
        sign = _SIGNS.get(operation)
        if sign is not None:
            return f"({self.operand(a)} {sign} {self.operand(b)})"
        return f"{self.operand(operation)}({self.operand(a)}, {self.operand(b)})"

    def function(self, lines: Sequence[str]) -> Any:
        exec("\n".join(lines), self._names)
        return self._names["computed"]


def _leaf(a: Any, b: Any) -> Any:
    """Mark a term that is one of the numbers."""
    raise AssertionError((a, b))


def swapped(operation: Compute) -> Compute:
    """Return an operation that takes its operands the other way round."""
    return lambda a, b: operation(b, a)


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
