"""An instantiated recording and its launch.

The capture made a copy node for each argument, from the caller's memory into the recording's; see
`capture.CudaRecorder`. A launch gives the nodes the addresses of this call, and launches the graph.
Where kernels read memory in place, memory of another alignment than in the capture is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.driver.cuda import bundles as bundle
from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.bundles import Bundled
from onelaunch.driver.cuda.capabilities import capabilities
from onelaunch.driver.cuda.capture import CudaPort, Recorded, bring
from onelaunch.driver.cuda.memory import CudaPool, Ranges, beside_captures
from onelaunch.driver.cuda.ragged import point
from onelaunch.driver.cuda.rewind import CudaRewind
from onelaunch.driver.cuda.scalars import CudaScalarPatch
from onelaunch.driver.cuda.streams import bindings, random_order
from onelaunch.driver.protocol import Ambiguities, Launch, Released, Travel


@dataclass
class CopyEnd:
    """The caller's end of a port that travels by a memcpy node."""

    port: int
    displacement: int
    node: nodes.CopyNode
    setter: nodes.Setter
    rest: int

    @property
    def prepared(self) -> tuple[Any, ...]:
        """The parts that a launch uses, flat."""
        function, arguments, _ = self.setter
        return self.port, self.displacement, self.node.fields, function, arguments


class Direct(NamedTuple):
    """An input that kernels read, or an output that they write, where the caller has it. `words`:
    the arguments in place, each with its distance from the first byte."""

    port: int
    displacement: int
    address: int  # the recording's own memory for it
    nbytes: int
    misaligned: int  # the bits of an address that must be zero, as they are in `address`
    words: list[tuple[Any, int]]


@dataclass
class Wiring:
    """The places, which may change, where each launch writes the caller's addresses."""

    read_ends: dict[int, CopyEnd] = field(default_factory=dict)
    write_ends: dict[int, CopyEnd] = field(default_factory=dict)
    """Port -> end, also for ports that kernels reach directly."""
    reads: list[tuple[Any, ...]] = field(default_factory=list)  # the ends that a launch copies
    writes: list[tuple[Any, ...]] = field(default_factory=list)
    directs: list[Direct] = field(default_factory=list)
    places: list[Direct] = field(default_factory=list)
    """The inputs, and the outputs, that kernels reach where the caller has them."""
    patches: list[nodes.Setter] = field(default_factory=list)
    """The calls that take the addresses of both to the kernels."""
    own: list[tuple[list[tuple[Any, int]], nodes.Setter]] = field(default_factory=list)
    """The nodes with kernels of our own: their words with the values at rest, and setters."""
    grows: list[tuple[Any, ...]] = field(default_factory=list)
    shrinks: list[tuple[Any, ...]] = field(default_factory=list)
    """Inputs, and outputs, of varying size, in the form for a launch."""
    gathers: list[Bundled] = field(default_factory=list)
    scatters: list[Bundled] = field(default_factory=list)
    """Nodes that several inputs, or outputs, share, in the form for a launch."""

    def rest(self) -> list[nodes.Setter]:
        """Point everything at the recording's own memory; the setters are still to be called."""
        for end in self.read_ends.values():
            end.node.fields.srcDevice = end.rest
        for end in self.write_ends.values():
            end.node.fields.dstDevice = end.rest
        for direct in (*self.directs, *self.places):
            for word, distance in direct.words:
                word.value = direct.address + distance
        for words, _ in self.own:
            for word, value in words:
                word.value = value
        ends = (*self.read_ends.values(), *self.write_ends.values())
        own = (setter for _, setter in self.own)
        return [*(end.setter for end in ends), *self.patches, *own]

    def clear(self) -> None:
        for kept in vars(self).values():
            kept.clear()


