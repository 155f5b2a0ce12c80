"""The bucket sizes that waste least on a histogram of observed sizes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

_ROUNDS = 100
_MOST_STEPS = 1_000_000
"""Some seconds. Enough for the best path among a thousand observed sizes where their number is
limited, and among a hundred with other limits."""
_ROUNDING = 1e-9
"""Of float sums: what differs by less, in proportion, is taken for equal."""


class Limit(NamedTuple):
    """What the sizes may cost together, and what one of them costs; not negative."""

    most: float
    of: Callable[[int], float]


def fit(histogram: Mapping[int, float], limits: Sequence[Limit]) -> tuple[int, ...] | None:
    """The sizes, ascending, that minimise rows computed; the largest covers all that was observed.

    Only observed sizes need be considered: a bucket that ends between two of them is larger than
    it must be. So this is a path through the observed sizes, where a step from one bucket to the
    next costs the rows computed for all requests in between. With a price on what is limited, in
    the place of the limits, the best path is found in linear time, and is never worse than the one
    that is sought: a bound, by which paths are tried in order, the most promising first. A path
    that another one beats in work and in all that is limited is dropped. The first one that is
    complete is the best; where it does not come within a million steps, the best one known.

    Args:
        histogram: size -> number of requests; sizes and counts positive.
        limits: what the chosen sizes may cost.

    Returns:
        The sizes, or None where no set within the limits covers the largest observed size.
    """
    sizes = sorted(histogram)
    costs = [tuple(limit.of(size) for limit in limits) for size in sizes]
    most = [limit.most for limit in limits]
    if any(cost > limit for cost, limit in zip(costs[-1], most, strict=True)):
        return None
    problem = _Problem(sizes, [0, *accumulate(histogram[size] for size in sizes)], costs, most)
    return tuple(sizes[i] for i in problem.solved())


class _Prices(NamedTuple):
    """A price for each limit, and what the work and the priced cost from a size on come to at
    least: `rest[i]` where the size before the i-th is the last one chosen."""

    each: tuple[float, ...]
    rest: list[float]
    following: list[int]
    """The next size that they come to it by."""
    bound: float
    """Of the work of every path that keeps to the limits."""


class _Path(NamedTuple):
    """Sizes chosen so far; ordered by what they lead to at best, the longer ones first."""

    at_best: float
    left: int
    work: float
    used: tuple[float, ...]
    chosen: tuple[int, ...]


class _Problem(NamedTuple):
    sizes: Sequence[int]
    before: Sequence[float]
    """Requests smaller than each size, and all."""
    costs: Sequence[tuple[float, ...]]
    most: Sequence[float]

    def solved(self) -> tuple[int, ...]:
        """The numbers of the sizes of the best path."""
        prices, best, work = self._priced()
        if prices.bound >= work * (1 - _ROUNDING):
            return best
        count = len(self.sizes)
        heap = [_Path(prices.bound, count, 0, (0.0,) * len(self.most), ())]
        done: list[list[_Path]] = [[] for _ in range(count + 1)]
        steps = 0
        while heap and steps < _MOST_STEPS:
            path = heapq.heappop(heap)
            if path.at_best >= work * (1 - _ROUNDING):
                break
            start = count - path.left
            steps += path.left
            if any(_beats(other, path) for other in done[start]):
                continue
            done[start].append(path)
            whole = (*path.chosen, *_followed(prices.following, start))
            if self._work(whole) < work and self._allowed(self._used(whole)):
                best, work = whole, self._work(whole)
            for last in range(start, count):
                longer = self._longer(path, start, last, prices)
                if longer is None or longer.at_best >= work * (1 - _ROUNDING):
                    continue
                if longer.left:
                    heapq.heappush(heap, longer)
                else:
                    best, work = longer.chosen, longer.work
        return best

    def _longer(self, path: _Path, start: int, last: int, prices: _Prices) -> _Path | None:
        """The path with one size more; None where that is over a limit."""
        used = tuple(a + b for a, b in zip(path.used, self.costs[last], strict=True))
        if not self._allowed(used):
            return None
        work = path.work + self.sizes[last] * (self.before[last + 1] - self.before[start])
        at_best = work
        if last + 1 < len(self.sizes):
            spare = zip(prices.each, self.most, used, strict=True)
            at_best += prices.rest[last + 1] - sum(p * (m - u) for p, m, u in spare)
        return _Path(at_best, len(self.sizes) - 1 - last, work, used, (*path.chosen, last))

    def _allowed(self, used: Sequence[float]) -> bool:
        return all(u <= m for u, m in zip(used, self.most, strict=True))

    def _priced(self) -> tuple[_Prices, tuple[int, ...], float]:
        """The prices with the highest bound, and the best path seen on the way, with its work."""
        best: tuple[int, ...] = (len(self.sizes) - 1,)
        work = self._work(best)
        each = (0.0,) * len(self.most)
        highest: _Prices | None = None
        for _ in range(_ROUNDS):
            rest, following = self._relaxed(each)
            path = tuple(_followed(following, 0))
            bound = rest[0] - sum(p * m for p, m in zip(each, self.most, strict=True))
            if highest is None or bound > highest.bound:
                highest = _Prices(each, rest, following, bound)
            used = self._used(path)
            if self._allowed(used) and self._work(path) < work:
                best, work = path, self._work(path)
            over = [(u - m) / (m or 1) for u, m in zip(used, self.most, strict=True)]
            square = sum(share * share for share in over)
            if highest.bound >= work * (1 - _ROUNDING) or not square:
                break
            step = (work - bound) / square
            each = tuple(
                max(0.0, p + step * share / (m or 1))
                for p, share, m in zip(each, over, self.most, strict=True)
            )
        assert highest is not None
        return highest, best, work

    def _used(self, path: Sequence[int]) -> list[float]:
        return [sum(costs) for costs in zip(*(self.costs[i] for i in path), strict=True)]

    def _work(self, path: Sequence[int]) -> float:
        starts = [0, *(i + 1 for i in path[:-1])]
        return sum(
            self.sizes[i] * (self.before[i + 1] - self.before[start])
            for start, i in zip(starts, path, strict=True)
        )

    def _relaxed(self, each: Sequence[float]) -> tuple[list[float], list[int]]:
        """What the best path at these prices costs from each place on, and its next size there.

        From a place with `n` requests before it, a bucket of a size costs
        ``rest + price + size * (requests up to it - n)``: a line in `n`. The lines come in the
        order of their slopes and are asked in the order of `n`, so that the lowest one is always
        at the front of those that are still of use.
        """
        count = len(self.sizes)
        rest, following = [0.0] * (count + 1), [count] * count
        lines: list[tuple[int, float, int]] = []
        front = 0
        for start in reversed(range(count)):
            size = self.sizes[start]
            priced = sum(p * c for p, c in zip(each, self.costs[start], strict=True))
            line = (size, size * self.before[start + 1] + priced + rest[start + 1], start)
            while len(lines) > front + 1 and _useless(lines[-2], lines[-1], line):
                lines.pop()
            lines.append(line)
            n = self.before[start]
            while len(lines) > front + 1 and _at(lines[front + 1], n) <= _at(lines[front], n):
                front += 1
            rest[start], following[start] = _at(lines[front], n), lines[front][2]
        return rest, following


def _followed(following: Sequence[int], place: int) -> Iterator[int]:
    while place < len(following):
        yield following[place]
        place = following[place] + 1


def _at(line: tuple[int, float, int], n: float) -> float:
    return line[1] - line[0] * n


def _useless(
    steep: tuple[int, float, int], line: tuple[int, float, int], flat: tuple[int, float, int]
) -> bool:
    """Whether `line` is lowest nowhere between the two, as `n` falls."""
    return (steep[1] - line[1]) * (line[0] - flat[0]) <= (line[1] - flat[1]) * (steep[0] - line[0])


def _beats(other: _Path, path: _Path) -> bool:
    """Whether it is as good in everything."""
    pairs = zip(other.used, path.used, strict=True)
    return other.work <= path.work and all(a <= b for a, b in pairs)
