"""The numbers among the arguments of a call: constants whose values may differ in another call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from onelaunch.call.tree import AnyNumber, Constant, Container, Tree, call_constants

_PLAIN = (tuple, list, dict)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a float or an int, and of no derived class."""
    return type(value) in (float, int)


def with_numbers(tree: Tree, change: Callable[[int, Constant], Constant]) -> Tree:
    """Return a call's tree with each number changed. `change`: returns the constant in place of a
    number, given its position among the numbers in plain containers. A replay finds numbers in
    plain containers alone."""
    count = 0

    def changed(part: Tree) -> Tree:
        nonlocal count
        if isinstance(part, Constant) and (is_number(part.value) or isinstance(part, AnyNumber)):
            count += 1
            return change(count - 1, part)
        if isinstance(part, Container) and part.kind in _PLAIN:
            return part._replace(children=tuple(map(changed, part.children)))
        return part

    return changed(tree)


def numbers_in(tree: Tree) -> list[Constant]:
    """Return the numbers of a call's tree, by position."""
    numbers: list[Constant] = []

    def note(position: int, constant: Constant) -> Constant:
        numbers.append(constant)
        return constant

    with_numbers(tree, note)
    return numbers


def any_number(tree: Tree, positions: Sequence[int]) -> Tree:
    """Return the tree of calls that bring any number at some positions."""

    def change(position: int, constant: Constant) -> Constant:
        if position not in positions or isinstance(constant, AnyNumber):
            return constant
        return AnyNumber(type(constant.value))

    return with_numbers(tree, change)


def number_paths(tree: Tree) -> list[str]:
    """Return the paths of the numbers of a call's tree, as in ``args[0]``."""
    numbers = {id(constant) for constant in numbers_in(tree)}
    return [path for path, constant in call_constants(tree) if id(constant) in numbers]


def numbers_read(tree: Tree) -> list[int]:
    """Return the positions at which a tree stands for any number."""
    return [i for i, constant in enumerate(numbers_in(tree)) if isinstance(constant, AnyNumber)]
