"""The operations of one capture: the stream that each runs on, and what its nodes touch.

What nodes touch are tensors of their operation, and whatever else their arguments point at. Few
operations leave the stream of the capture, see `edges.Dealer`; so there is one workspace of cuBLAS.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onelaunch.call.wrappers import local
from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.memory import joined, live_blocks, region, storage
from onelaunch.driver.cuda.streams import bindings, new_stream
from onelaunch.driver.cuda.triton_launches import Launched
from onelaunch.driver.edges import LANES, Access, Dealer, Kept, NodeGroup, accesses_of, completed
from onelaunch.driver.protocol import OperatorCall

T = TypeVar("T")

LEAST_ADDRESS = 1 << 32  # no memory of a device lies below
_BEYOND = 1 << 57  # nor from here on


class CudaLanes:
    """The lanes of one capture; see `Lanes`. `stream`: the stream under capture, on which
    everything else runs."""

    def __init__(self, index: int, stream: torch.cuda.Stream) -> None:
        self._index = index
        self._main = stream
        self._raw = stream.cuda_stream
        self._lanes = streams(index)
        self._dealer = Dealer()
        self._lane: int | None = None
        self._at: tuple[int, int | None] | None = None
        """The stream of the operation that runs, and the node that its first waits for. None: on a
        stream of the program's."""
        self._used: set[int] = set()
        self._ran: list[_Ran] = []
        self._kept = Kept()

    def run(self, call: OperatorCall, function: Callable[..., T], args: Sequence[Any]) -> T:
        self._lane, self._at = self._dealer.lane(call), None
        if bindings._cuda_getCurrentRawStream(self._index) != self._raw:
            return function(*args, **call.kwargs)
        if self._lane is None:
            self._at = self._raw, nodes.last(self._raw)
            return function(*args, **call.kwargs)
        stream = self._lanes[self._lane]
        if self._lane not in self._used:
            nodes.wait(stream.cuda_stream, self._raw)
            self._used.add(self._lane)
        self._at = stream.cuda_stream, nodes.last(stream.cuda_stream)
        _work_on(stream)
        try:
            return function(*args, **call.kwargs)
        finally:
            _work_on(self._main)

    def note(self, call: OperatorCall) -> None:
        if self._at is None:
            return
        stream, before = self._at
        if self._noted(call.op.base, accesses_of(call, region), before, stream):
            self._dealer.ran(call, self._lane)
            if self._lane is None or call.op.outs:
                self._kept.keep(t for t, _ in call.with_memory)

    def launched(self, launch: Launched) -> Any:
        """Launch a kernel of Triton's, and note what it touched."""
        before = nodes.last(self._raw)
        result = launch()
        # It may read beyond a view. What it writes is a part of its own of a concatenation.
        touched = [_whole(t) for t in launch.reads]
        touched += [Access(*region(t)[1:], True) for t in launch.writes]
        if self._noted(launch.name, touched, before, self._raw):
            read, written = (set(map(storage, ts)) for ts in (launch.reads, launch.writes))
            self._dealer.ran_beside(read, written)
            self._kept.keep(launch.writes)
        return result

    def _noted(
        self, name: str, touched: list[Access] | None, before: int | None, stream: int
    ) -> bool:
        last = nodes.last(stream)
        if last == before or last is None:
            return False
        self._ran.append(_Ran(name, touched, before, last))
        return True

    def join(self) -> None:
        """Let the capture end after the work of all lanes."""
        self._kept.clear()
        for lane in self._used:
            nodes.wait(self._raw, self._lanes[lane].cuda_stream)

    def groups(self, graph: int, allocated: Sequence[tuple[int, int]]) -> list[NodeGroup]:
        """Find the nodes of each operation, and all that they touch. `allocated`: the (address,
        bytes) of each block that the capture allocated."""
        handles = nodes.handles(graph)
        groups = completed(_groups(self._ran, graph, handles), len(handles))
        blocks = _Blocks([*allocated, *live_blocks(self._index)])
        for group in groups:
            _add_hidden(group, handles, blocks)
        return groups


class _Ran(NamedTuple):
    """An operation with its accesses, the node before it in its lane, and its own last node."""

    name: str
    accesses: list[Access] | None
    before: int | None
    last: int


