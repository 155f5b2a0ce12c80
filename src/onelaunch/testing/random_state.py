"""The state of the generators in a capture, which nothing but operations may advance."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.beside import is_beside
from onelaunch.driver.seeding import SEEDING, other_threads
from onelaunch.source import Place


class RandomState:
    """The generators that a capture may advance: the default generator, and the given ones.

    Attributes:
        drawn: True once a recorded operation has drawn.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.drawn = False
        self._others = other_threads()
        # Beside calls the callable draws nothing, and other threads may.
        self._generators = [] if is_beside() else [torch.default_generator, *generators]
        self._before = self._read()
        self._now = self._before

    def _read(self) -> list[Tensor]:
        return [g.get_state() for g in self._generators]

    def moved(self) -> bool:
        """Tell whether a generator changed since `accept`, except by an operation, and no other
        thread can have changed it."""
        return self._changed() and self._is_alone()

    def _changed(self) -> bool:
        return not all(map(torch.equal, self._read(), self._now))

    def _is_alone(self) -> bool:
        return other_threads() == self._others

    def accept(self) -> None:
        """Take the present state for the state that the recorded operations left."""
        self._now = self._read()

    def restore(self) -> None:
        """Restore every generator's state from the making of this object. Where no operation drew,
        other threads alone may have drawn, and would draw the same again."""
        if not (self.drawn or self._is_alone()):
            return
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)


def seeding_line(before: Place | None, after: Place | None) -> Place | None:
    """Find the line that changed the random state, between the operations on either side of it.

    Args:
        before: the line of the last operation that saw the old state, or None.
        after: the line of the first operation that saw the new one, or None.
    """
    place = after or before
    if place is None:
        return None
    first = before.lineno if before and before.filename == place.filename else 1
    last = after.lineno if after else first + 40
    for lineno in range(last, min(first, last) - 1, -1):
        source = linecache.getline(place.filename, lineno).strip()
        if re.search(SEEDING, source):
            return Place(place.filename, lineno, source)
    return place
