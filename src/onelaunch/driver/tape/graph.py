"""One recording of the tape: its launch, its pool, and the numbers in it that can be turned."""

# Recording is done with the dispatcher's own tools, which torch keeps in `torch._C`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.driver.aten import Step
from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.emulated import device as emulated
from onelaunch.driver.emulated.arena import Arena
from onelaunch.driver.emulated.storage import NAME, block_of
from onelaunch.driver.protocol import Ambiguities, Graph, Released, Travel
from onelaunch.driver.tape.calls import Call
from onelaunch.driver.tape.handoff import Handing
from onelaunch.driver.tape.memory import ArenaMemory, HostMemory
from onelaunch.driver.tape.ports import Ports
from onelaunch.driver.tape.recorder import Recorder, recording
from onelaunch.errors import CaptureError


class Launch(Protocol):
    """See `Graph.launch`."""

    def __call__(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> dict[int, Tensor]: ...


class TapePool:
    """The recordings that never run at the same time, and the memory that they hold."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.capturing = False
        self._graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()
        self._listed = threading.Lock()
        """Held while the graphs are listed, which no launch waits for."""
        self.arena = Arena(of_graphs=True) if device.type == NAME else None
        self.earlier: list[tuple[int, int]] = []
        """The addresses that the arena had before its last capture, if recordings were there."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the pool's arena, or of the storages of its recordings on the CPU."""
        if self.arena is not None:
            self.trim()  # a recording may have gone without a reset
            return self.arena.reserved_bytes
        return sum(g.memory_bytes for g in self.graphs())

    def graphs(self) -> list[TapeGraph]:
        """The recordings that exist."""
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
        """See `Pool.kept_bytes`. On the CPU a recording shares nothing with others."""
        if self.arena is None:
            return graph.memory_bytes
        blocks = {id(b): b for b in map(block_of, _on_device(tensors)) if b.arena is self.arena}
        return sum(block.nbytes for block in blocks.values())

    def written_by_others(self, tensors: Sequence[Tensor]) -> bool:
        """See `Pool.written_by_others`."""
        return any(
            start <= block_of(t).address < stop
            for t in _on_device(tensors)
            for start, stop in self.earlier
        )

    def memory(self) -> HostMemory:
        """Where the tensors of one more recording live."""
        return HostMemory() if self.arena is None else ArenaMemory(self.arena)

    def trim(self) -> None:
        """Give back what no recording needs any more."""
        with self.lock:
            if self.arena is None or self._graphs or self.capturing:
                return
            self.arena.trim()
            if self.arena.reserved_bytes:  # results that somebody holds, no business of the pool's
                self.arena = Arena(of_graphs=True)


class TapeGraph:
    """One recording: calls with their arguments bound, in order. Keeps no tensor of the caller's
    alive.

    Attributes:
        launch: see `Graph.launch`. 1.3 us beside its calls and copies.
    """

    def __init__(self, pool: TapePool, memory: HostMemory, ports: Ports, recorder: Recorder):
        self.travels: tuple[Travel, ...] = tuple(p.travel for p in ports.inputs)
        self._pool = pool
        self._calls = recorder.calls
        self._replay = replay = Replay(
            steps=recorder.steps,
            reads=[port.point for port in ports.inputs],
            writes=[port.point for port in ports.outputs],
            copied=sum(port.position < 0 for port in ports.inputs),
            memory_bytes=memory.nbytes,
        )
        if pool.arena is None:
            replay.handing.append(Handing(replay.steps, recorder, memory, ports))
        self.launch = _bind(replay, pool)
        pool.add(self)

    driver_bytes = 0
    """See `Graph.driver_bytes`: there is no driver beneath."""

    @property
    def memory_bytes(self) -> int:
        """See `Graph.memory_bytes`."""
        return self._replay.memory_bytes

    @property
    def nodes(self) -> int:
        """Number of calls and copies that one launch runs."""
        return self._replay.copied + len(self._replay.steps)

    def settle(self, fresh: Sequence[bool]) -> list[TensorSpec | None]:
        """See `Graph.settle`. On the emulated device, whose copies are a GPU's, nothing changes."""
        with self._pool.lock:
            return self._replay.settle(fresh)

    def scalar_patch(
        self, numbers: Sequence[float], confirmed: Ambiguities = frozenset()
    ) -> TapeScalarPatch:
        """See `Graph.scalar_patch`. Nothing is in doubt."""
        places = {value: i for i, value in reversed(list(enumerate(numbers)))}
        return TapeScalarPatch(self._pool, self._replay.steps, self._calls, places)

    def reset(self) -> None:
        """Free the recording; a launch after that is an error. Idempotent."""
        with self._pool.lock:
            self._replay.clear()
            self._calls = []
            self._pool.discard(self)
            self._pool.trim()


@dataclass
class Replay:
    """What a launch does; the lists may change between launches.

    Attributes:
        reads, writes: told of each source and target.
        steps: run after that.
        rests: run last, also after a failure.
        copied: how many of the sources are copied as they are read.
        handing: what is to be decided before the first launch.
        given: what the steps of a launch give.
    """

    steps: list[Step]
    reads: list[Callable[[Tensor], object]]
    writes: list[Callable[[Tensor], object]]
    copied: int
    memory_bytes: int
    rests: list[Step] = field(default_factory=list[Step])
    handing: list[Handing] = field(default_factory=list[Handing])
    given: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    live: bool = True

    def settle(self, fresh: Sequence[bool]) -> list[TensorSpec | None]:
        """Decide which outputs are given; see `Graph.settle`."""
        if not self.handing:
            return [None] * len(fresh)
        handing = self.handing.pop()
        gives = handing.settle(fresh, self.given)
        handing.read_in_place(self.reads, self.rests)
        self.copied -= len(self.rests)
        self.memory_bytes = handing.nbytes
        self.writes[:] = [w for w, spec in zip(self.writes, gives, strict=True) if spec is None]
        return gives

    def clear(self) -> None:
        """Forget everything, in place."""
        self.live, self.copied = False, 0
        for listed in (self.steps, self.reads, self.writes, self.rests, self.handing):
            listed.clear()


def _bind(replay: Replay, pool: TapePool) -> Launch:
    """The launch, with all that it needs in its own variables."""
    reads, writes, steps, given = replay.reads, replay.writes, replay.steps, replay.given
    lock, arena, handing, rests = pool.lock, pool.arena, replay.handing, replay.rests
    # Made once: they are entered by one thread at a time.
    straight, unseen = raw(), no_functions()

    def launch(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[int, Tensor]:
        if recording() is not None:
            raise CaptureError("OL109", "A recording was launched during a capture.")
        with lock:
            if not replay.live:
                raise Released("this recording was reset, so it cannot be launched")
            if handing:
                replay.settle([False] * len(writes))
            with straight, unseen:
                if arena is not None:
                    arena.poison()
                try:
                    for read, source in zip(reads, sources):  # noqa: B905  `strict` takes 0.2 us
                        read(source)
                    if writes:
                        for write, target in zip(writes, targets, strict=True):
                            write(target)
                    for step in steps:
                        step()
                finally:
                    for rest in rests:
                        rest()
            made = given.copy()
            given.clear()
            return made

    return launch


class TapeScalarPatch:
    """Numbers among the arguments of recorded calls; see `Dial`."""

    def __init__(
        self,
        pool: TapePool,
        steps: list[Step],
        calls: Iterable[Call],
        places: dict[float, int],
    ) -> None:
        self._pool, self._steps, self._places = pool, steps, places
        held = [(call, places.keys() & call.numbers()) for call in calls]
        self._calls = [call for call, numbers in held if numbers]
        self.found = frozenset(places[n] for _, numbers in held for n in numbers)

    def write(self, numbers: Sequence[float]) -> None:
        """Bind the calls to these numbers; see `Dial.write`."""

        def change(value: Any) -> Any:
            return numbers[self._places[value]] if self._is_one(value) else value

        with self._pool.lock, raw(), no_functions():
            for call in self._calls:
                self._steps[call.position] = call.turn(change)

    def _is_one(self, value: Any) -> bool:
        return type(value) is float and value in self._places


def _on_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if isinstance(t, emulated.TapeTensor)]