class CudaGraph:
    """A recording; see `Graph`. Keeps none of the caller's tensors. `launch`: a function. It takes
    about 2.5 us of host time more than a bare `replay()` with an input and an output by node."""

    launch: Launch

    def __init__(
        self,
        recorded: Recorded,
        pool: CudaPool,
        memory_bytes: int,
        generators: Sequence[torch.Generator],
        rewind: CudaRewind | None = None,
    ) -> None:
        self.inputs = recorded.inputs
        self.outputs = recorded.outputs
        self.memory_bytes = memory_bytes
        self.driver_bytes = recorded.driver_bytes
        self.travels: tuple[Travel, ...] = tuple(port.travel for port in self.inputs)
        self.rebound = frozenset[int]()
        self.wiring = Wiring()
        self.nodes = _wire(self.wiring, recorded, pool.index)
        self.schedule = recorded.schedule
        self.launch, self._stop = _bind(recorded, pool, self.wiring, generators, rewind)
        self._plans = recorded.plans
        if self._plans is not None:
            self.launch = self._plans.checked(self.launch)
        with pool.guard:
            pool.recordings.add(self)
        self.draws = recorded.draws  # false if it draws nothing from the default generator
        self._graph: torch.cuda.CUDAGraph | None = recorded.graph
        # Last, so that it also goes last, and finds its memory unused.
        self.pool = pool

    @property
    def raw(self) -> tuple[int, int]:
        """Handles of the graph and of its executable."""
        if self._graph is None:
            raise Released(_GONE)
        return self._graph.raw_cuda_graph(), self._graph.raw_cuda_graph_exec()

    @property
    def lost(self) -> str | None:
        """See `Graph.lost`."""
        return None if self._plans is None else self._plans.lost

    def scalar_patch(
        self, numbers: Sequence[float], confirmed: Ambiguities = frozenset()
    ) -> CudaScalarPatch | None:
        """See `Graph.scalar_patch`. None too where kernels reach the caller's memory: a launch then
        sets their arguments from copies of its own."""
        if not capabilities().rebind or self.wiring.patches:
            return None
        with torch.cuda.device(self.pool.index):
            return CudaScalarPatch(self.raw, self.pool.order.lock, numbers, confirmed)

    def reset(self) -> None:
        """See `Graph.reset`. The pool's memory goes back once nothing else refers to it."""
        if self._graph is None:
            return
        with self.pool.guard:
            self.pool.recordings.discard(self)
        self._stop()
        self._graph = None
        self.inputs, self.outputs = [], []
        self.pool.release()


def _wire(wiring: Wiring, recorded: Recorded, index: int) -> int:
    """Prepare the ends of all ports; returns the number of nodes."""
    graph = recorded.graph
    executable = graph.raw_cuda_graph_exec()
    with torch.cuda.device(index):
        for ports, ends, listed in (
            (recorded.inputs, wiring.read_ends, wiring.grows),
            (recorded.outputs, wiring.write_ends, wiring.shrinks),
        ):
            for number, port in enumerate(ports):
                if port.node:
                    ends[number] = _end(number, port, executable)
                if port.rows is not None:
                    setter = port.rows.kernel.setter(executable)
                    wiring.own.append(
                        ([*zip(port.rows.words, port.rows.rest, strict=True)], setter)
                    )
                    listed.append(port.rows.prepared(number, setter))
        wiring.gathers.extend(_shared(wiring, recorded.inputs, bundle.source, executable))
        wiring.scatters.extend(_shared(wiring, recorded.outputs, bundle.target, executable))
        nodes.apply(wiring.rest())
    wiring.reads.extend(end.prepared for end in wiring.read_ends.values())
    wiring.writes.extend(end.prepared for end in wiring.write_ends.values())
    return len(nodes.handles(graph.raw_cuda_graph()))


def _shared(
    wiring: Wiring,
    ports: Sequence[CudaPort],
    caller: Callable[[nodes.KernelNode, int], Any],
    executable: int,
) -> Iterator[Bundled]:
    """Prepare the nodes that several ports share; `caller` gives the word of the caller's end."""
    nodes_of = dict[int, tuple[nodes.KernelNode, list[Any], list[tuple[Any, int]]]]()
    for number, port in enumerate(ports):
        if port.bundle is not None:
            node, place = port.bundle
            word = caller(node, place)
            _, ends, rest = nodes_of.setdefault(id(node), (node, [], []))
            ends.append((number, port.displacement, word))
            rest.append((word, port.address))
    for node, ends, rest in nodes_of.values():
        setter = node.setter(executable)
        wiring.own.append((rest, setter))
        yield ends, setter.function, setter.arguments


def _end(index: int, port: CudaPort, executable: int) -> CopyEnd:
    node = nodes.CopyNode(port.node)
    # At rest a port copies the recording's memory onto itself.
    return CopyEnd(index, port.displacement, node, node.setter(executable), port.address)


_GONE = "this recording was reset and cannot be launched any more"


