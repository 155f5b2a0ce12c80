"""What an optimizer's step in a capture reads from `param_groups`, turned at later calls."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch.optim import Optimizer

from onelaunch.driver.protocol import Dial, Doubts, Graph
from onelaunch.optimizers.capturable import is_number
from onelaunch.optimizers.steps import Steps
from onelaunch.optimizers.traced_float import unmistakable

Reached = frozenset[tuple[int, str, int | None]]
"""(number of a group, key, item) of numbers that recorded kernels hold."""


class Dials:
    """The numbers of a recording's optimizers, and the places in it that hold what they lead to.

    Attributes:
        keys: (id of a group, key) of each number that is turned and not guarded.
    """

    def __init__(self, steps: Steps, dial: Dial | None, terms: Sequence[int]) -> None:
        self._places = [place for place, _ in steps.places.values()]
        self._book, self._dial, self._terms = steps.book, dial, terms
        self.keys = {(id(place.group), place.key) for place in self._places}
        self._values: list[float] | None = None
        groups = {id(place.group): place.group for place in self._places}
        self._fast: list[list[Any]] = []
        for group in groups.values():
            keys = list(dict.fromkeys(p.key for p in self._places if p.group is group))
            # Of one key the getter would give the value itself.
            self._fast.append([itemgetter(*keys, keys[0]), group, None])

    @staticmethod
    def none() -> Dials:
        """Those of a recording without optimizers."""
        return Dials(Steps(), None, ())

    def reached(self, optimizers: Sequence[Optimizer]) -> Reached:
        """Which numbers some recorded kernel holds, or what was computed from them."""
        assert self._dial is not None
        leaves = {leaf for i in self._dial.found for leaf in self._book.leaves(self._terms[i])}
        groups = {id(g): i for o in optimizers for i, g in enumerate(o.param_groups)}
        places = [self._places[leaf] for leaf in leaves]
        return frozenset(
            (groups[id(p.group)], p.key, p.item) for p in places if id(p.group) in groups
        )

    def current(self) -> bool:
        """Have the recording use the numbers of now; whether it can.

        0.2 us for each group whose numbers are the objects of the last call; where one has
        changed, 0.2 us for each term and 1 us for each kernel.
        """
        try:
            for read, group, seen in self._fast:
                if seen is None or not all(map(operator.is_, read(group), seen)):
                    return self._turn()
        except LookupError:
            return False
        return True

    def _turn(self) -> bool:
        seen = [read(group) for read, group, _ in self._fast]
        numbers = [place.read() for place in self._places]
        if not all(map(is_number, numbers)):
            return False
        terms = self._book.evaluate(numbers)
        if terms is None:
            return False
        values = [terms[i] for i in self._terms]
        if values != self._values:
            assert self._dial is not None
            self._dial.write(values)
            self._values = values
        for entry, now in zip(self._fast, seen, strict=True):
            entry[2] = now
        return True


def dials(steps: Steps, graph: Graph, believed: Doubts = frozenset()) -> Dials | None:
    """What turns the numbers of a recording; None where they cannot be found in it. For `believed`,
    and what may be raised, see `Graph.dial`."""
    terms = _varying(steps)
    dial = graph.dial([steps.book.values[i] for i in terms], believed)
    return None if dial is None else Dials(steps, dial, terms)


def _varying(steps: Steps) -> list[int]:
    """The terms that other numbers change: ``lr * 0`` is not one."""
    book, generator = steps.book, random.Random(1)
    numbers = [float(place.read()) for place, _ in steps.places.values()]
    others = book.evaluate([unmistakable(number, generator) for number in numbers])
    if others is None:
        return list(range(len(book.values)))
    return [i for i, (a, b) in enumerate(zip(book.values, others, strict=True)) if a != b]
