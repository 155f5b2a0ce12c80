"""The operations of a recording that may run at the same time, for its users to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from operator import or_
from typing import Literal, NamedTuple

Parallel = bool | Literal["auto", "ahead"]
"""True if operations of a recording may run at the same time. ``"auto"``: where a trial shows that
it pays. ``"ahead"``: without a trial of any kind, as some of its memory is not filled yet."""
_COLUMNS = 72
_LANES_SHOWN = 16


class LaneSpan(NamedTuple):
    """An operation in its lane, where every node takes one step of time: `[start, stop)`."""

    name: str
    start: int
    stop: int
    critical: bool  # true if it is in the longest chain, or in one of them


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lanes of a recording whose operations wait only where they have to. Its text is a
    picture: a lane in each line, the longest chain as ``#``.

    Attributes:
        nodes: the number of kernels and copies.
        longest: the number of them in the longest chain.
        lanes: the operations of each lane, one after the other.
        gain: the time of the chain of the same kernels, as a multiple of the recording's, measured
            when it was made. None: not measured.
    """

    nodes: int
    longest: int
    lanes: tuple[tuple[LaneSpan, ...], ...]
    gain: float | None = None

    @property
    def width(self) -> int:
        """The number of lanes: how many operations run at the same time at most."""
        return len(self.lanes)

    def __str__(self) -> str:
        gain = "" if self.gain is None else f", {self.gain:.2f}x of the chain's speed"
        head = f"{self.nodes} nodes in {self.width} lanes, {self.longest} in a chain{gain}"
        scale = min(1.0, _COLUMNS / self.longest)
        rows = [_row(lane, scale) for lane in self.lanes[:_LANES_SHOWN]]
        more = self.width - len(rows)
        return "\n".join([head, *rows, *([f"... {more} more lanes"] if more else [])])


def _row(lane: Sequence[LaneSpan], scale: float) -> str:
    row: list[str] = []
    for span in lane:
        first = int(span.start * scale)
        last = max(int(span.stop * scale), first + 1)
        row += " " * (last - len(row))
        for column in range(first, last):
            if span.critical or row[column] == " ":
                row[column] = "#" if span.critical else "="
    return "".join(row)


def schedule(
    names: Sequence[str], lengths: Sequence[int], waits: Sequence[Sequence[int]]
) -> Schedule:
    """Put operations into lanes, each as early as it can be. `lengths`: the number of nodes of
    each. `waits`: for each the earlier ones that it waits for."""
    starts: list[int] = []
    for before in waits:
        starts.append(max((starts[b] + lengths[b] for b in before), default=0))
    stops = [start + length for start, length in zip(starts, lengths, strict=True)]
    longest = max(stops, default=0)
    needed, last = set[int](), stops.index(longest) if stops else None
    while last is not None:
        needed.add(last)
        last = next((b for b in waits[last] if stops[b] == starts[last]), None)
    lanes: list[list[LaneSpan]] = []
    for number in sorted(range(len(waits)), key=lambda n: (starts[n], n not in needed)):
        if not lengths[number]:
            continue
        span = LaneSpan(names[number], starts[number], stops[number], number in needed)
        free = next((lane for lane in lanes if lane[-1].stop <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return Schedule(sum(lengths), longest, tuple(map(tuple, lanes)))


def packed(
    lengths: Sequence[int], waits: Sequence[Sequence[int]], width: int
) -> tuple[list[int], list[list[int]]]:
    """Put operations into at most `width` lanes, the longest chains first. Return the order of all,
    and the forerunner of each in its lane, if there is one."""
    following: list[list[int]] = [[] for _ in waits]
    ancestors: list[int] = []  # a bit for each
    for number, needed in enumerate(waits):
        ancestors.append(reduce(or_, (ancestors[b] | 1 << b for b in needed), 0))
        for b in needed:
            following[b].append(number)
    rest = [*lengths]  # of the longest chain that begins here
    for number in reversed(range(len(rest))):
        rest[number] += max((rest[f] for f in following[number]), default=0)
    missing, begins = [len(needed) for needed in waits], [0] * len(rest)
    due = [(0, number) for number, count in enumerate(missing) if not count]
    ready: list[tuple[int, int]] = []
    free, last = [0] * width, [-1] * width  # of each lane: its time, and its last operation
    order: list[int] = []
    before: list[list[int]] = [[] for _ in waits]
    while due or ready:
        now = min(free) if ready else max(min(free), due[0][0])
        while due and due[0][0] <= now:
            _, number = heappop(due)
            heappush(ready, (-rest[number], number))
        _, number = heappop(ready)
        now = max(now, begins[number])
        fits = (_fit(last[n], waits[number], ancestors[number]) for n in range(width))
        *_, lane = max((fit, -free[n], n) for n, fit in enumerate(fits) if free[n] <= now)
        if last[lane] >= 0:
            before[number].append(last[lane])
        order.append(number)
        free[lane], last[lane] = now + lengths[number], number
        for f in following[number]:
            begins[f] = max(begins[f], free[lane])
            missing[f] -= 1
            if not missing[f]:
                heappush(due, (begins[f], f))
    return order, before


def _fit(last: int, waits: Sequence[int], ancestors: int) -> int:
    """Rate a lane by its last operation: best are those that need no edge more."""
    if last < 0:
        return 1
    return 3 if last in waits else 2 * (ancestors >> last & 1)
