"""Patched scalars: numbers of `param_groups` that each call writes into a recording."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch.optim import Optimizer

from onelaunch.driver.protocol import Ambiguities, Graph, ScalarPatch
from onelaunch.optimizers.capturable import is_number
from onelaunch.optimizers.steps import Steps
from onelaunch.optimizers.traced_float import unmistakable

Reached = frozenset[tuple[int, str, int | None]]
"""(number of a group, key, item) of each number that recorded kernels hold."""


class PatchedScalars:
    """The numbers of a recording's optimizers, and the places in it of values computed from them.

    Attributes:
        keys: (id of a group, key) of each number that is patched instead of guarded.
    """

    def __init__(self, steps: Steps, patch: ScalarPatch | None, terms: Sequence[int]) -> None:
        self._places = [place for place, _ in steps.places.values()]
        self._trace, self._patch, self._terms = steps.trace, patch, terms
        self.keys = {(id(place.group), place.key) for place in self._places}
        self._values: list[float] | None = None
        groups = {id(place.group): place.group for place in self._places}
        self._fast: list[list[Any]] = []
        for group in groups.values():
            keys = list(dict.fromkeys(p.key for p in self._places if p.group is group))
            # With one key the getter would return the value itself, not a tuple.
            self._fast.append([itemgetter(*keys, keys[0]), group, None])

    @staticmethod
    def none() -> PatchedScalars:
        """Return the scalars of a recording without optimizers."""
        return PatchedScalars(Steps(), None, ())

    def reached(self, optimizers: Sequence[Optimizer]) -> Reached:
        """Return the numbers that recorded kernels hold, directly or in a value computed from
        them."""
        assert self._patch is not None
        leaves = {leaf for i in self._patch.found for leaf in self._trace.leaves(self._terms[i])}
        groups = {id(g): i for o in optimizers for i, g in enumerate(o.param_groups)}
        places = [self._places[leaf] for leaf in leaves]
        return frozenset(
            (groups[id(p.group)], p.key, p.item) for p in places if id(p.group) in groups
        )

    def write_current(self) -> bool:
        """Write the current numbers into the recording; return whether that is possible.

        0.2 us for each group whose numbers are the same objects as at the last call; if one has
        changed, 0.2 us for each term and 1 us for each kernel.
        """
        try:
            for read, group, latest in self._fast:
                if latest is None or not all(map(operator.is_, read(group), latest)):
                    return self._patch_numbers()
        except LookupError:
            return False
        return True

    def _patch_numbers(self) -> bool:
        latest = [read(group) for read, group, _ in self._fast]
        numbers = [place.read() for place in self._places]
        if not all(map(is_number, numbers)):
            return False
        terms = self._trace.evaluate(numbers)
        if terms is None:
            return False
        values = [terms[i] for i in self._terms]
        if values != self._values:
            assert self._patch is not None
            self._patch.write(values)
            self._values = values
        for entry, objects in zip(self._fast, latest, strict=True):
            entry[2] = objects
        return True


def patched_scalars(
    steps: Steps, graph: Graph, confirmed: Ambiguities = frozenset()
) -> PatchedScalars | None:
    """Find the numbers of a recording's optimizers in it; return None if they are not found.

    See `Graph.scalar_patch` for `confirmed` and the errors.
    """
    terms = _varying(steps)
    patch = graph.scalar_patch([steps.trace.values[i] for i in terms], confirmed)
    return None if patch is None else PatchedScalars(steps, patch, terms)


def _varying(steps: Steps) -> list[int]:
    """Return the terms that depend on the numbers: ``lr * 0`` does not."""
    trace, generator = steps.trace, random.Random(1)
    numbers = [float(place.read()) for place, _ in steps.places.values()]
    others = trace.evaluate([unmistakable(number, generator) for number in numbers])
    if others is None:
        return list(range(len(trace.values)))
    return [i for i, (a, b) in enumerate(zip(trace.values, others, strict=True)) if a != b]
