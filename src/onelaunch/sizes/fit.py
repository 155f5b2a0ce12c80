"""The bucket sizes that waste the least for a histogram of observed sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate


def fit(histogram: Mapping[int, float], max_sizes: int) -> tuple[int, ...]:
    """Choose the sizes, ascending, that compute the fewest rows and serve every observed size. Only
    observed sizes are candidates, as a bucket between two of them is larger than necessary. Each
    further bucket saves rows, so `max_sizes` are chosen where possible. `histogram`: size -> number
    of requests; sizes and counts positive."""
    sizes = sorted(histogram)
    requests = [0.0, *accumulate(histogram[size] for size in sizes)]
    rows = [0.0] * (len(sizes) + 1)
    rounds: list[list[int]] = []
    for count in range(1, min(max_sizes, len(sizes)) + 1):
        rows, starts = _one_more(sizes, requests, rows, count)
        rounds.append(starts)
    chosen: list[int] = []
    end = len(sizes)
    for starts in reversed(rounds):
        chosen.append(sizes[end - 1])
        end = starts[end]
    return tuple(reversed(chosen))


def _one_more(
    sizes: Sequence[int], requests: Sequence[float], rows: Sequence[float], count: int
) -> tuple[list[float], list[int]]:
    """Add a bucket. Return, for each `n`, the fewest rows of the `n` smallest sizes in `count`
    buckets, and the number of sizes below the last bucket's. With more sizes the last bucket begins
    at the same size or later. So the answer for the middle `n` halves the search on both sides.
    `requests`: for each `n`, those of the `n` smallest sizes. `rows`: the answer for one bucket
    less; for the first bucket only index 0 is read."""
    fewest, starts = list(rows), [0] * len(rows)

    def solve(first: int, last: int, low: int, high: int) -> None:
        if first > last:
            return
        n = (first + last) // 2

        def computed(start: int) -> float:
            return rows[start] + sizes[n - 1] * (requests[n] - requests[start])

        starts[n] = min(range(low, min(high, n - 1) + 1), key=computed)
        fewest[n] = computed(starts[n])
        solve(first, n - 1, low, starts[n])
        solve(n + 1, last, starts[n], high)

    solve(count, len(sizes), count - 1, 0 if count == 1 else len(sizes) - 1)
    return fewest, starts
