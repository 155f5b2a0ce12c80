"""One recording of the tape: its launch, its pool, and the numbers in it that can be patched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.protocol import (
    Ambiguities,
    Graph,
    InPlace,
    Provenance,
    Region,
    Released,
    Travel,
)
from onelaunch.driver.schedule import Schedule
from onelaunch.errors import CaptureError
from onelaunch.testing.arena import Arena, Block, newest
from onelaunch.testing.memory import HostMemory
from onelaunch.testing.ports import Port, Ports
from onelaunch.testing.recorder import TapeCall, is_recording
from onelaunch.testing.repeats import Step


class TapePool:
    """The recordings that never run at the same time. Those of the emulated device share an arena.

    Args:
        holder: makes the memory of a recording in the arena.

    Attributes:
        lock: held by captures and launches.
        arena: the memory, of this pool alone.
    """

    def __init__(self, holder: type[HostMemory]) -> None:
        self.lock = threading.RLock()
        self.arena = Arena(of_graphs=True)
        self._holder = holder
        self._graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()
        self._capturing = False
        self._earlier: list[tuple[int, int]] = []
        """The addresses that the arena had before its last capture, if recordings were there."""
        self._newest = 0
        """The number of the newest block when the last capture began."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arena, and bytes that recordings hold outside of it."""
        with self.lock:
            self.trim()  # a recording may have gone without a reset
            return self.arena.reserved_bytes + sum(g.held_bytes for g in self._graphs)

    def add(self, graph: TapeGraph) -> None:
        """Take a recording in, while `lock` is held."""
        self._graphs.add(graph)

    def discard(self, graph: TapeGraph) -> None:
        """Forget a recording, while `lock` is held, and give back what no other needs."""
        self._graphs.discard(graph)
        self.trim()

    def kept_bytes(self, graph: Graph, tensors: Sequence[Tensor]) -> int:
        assert isinstance(graph, TapeGraph)
        blocks = {b for b in map(_block, tensors) if b is not None and b.arena is self.arena}
        return graph.held_bytes + sum(block.nbytes for block in blocks)

    def provenance(self, storage: torch.UntypedStorage) -> Provenance:
        """See `Capture.provenance`. Plain memory of the host has no history."""
        block: Block | None = getattr(storage, "block", None)
        if block is None:
            return Provenance.BEFORE
        if block.arena is self.arena:
            return Provenance.CAPTURE
        return Provenance.BEFORE if block.number <= self._newest else Provenance.MEANWHILE

    def written_by_others(self, tensors: Sequence[Tensor]) -> bool:
        blocks = [b for b in map(_block, tensors) if b is not None]
        return any(
            start <= block.address < stop for block in blocks for start, stop in self._earlier
        )

    @contextmanager
    def growing(self) -> Generator[HostMemory]:
        """Surround a capture with memory for its tensors. The arena is kept meanwhile."""
        self._capturing = True
        self._newest = newest()
        self._earlier = self.arena.ranges() if len(self._graphs) else []
        try:
            yield self._holder(self.arena)
        finally:
            self._capturing = False
            self.trim()

    def trim(self) -> None:
        """Give back what no recording needs any more."""
        with self.lock:
            if self._capturing or len(self._graphs):
                return
            self.arena.trim()
            if self.arena.reserved_bytes:  # results that somebody holds, no business of the pool's
                self.arena = Arena(of_graphs=True)


def _block(t: Tensor) -> Block | None:
    storage: Any = t.untyped_storage()
    return getattr(storage, "block", None)


class TapeGraph:
    """One recording: calls with their arguments bound, in order. Keeps no caller's tensor.

    Args:
        schedule: see `Graph.schedule`.
    """

    def __init__(
        self,
        pool: TapePool,
        memory: HostMemory,
        ports: Ports,
        steps: list[Step],
        schedule: Schedule | None,
    ) -> None:
        self.travels: tuple[Travel, ...] = tuple(p.travel for p in ports.inputs)
        self.memory_bytes = memory.nbytes
        self.held_bytes = memory.held_bytes
        self._pool = pool
        self._reads: list[Port] = ports.inputs
        self._writes: list[Port] = ports.outputs
        self._steps = steps
        self._left: list[Port] = []
        self._live = True
        self.schedule = schedule
        pool.add(self)

    rebound = frozenset[int]()
    """See `Graph.rebound`."""
    driver_bytes = 0
    """See `Graph.driver_bytes`: there is no driver beneath."""
    lost: str | None = None
    """See `Graph.lost`: no library keeps anything for it, but a test may say so."""

    @property
    def nodes(self) -> int:
        """Number of calls and copies that one launch runs."""
        return len(self._steps) + sum(port.at_once for port in self._reads)

    def reach(self, in_place: InPlace, kept: Sequence[Region]) -> None:
        """Take ports for rebound. What a launch leaves in their buffers is overwritten.

        Args:
            kept: what must stay in the recording's memory after a launch.
        """

        def free(port: Port, least: int | None, others: Sequence[Port]) -> bool:
            if port.travel != Travel.NODE or least is None or port.buffer.nbytes < max(least, 1):
                return False
            spans = [*((r.start, r.stop) for r in kept), *(other.span for other in others)]
            first, last = port.span
            return not any(first < stop and start < last for start, stop in spans)

        reads = [p for p in self._reads if free(p, in_place.inputs, self._writes)]
        writes = [p for p in self._writes if free(p, in_place.outputs, self._reads)]
        for port in reads:
            port.travel = Travel.REBIND
        self.travels = tuple(port.travel for port in self._reads)
        self.rebound = frozenset(i for i, port in enumerate(self._writes) if port in writes)
        self._left = [*reads, *writes]

    def launch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if is_recording():
            raise CaptureError("OL109", "A recording was launched during a capture.")
        with self._pool.lock:
            if not self._live or self.lost:
                raise Released(self.lost or "this recording was reset, so it cannot be launched")
            with raw(), no_functions():
                self._pool.arena.poison()
                for port, source in zip(self._reads, sources, strict=True):
                    port.point(source)
                for port, target in zip(self._writes, targets, strict=True):
                    port.point(target)
                for step in self._steps:
                    step()
                for port in self._left:
                    port.buffer.fill_(0xFF)  # of a float, NaN

    def scalar_patch(
        self, numbers: Sequence[float], confirmed: Ambiguities = frozenset()
    ) -> TapeScalarPatch:
        """See `Graph.scalar_patch`. Nothing is in doubt."""
        return TapeScalarPatch(self._pool, self._steps, numbers)

    def reset(self) -> None:
        with self._pool.lock:
            self._live = False
            self._steps.clear()
            self._reads, self._writes, self._left = [], [], []
            self._pool.discard(self)


class TapeScalarPatch:
    """The numbers among the arguments of recorded calls; see `ScalarPatch`."""

    def __init__(self, pool: TapePool, steps: Sequence[Step], numbers: Sequence[float]) -> None:
        self._pool, self._numbers = pool, numbers
        calls = [(call, call.numbers()) for call in steps if isinstance(call, TapeCall)]
        self._calls = [call for call, held in calls if not held.isdisjoint(numbers)]
        every = {number for _, held in calls for number in held}
        self.held = frozenset(i for i, number in enumerate(numbers) if number in every)

    def write(self, numbers: Sequence[float]) -> None:
        patched = dict(zip(self._numbers, numbers, strict=True))
        with self._pool.lock:
            for call in self._calls:
                call.patch(patched)
