"""The batch that is cheapest by the times of the sizes: the rule of a batcher, as a function."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

_GAIN = 0.05  # the share of the time per row that a fuller batch must save to be waited for
_EQUAL = 1e-9  # a difference of two times per row that comes of rounding


def best(
    sizes: Sequence[int], waiting: Iterable[int], may_wait: bool, times: Mapping[int, float]
) -> int:
    """Return the number of requests to run now, from the first; 0 to wait for more. `sizes`: of the
    recordings, ascending. `waiting`: the rows of each request, in their order. `may_wait`: False if
    the first has waited long enough. `times`: size -> time; without any, in proportion."""
    milliseconds = _completed(sizes, times)
    rows = count = best_count = found_rows = 0
    lowest = math.inf
    for count, more in enumerate(waiting, 1):
        rows += more
        if rows > sizes[-1]:
            break
        price = milliseconds[bisect_left(sizes, rows)] / max(rows, 1)
        if price <= lowest * (1 + _EQUAL):
            best_count, found_rows, lowest = count, rows, price
    if count == 0 or best_count == 0 or rows >= sizes[-1] or not may_wait:
        return best_count or min(count, 1)  # the first alone may be larger than the largest size
    if found_rows in sizes and all(size in times for size in sizes):
        least = min(time / size for time, size in zip(milliseconds, sizes, strict=True))
        return best_count if lowest * (1 - _GAIN) <= least else 0
    return 0


def _completed(sizes: Sequence[int], times: Mapping[int, float]) -> list[float]:
    """Return the time of each size. A size without one gets the nearest other's, in proportion."""
    if not times:
        return [float(size) for size in sizes]
    near = [min(times, key=lambda timed: abs(timed - size)) for size in sizes]
    return [times[timed] * size / timed for timed, size in zip(near, sizes, strict=True)]
