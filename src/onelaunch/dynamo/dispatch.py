"""The choice of a program by the objects among the arguments: in C, where there is a compiler."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any, Protocol

from onelaunch.native import FAILURES, compiled

Run = Callable[..., Any]
Choice = tuple[bytes, tuple[object, ...], bytes, Run]
"""(fixed places, their objects, moving places, a function of the arguments there); see `choice`."""


class Dispatch(Protocol):
    """A callable that passes a call on to the first program whose objects it has."""

    def __call__(self, *args: Any) -> Any:
        """Pass a call on."""

    def add(self, program: Choice, /) -> None:
        """Add a program."""

    def forget(self) -> None:
        """Forget all programs."""


def dispatch(otherwise: Run) -> Dispatch:
    """Return a dispatch without programs; other calls go to `otherwise`, with all arguments."""
    kind = _native()
    return PlainDispatch(otherwise) if kind is None else kind(otherwise)


def choice(
    fixed: Sequence[int], given: tuple[object, ...], moving: Sequence[int], run: Run
) -> Choice:
    """Return a program for calls with these objects; the places ascend."""
    return array("q", fixed).tobytes(), given, array("q", moving).tobytes(), run


@functools.cache
def _native() -> Any:
    try:
        return compiled("dispatch").Dispatch
    except FAILURES:
        return None


class PlainDispatch:
    """A dispatch in Python, like `native/dispatch.c`."""

    def __init__(self, otherwise: Run) -> None:
        self._otherwise = otherwise
        self._programs: list[tuple[Run, tuple[object, ...], Run, Run]] = []

    def __call__(self, *args: Any) -> Any:
        for fixed, given, moving, run in self._programs:
            if all(map(is_, fixed(args), given)):
                return run(*moving(args))
        return self._otherwise(*args)

    def add(self, program: Choice) -> None:
        fixed, given, moving, run = program
        self._programs.append((_items(fixed), given, _items(moving), run))

    def forget(self) -> None:
        self._programs = []


def _items(places: bytes) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes the items at these places."""
    numbers = array("q", places).tolist()
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda items: tuple(items[number] for number in numbers)
