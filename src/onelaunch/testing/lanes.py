"""A tape's operations in another order than they came, as far as their memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from onelaunch.call.spec import extent_bytes
from onelaunch.call.wrappers import local
from onelaunch.driver.edges import (
    Access,
    Dealer,
    Dependencies,
    Kept,
    NodeGroup,
    accesses_of,
    completed,
)
from onelaunch.driver.protocol import OperatorCall, Region
from onelaunch.driver.schedule import Schedule
from onelaunch.testing.arena import Arena

T = TypeVar("T")


class TapeLanes:
    """The groups of a tape's steps; see `Lanes`.

    Args:
        steps: the steps so far; the recorder adds to them.
        arena: the memory of the recording.

    Attributes:
        groups: the steps of each operation.
    """

    def __init__(self, steps: list[Callable[[], object]], arena: Arena) -> None:
        self._steps = steps
        self._arena = arena
        self._dealer = Dealer()
        self._first = 0
        self._lane: int | None = None
        self._kept = Kept()
        self.groups: list[NodeGroup] = []

    def run(self, call: OperatorCall, function: Callable[..., T], args: Sequence[Any]) -> T:
        self._first = len(self._steps)
        self._arena.allocated.clear()
        self._arena.lane = self._lane = self._dealer.lane(call)
        try:
            return function(*args, **call.kwargs)
        finally:
            self._arena.lane = None

    def note(self, call: OperatorCall) -> None:
        if len(self._steps) > self._first:
            touched = accesses_of(call, region)
            if touched is not None:  # with what it freed before it returned
                touched += [Access(*span, True) for span in self._arena.allocated]
            self.groups.append(NodeGroup(self._first, len(self._steps), touched, call.op.base))
            self._dealer.ran(call, self._lane)
            if self._lane is None:
                self._kept.keep(t for t, _ in call.with_memory)

    def reorder(self) -> Schedule | None:
        """Put the steps into another order that is as good. Return the lanes; None for a chain."""
        self._kept.clear()
        groups = completed(self.groups, len(self._steps))
        order = Dependencies(groups)
        self._steps[:] = [
            step
            for number in shuffled(order)
            for step in self._steps[groups[number].first : groups[number].last]
        ]
        return order.schedule() if order.longest < order.nodes else None


def region(t: Tensor) -> Region:
    """See `Driver.region`."""
    t = local(t)
    start = t.data_ptr()
    stop = start + extent_bytes(t.shape, t.stride(), t.dtype)
    return Region(t.untyped_storage()._cdata, start, stop)


def shuffled(order: Dependencies) -> list[int]:
    """Return the groups in another order that is as good: the latest first, if it may."""
    followers: list[list[int]] = [[] for _ in order.waits]
    missing = [len(waits) for waits in order.waits]
    for number, waits in enumerate(order.waits):
        for other in waits:
            followers[other].append(number)
    ready = [number for number, count in enumerate(missing) if not count]
    found: list[int] = []
    while ready:
        found.append(number := ready.pop())
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    return found
