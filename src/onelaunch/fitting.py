"""The bucket sizes that waste least on a histogram of observed sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Budget(NamedTuple):
    """What a set of sizes may cost.

    Attributes:
        sizes: how many there may be, or None.
        total_bytes, total_seconds: the sum over the sizes may not be more, or None.
        bytes_of, seconds_of: what one size costs.
    """

    sizes: int | None = None
    total_bytes: float | None = None
    bytes_of: Callable[[int], float] = lambda size: 0.0
    total_seconds: float | None = None
    seconds_of: Callable[[int], float] = lambda size: 0.0

    def allows(self, count: int, nbytes: float, seconds: float) -> bool:
        """Whether so much is within it."""
        return (
            (self.sizes is None or count <= self.sizes)
            and (self.total_bytes is None or nbytes <= self.total_bytes)
            and (self.total_seconds is None or seconds <= self.total_seconds)
        )


class _Partial(NamedTuple):
    """Sizes chosen for all observed sizes up to one of them, and what they cost."""

    work: float
    number: int
    nbytes: float
    seconds: float
    sizes: tuple[int, ...]

    def beats(self, other: _Partial) -> bool:
        """Whether it is as good in everything."""
        return all(a <= b for a, b in zip(self[:4], other[:4], strict=True))


def fit(histogram: Mapping[int, int], budget: Budget) -> tuple[int, ...] | None:
    """The sizes, ascending, that minimise rows computed; the largest covers all that was observed.

    Only observed sizes need be considered: a bucket that ends between two of them is larger than
    it must be. So this is a path through the observed sizes, where a step from one bucket to the
    next costs the rows computed for all requests in between; partial paths that are no better than
    another one in work, number, bytes and seconds are dropped. Exact; quadratic in the number of
    observed sizes for each undominated path.

    Args:
        histogram: size -> number of requests; sizes and counts positive.
        budget: what the chosen sizes may cost.

    Returns:
        The sizes, or None where no set within the budget covers the largest observed size.
    """
    observed = sorted(size for size, count in histogram.items() if count > 0)
    before = [0]
    for size in observed:
        before.append(before[-1] + histogram[size])
    limited = (budget.sizes, budget.total_bytes, budget.total_seconds)
    fronts: list[list[_Partial]] = [[_Partial(0, 0, 0, 0, ())]]
    for last, size in enumerate(observed, start=1):
        nbytes, seconds = budget.bytes_of(size), budget.seconds_of(size)
        front: list[_Partial] = []
        for first in range(last):
            work = size * (before[last] - before[first])
            for p in fronts[first]:
                # What is not limited is no reason to keep a path.
                longer = _Partial(
                    p.work + work,
                    p.number + (limited[0] is not None),
                    p.nbytes + (nbytes if limited[1] is not None else 0),
                    p.seconds + (seconds if limited[2] is not None else 0),
                    (*p.sizes, size),
                )
                if budget.allows(*longer[1:4]) and not any(q.beats(longer) for q in front):
                    front = [q for q in front if not longer.beats(q)]
                    front.append(longer)
        fronts.append(front)
    return min(fronts[-1], default=_NOTHING).sizes if fronts[-1] else None


_NOTHING = _Partial(0, 0, 0, 0, ())
