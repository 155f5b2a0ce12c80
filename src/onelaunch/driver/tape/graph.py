"""One recording of the tape: its launch, its pool, and the numbers in it that can be patched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from onelaunch.driver.aten import Step
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
from onelaunch.driver.tape.calls import TapeCall
from onelaunch.driver.tape.memory import HostMemory
from onelaunch.driver.tape.ports import Port, Ports
from onelaunch.driver.tape.recorder import is_recording
from onelaunch.errors import CaptureError


class TapePool:
    """The recordings that never run at the same time. On the CPU they share no memory.

    Attributes:
        lock: held by captures and launches.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()
        self._listed = threading.Lock()
        """A lock of the list of graphs, for which no launch waits."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the storages of all recordings."""
        return sum(g.memory_bytes for g in self.graphs())

    def graphs(self) -> list[TapeGraph]:
        """List the recordings that exist."""
        with self._listed:
            return list(self._graphs)

    def add(self, graph: TapeGraph) -> None:
        """Take a recording in."""
        with self._listed:
            self._graphs.add(graph)

    def discard(self, graph: TapeGraph) -> None:
        """Forget a recording."""
        with self._listed:
            self._graphs.discard(graph)

    def kept_bytes(self, graph: Graph, tensors: Sequence[Tensor]) -> int:
        return graph.memory_bytes

    def provenance(self, storage: torch.UntypedStorage) -> Provenance:
        """See `DevicePool.provenance`. The host's memory has no history."""
        return Provenance.BEFORE

    def written_by_others(self, tensors: Sequence[Tensor]) -> bool:
        return False

    def memory(self) -> HostMemory:
        """Make a place for the tensors of one more recording."""
        return HostMemory()

    @contextmanager
    def growing(self) -> Generator[None]:
        """Surround a capture."""
        yield

    def begin_launch(self) -> None:
        """Prepare the memory for a launch."""


class TapeGraph:
    """One recording: calls with their arguments bound, in order. Keeps no caller's tensor."""

    def __init__(self, pool: TapePool, memory: HostMemory, ports: Ports, steps: list[Step]) -> None:
        self.travels: tuple[Travel, ...] = tuple(p.travel for p in ports.inputs)
        self.memory_bytes = memory.nbytes
        self._pool = pool
        self._reads: list[Port] = ports.inputs
        self._writes: list[Port] = ports.outputs
        self._steps = steps
        self._left: list[Port] = []
        self._live = True
        pool.add(self)

    rebound = frozenset[int]()
    """See `Graph.rebound`."""
    driver_bytes = 0
    """See `Graph.driver_bytes`: there is no driver beneath."""

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
            if not self._live:
                raise Released("this recording was reset, so it cannot be launched")
            with raw(), no_functions():
                self._pool.begin_launch()
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
        held = [
            (call, {*numbers} & {*call.numbers()}) for call in steps if isinstance(call, TapeCall)
        ]
        self._calls = [call for call, found in held if found]
        every = {number for _, found in held for number in found}
        self.found = frozenset(i for i, number in enumerate(numbers) if number in every)

    def write(self, numbers: Sequence[float]) -> None:
        patched = dict(zip(self._numbers, numbers, strict=True))
        with self._pool.lock, raw(), no_functions():
            for call in self._calls:
                call.patch(patched)
