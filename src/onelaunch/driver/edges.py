"""The true order of a recording, which of its operations have to wait for which, and their lanes.

A capture of one stream is a chain. An operation needs to wait only for an earlier one that writes
what it touches, or that touches what it writes. Operations that run together must not reuse one
another's memory. So results stay alive for a while, and memory that an operation frees before it
returns is taken again in its own lane alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from onelaunch.call.wrappers import local
from onelaunch.driver.protocol import OperatorCall, Region
from onelaunch.driver.schedule import Schedule, packed, schedule


class Access(NamedTuple):
    """Addresses `[start, stop)` that an operation touches."""

    start: int
    stop: int
    writes: bool


_GENERATOR = Access(0, 1, True)  # stands for the generators: no memory is at such an address


@dataclass
class NodeGroup:
    """The nodes `[first, last)` of one operation, which stay a chain. `accesses`: what they touch;
    None, and all else waits, if that is unknown. `hidden`: what they may write besides."""

    first: int
    last: int
    accesses: list[Access] | None = field(default_factory=list[Access])
    name: str = "(other)"
    hidden: list[Access] = field(default_factory=list[Access])

    def touched(self) -> list[Access]:
        return [] if self.accesses is None else [*self.accesses, *self.hidden]


def accesses_of(call: OperatorCall, region: Callable[[Tensor], Region]) -> list[Access] | None:
    """List what an operation touches by its schema, once it has returned: its arguments, and the
    whole memory of its results. Operations that draw random numbers touch the generator. None for
    an operation that is not torch's, or that goes to other processes."""
    op = call.op
    if op.func.namespace != "aten" or op.reshapes:
        return None
    storages = set(call.storages.values())
    accesses = [Access(*region(t)[1:], False) for t in call.on_device]
    if op.writes:
        here = set(map(id, call.on_device))
        written = (t for t in op.written(call.args, call.kwargs) if id(t) in here)
        accesses += [Access(*region(t)[1:], True) for t in written]
    for t, storage in call.with_memory:
        if storage not in storages and not t._is_zerotensor():
            memory = local(t).untyped_storage()
            accesses.append(Access(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), True))
    if op.random:
        accesses.append(_GENERATOR)
    return accesses


def completed(groups: Sequence[NodeGroup], nodes: int) -> list[NodeGroup]:
    """Return the groups with a barrier for all nodes between them."""
    complete: list[NodeGroup] = []
    at = 0
    for group in groups:
        if group.first > at:
            complete.append(NodeGroup(at, group.first, None))
        complete.append(group)
        at = group.last
    if nodes > at:
        complete.append(NodeGroup(at, nodes, None))
    return complete


