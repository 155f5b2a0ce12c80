"""The comparison of a run with a run at other sizes: the study of one size serves the next.

Where both do the same operations with the same numbers, except for numbers that follow the sizes of
the arguments, a capture at the new size needs no run before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from onelaunch.watch.difference import Operand
from onelaunch.watch.ledger import Ledger


class SizePairs:
    """The sizes of the arguments that differ, as (size in one run, size in the other).

    Args:
        shapes: the shapes of an argument in both runs, for each argument.
    """

    def __init__(self, shapes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        dims = {pair for a, b in shapes for pair in zip(a, b, strict=True)}
        differing = {pair for pair in dims if pair[0] != pair[1]}
        self._pairs = differing | {
            (a * c, b * d) for (a, b), (c, d) in product(differing, repeat=2)
        }

    def explain(self, was: int, now: int) -> bool:
        """Return whether two numbers are the same multiple of a size, or of a product of two sizes.
        The numbers next to a size count, too."""
        return any(
            (was * b == now * a and was % a == 0) or (was - a == now - b and abs(was - a) == 1)
            for a, b in self._pairs
            if a
        )


def repeats(studied: Ledger, ledger: Ledger) -> bool:
    """Return whether a run has repeated a run at other sizes."""
    if studied.handed_on_values != ledger.handed_on_values:
        return False
    layouts = zip(studied.origins.layouts, ledger.origins.layouts, strict=True)
    sizes = SizePairs((a.shape, b.shape) for a, b in layouts)
    return _alike(studied.entries, ledger.entries, sizes)


def _alike(was: Any, now: Any, sizes: SizePairs) -> bool:
    """Compare two noted operations, or parts of them; see `Ledger.note`."""
    match was, now:
        case (Operand(), Operand()):
            same_rank = len(was.shape) == len(now.shape)
            return same_rank and _without_sizes(was) == _without_sizes(now)
        case ((type() as kind, int(a)), (type() as other, int(b))) if kind is other is int:
            return a == b or sizes.explain(a, b)
        case (list() | tuple(), list() | tuple()) if len(was) == len(now):
            return all(_alike(a, b, sizes) for a, b in zip(was, now, strict=True))
        case _:
            return bool(was == now)


def _without_sizes(operand: Operand) -> Operand:
    return operand._replace(shape=(), stride=(), offset=0)