def _bind(
    recorded: Recorded,
    pool: CudaPool,
    wiring: Wiring,
    generators: Sequence[torch.Generator],
    rewind: CudaRewind | None,
) -> tuple[Launch, Callable[[], None]]:
    """Make the launch, with its own variables, and a function that ends it."""
    graph, index, order = recorded.graph, pool.index, pool.order
    reads, writes, patches = wiring.reads, wiring.writes, wiring.patches
    directs, places = wiring.directs, wiring.places
    grows, shrinks = wiring.grows, wiring.shrinks
    gathers, scatters = wiring.gathers, wiring.scatters
    early = [(i, port) for i, port in enumerate(recorded.inputs) if port.buffer is not None]
    lock, raw_stream, ranges = order.lock, bindings._cuda_getCurrentRawStream, pool.ranges
    replay = _plain_replay(graph, index)
    replay_random = _random_replay(graph, index, generators, rewind)
    # Whether a launch draws random numbers, or needs their place: not known before the first.
    drawing = recorded.draws or generators or rewind is not None
    random: bool | None = None if drawing else False
    live = True

    def launch(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        nonlocal random
        with lock:
            if not live:
                raise Released(_GONE)
            stream = raw_stream(index)
            if stream != order.last:
                order.move(stream)
            elsewhere: Sequence[tuple[int, int, int]] = ()
            try:
                for port, displacement, fields, function, arguments in reads:
                    fields.srcDevice = sources[port].data_ptr() - displacement
                    (code,) = function(*arguments)
                    if code:
                        raise nodes.failure(function.__name__, code)
                for port, displacement, fields, function, arguments in writes:
                    fields.dstDevice = targets[port].data_ptr() - displacement
                    (code,) = function(*arguments)
                    if code:
                        raise nodes.failure(function.__name__, code)
                if gathers:
                    bundle.point(gathers, sources)
                if scatters:
                    bundle.point(scatters, targets)
                if grows:
                    point(grows, sources)
                if shrinks:
                    point(shrinks, targets)
                if patches:
                    _point(directs, sources, ranges, stream)
                    elsewhere = _place(places, targets)
                    nodes.apply(patches)
                if early:
                    bring(early, sources)
                if random is False:
                    replay(stream)
                else:
                    random = replay_random(stream, random)
                for copy in elsewhere:
                    nodes.copy(*copy, stream)
            except BaseException:  # Ctrl-C too: no node may stay pointed at a caller's memory
                nodes.try_all(wiring.rest())
                raise
            if order.marked:
                order.mark()

    guard = pool.guard

    def stop() -> None:
        nonlocal live
        with lock, guard:
            live = False
            wiring.clear()
            early.clear()
            with beside_captures():
                graph.reset()

    return launch, stop


def _plain_replay(graph: torch.cuda.CUDAGraph, index: int) -> Callable[[int], None]:
    """Make a launch that draws no random numbers: 1.4 us by the bindings. `CUDAGraph.replay` takes
    1.9, as it also looks at random numbers and at the current device."""
    slowly = super(torch.cuda.CUDAGraph, graph).replay
    function, executable = nodes.launcher(graph.raw_cuda_graph_exec())
    current_device = bindings._cuda_getDevice
    last, handle = 0, nodes.stream_handle(0)

    def replay(stream: int) -> None:
        nonlocal last, handle
        if current_device() != index:
            slowly()
            return
        if stream != last:
            last, handle = stream, nodes.stream_handle(stream)
        (code,) = function(executable, handle)
        if code:
            raise nodes.failure("cuGraphLaunch", code)

    return replay


def _random_replay(
    graph: torch.cuda.CUDAGraph,
    index: int,
    generators: Sequence[torch.Generator],
    rewind: CudaRewind | None,
) -> Callable[[int, bool | None], bool]:
    """Make a launch that may draw random numbers. It returns True if it drew any, or if another
    launch may need to know the place in the stream of numbers. `CUDAGraph.replay` advances the
    offset of each generator of the graph. A graph that draws nothing is launched without it."""
    replay = super(torch.cuda.CUDAGraph, graph).replay
    rewinding = None if rewind is None else partial(rewind.launch, replay)
    order = random_order(index)
    drawn = (torch.cuda.default_generators[index], *generators)

    def replay_random(stream: int, random: bool | None) -> bool:
        with order.lock:
            if stream != order.last:
                order.move(stream)
            before = None if random else [g.get_offset() for g in drawn]
            needed = replay() if rewinding is None else rewinding()
            if order.marked:
                order.mark()
            # Another thread may have drawn meanwhile: then this only orders more than it must.
            return bool(random or needed) or before != [g.get_offset() for g in drawn]

    return replay_random


def _point(directs: list[Direct], sources: Sequence[Tensor], ranges: Ranges, stream: int) -> None:
    """Write the addresses of the sources to the kernels' arguments."""
    for port, displacement, inside, nbytes, misaligned, words in directs:
        address = sources[port].data_ptr() - displacement
        if address & misaligned or ranges.overlaps(address, address + nbytes):
            # Kernels were chosen by alignment, and may overwrite the pool's memory as they run.
            nodes.copy(inside, address, nbytes, stream)
            address = inside
        for word, distance in words:
            word.value = address + distance


def _place(places: list[Direct], targets: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Write the addresses of the targets, which are fresh memory, to the kernels' arguments. Return
    the copies to make after the launch, for targets of another alignment."""
    elsewhere: list[tuple[int, int, int]] = []
    for port, displacement, inside, nbytes, misaligned, words in places:
        address = targets[port].data_ptr() - displacement
        if address & misaligned:
            elsewhere.append((address, inside, nbytes))
            address = inside
        for word, distance in words:
            word.value = address + distance
    return elsewhere