class Dependencies:
    """The order of groups, as far as the memory that they touch demands one. `needed`: for each
    group the earlier ones that come first; None: by their memory. `waits`: for each group the
    earlier ones that it has an edge from. Edges that follow from others are left out."""

    def __init__(
        self, groups: Sequence[NodeGroup], needed: Iterable[set[int]] | None = None
    ) -> None:
        self.groups = groups  # the groups, each after all that it waits for
        self.waits: list[list[int]] = []
        self._lengths = [group.last - group.first for group in groups]
        self.nodes = sum(self._lengths)  # the number of all nodes
        behind: list[int] = []  # group -> a bit for each group that comes before it
        longest: list[int] = []
        for own, first in zip(self._lengths, needed or _needed(groups), strict=True):
            waits, before = list[int](), 0
            for other in sorted(first, reverse=True):
                if not before >> other & 1:
                    waits.append(other)
                    before |= behind[other] | 1 << other
            self.waits.append(waits)
            behind.append(before)
            longest.append(own + max((longest[other] for other in waits), default=0))
        self.longest = max(longest, default=0)  # the number of nodes of the longest chain

    def schedule(self) -> Schedule:
        """Return the lanes of the groups, for users."""
        return schedule([group.name for group in self.groups], self._lengths, self.waits)

    def narrowed(self, width: int) -> Dependencies:
        """Return another order: at most `width` groups run at the same time."""
        order, before = packed(self._lengths, self.waits, width)
        place = {number: at for at, number in enumerate(order)}
        needed = ({place[b] for b in (*self.waits[n], *before[n])} for n in order)
        return Dependencies([self.groups[n] for n in order], needed)

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield the edges between nodes, each with the node that comes first."""
        for group, waits in zip(self.groups, self.waits, strict=True):
            for node in range(group.first, group.last - 1):
                yield node, node + 1
            for other in waits:
                yield self.groups[other].last - 1, group.first


def _needed(groups: Sequence[NodeGroup]) -> Iterator[set[int]]:
    """Yield, for each group, the earlier ones that it needs; barriers stand for those before."""
    touched = [group.touched() for group in groups]
    bounds = sorted({b for every in touched for a in every for b in (a.start, a.stop)})
    writer: list[int | None] = [None] * len(bounds)  # of the addresses from this bound to the next
    readers: list[list[int]] = [[] for _ in bounds]
    barrier: int | None = None
    since: list[int] = []
    for number, group in enumerate(groups):
        needed = set[int]() if barrier is None else {barrier}
        if group.accesses is None:
            needed.update(since)
            barrier, since = number, []
            yield needed
            continue
        since.append(number)
        for start, stop, writes in sorted(touched[number], key=attrgetter("writes")):
            for cell in range(bisect_left(bounds, start), bisect_left(bounds, stop)):
                last = writer[cell]
                if last is not None:
                    needed.add(last)
                if writes:
                    needed.update(readers[cell])
                    writer[cell], readers[cell] = number, []
                else:
                    readers[cell].append(number)
        needed.discard(number)
        yield needed


LANES = 8  # number of lanes, each with memory apart, for operations with large memory of their own
_WORKING = ("conv", "rnn", "attention", "fft")
"""Parts of the names of operations with large memory of their own."""
SPARE_BYTES = 64 << 20  # the most memory that is kept from being taken again


class Kept:
    """Results of operations without a lane, which are kept from being freed for a while: what takes
    their memory would have to wait."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[UntypedStorage, int]] = {}
        self._nbytes = 0

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors. The oldest goes first."""
        for t in tensors:
            memory = local(t).untyped_storage()
            if memory._cdata not in self._memory:
                self._memory[memory._cdata] = memory, memory.nbytes()
                self._nbytes += memory.nbytes()
        while self._nbytes > SPARE_BYTES:
            _, nbytes = self._memory.pop(next(iter(self._memory)))
            self._nbytes -= nbytes

    def clear(self) -> None:
        self._memory.clear()
        self._nbytes = 0


class Dealer:
    """A choice of a lane for each operation, by the storages that it reads and writes. `last`: lane
    -> its last operation; -1 if it has none."""

    def __init__(self) -> None:
        self.last = [-1] * LANES
        self._behind: list[int] = []
        """Operation number -> a bit for each operation that comes before it."""
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        """Storage -> the last operation that wrote it, and those that read it since."""
        self._needed: set[int] = set()

    def lane(self, call: OperatorCall) -> int | None:
        """Choose a lane by its last operation, which comes before this call anyway. Else take a
        free lane, or the lane unused for longest. None: the call needs none."""
        needed = self._look(set(call.storages.values()), _written(call))
        if not any(part in call.op.base for part in _WORKING):
            return None
        before = 0
        for other in needed:
            before |= self._behind[other]
        follows = [lane for lane in range(LANES) if self.last[lane] in needed]
        if not follows:
            behind = ((lane, self.last[lane]) for lane in range(LANES))
            follows = [lane for lane, last in behind if last >= 0 and before >> last & 1]
        if follows:
            return max(follows, key=self.last.__getitem__)
        return min(range(LANES), key=self.last.__getitem__)

    def ran(self, call: OperatorCall, lane: int | None) -> None:
        """Record the call that `lane` was last asked about; None if it used no lane."""
        read = set(call.storages.values())
        if lane is not None:
            self.last[lane] = len(self._behind)
        self._note(read, _written(call) | {s for _, s in call.with_memory if s not in read})

    def ran_beside(self, read: set[int], written: set[int]) -> None:
        """Record work of the device that is in no lane, by the storages that it touches."""
        self._look(read, written)
        self._note(read, written)

    def _look(self, read: set[int], written: set[int]) -> set[int]:
        needed = {self._writer[s] for s in read | written if s in self._writer}
        for s in written:
            needed.update(self._readers.get(s, ()))
        self._needed = needed
        return needed

    def _note(self, read: set[int], written: set[int]) -> None:
        number, before = len(self._behind), 0
        for other in self._needed:
            before |= self._behind[other] | 1 << other
        self._behind.append(before)
        for s in written:
            self._writer[s], self._readers[s] = number, []
        for s in read:
            self._readers.setdefault(s, []).append(number)


def _written(call: OperatorCall) -> set[int]:
    if not call.op.writes:
        return set()
    written = call.op.written(call.args, call.kwargs)
    return {call.storages[id(t)] for t in written if id(t) in call.storages}