def _groups(ran: Sequence[_Ran], graph: int, handles: Sequence[int]) -> list[NodeGroup]:
    """Return the nodes of each operation: all of its lane since the operation before. Leave out an
    operation whose nodes are not a chain. `completed` makes barriers of the nodes left over."""
    numbers = {node: number for number, node in enumerate(handles)}
    before: dict[int, list[int]] = {}
    for first, then in nodes.edges(graph):
        before.setdefault(then, []).append(first)
    groups: list[NodeGroup] = []
    for name, accesses, tail, last in ran:
        first, count = last, 1
        while (earlier := before.get(first, [])) != ([] if tail is None else [tail]):
            if len(earlier) != 1:
                break
            first, count = earlier[0], count + 1
        else:
            start, stop = numbers[first], numbers[last] + 1
            if stop - start == count and (not groups or start >= groups[-1].last):
                groups.append(NodeGroup(start, stop, accesses, name))
    return groups


def _whole(t: Tensor) -> Access:
    memory = local(t).untyped_storage()
    return Access(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), False)


def _work_on(stream: torch.cuda.Stream) -> None:
    bindings._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)


@functools.cache
def streams(index: int) -> list[torch.cuda.Stream]:
    """Return the streams of the lanes, which must not be made in a capture."""
    return [new_stream(index) for _ in range(LANES)]


class _Blocks:
    """Blocks of memory. Several may have been at the same addresses in turn. `others`: words that
    are no addresses."""

    def __init__(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._blocks = sorted(set(blocks))
        self._starts = [start for start, _ in self._blocks]
        ends = (start + nbytes for start, nbytes in self._blocks)
        self._reach = [*accumulate(ends, max)]  # block number -> the end of all up to it
        self._spans: dict[int, tuple[int, int]] = {}
        self.others: set[int] = set()

    def around(self, word: int) -> tuple[int, int] | None:
        """Return the addresses of everything that was around an address; None for another word."""
        span = self._spans.get(word)
        if span is None and word not in self.others:
            span = self._span_of(word)
            if span is None:
                self.others.add(word)
            else:
                self._spans[word] = span
        return span

    def _span_of(self, word: int) -> tuple[int, int] | None:
        first, last = word, word
        number = bisect_right(self._starts, word) - 1
        while number >= 0 and self._reach[number] > word:
            start, nbytes = self._blocks[number]
            if start + nbytes > word:
                first, last = min(first, start), max(last, start + nbytes)
            number -= 1
        return (first, last) if last > first else nodes.address_range(word)


def _add_hidden(group: NodeGroup, handles: Sequence[int], blocks: _Blocks) -> None:
    """Find all memory that a group's nodes point at besides its tensors."""
    accesses = group.accesses
    if accesses is None:
        return
    words: set[int] = set()
    for node in handles[group.first : group.last]:
        pointers = _words(node)
        if pointers is None:
            group.accesses = None
            return
        words.update(pointers)
    own = joined((a.start, a.stop) for a in accesses)
    hidden: set[tuple[int, int]] = set()
    for word in words - blocks.others - {a.start for a in accesses}:
        if word >= LEAST_ADDRESS and not own.contains(word, word + 1):
            around = blocks.around(word)
            if around is not None:
                hidden.add(around)
    group.hidden = [Access(start, stop, True) for start, stop in hidden]


def _words(node: int) -> Iterable[int] | None:
    """Return all that could be an address in a node; None for a node that does not tell."""
    kind = nodes.kind(node)
    if kind == "EMPTY":
        return ()
    if kind == "MEMSET":
        return (nodes.memset_address(node),)
    if kind == "MEMCPY":
        fields = nodes.CopyNode(node).fields
        return fields.srcDevice, fields.dstDevice, fields.srcHost or 0, fields.dstHost or 0
    blocks = nodes.arguments(node) if kind == "KERNEL" else None
    return None if blocks is None else _addresses(blocks)


def _addresses(blocks: Iterable[bytes]) -> Iterator[int]:
    """Yield the words of a kernel's arguments, in steps of 4 bytes."""
    for raw in blocks:
        for begin in (0, 4):
            count = (len(raw) - begin) // 8
            if count > 0:
                words = struct.unpack_from(f"<{count}Q", raw, begin)
                yield from (w for w in words if LEAST_ADDRESS <= w < _BEYOND)
