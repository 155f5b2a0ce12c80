"""Kernels that reach inputs and outputs where the caller has them: their arguments, and the proof.

A recording and a second one of the same body, made in other memory, are compared argument by
argument. A word is an address of a port if it lies at the same place of the port's buffer in both.
A library may keep addresses where no argument shows them, so each port must also pass a trial. The
recording is launched with its copy node off and its buffer poisoned. It has to give the same as
with the copy, tensors saved for a backward included.

The memory of an output may have belonged to something larger before. The words of that look the
same, and would be written beyond the caller's end. So an output is rebound only if everything
allocated in its memory, in the second recording, lay within it. Otherwise a third recording begins
with free blocks of the outputs' sizes.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.capture import CudaPort, CudaRecorder, Recorded, record
from onelaunch.driver.cuda.graph import CopyEnd, CudaGraph, Direct
from onelaunch.driver.cuda.memory import (
    BLOCK_BYTES,
    CudaPool,
    Ranges,
    alias,
    allocations,
    bytes_of,
    in_blocks,
)
from onelaunch.driver.protocol import Capture, InPlace, Travel
from onelaunch.errors import CaptureError

_KNOWN = frozenset({"KERNEL", "MEMCPY", "MEMSET", "EMPTY", "WAIT_EVENT", "EVENT_RECORD"})
"""Kinds of node whose addresses are all visible; beside any other, nothing is rebound."""

_MOST_ALIGNED = 512
_ROOMS = 4  # number of free blocks for each output: other tensors of its size may live beside it
_APART_BYTES = (1 << 20) + BLOCK_BYTES
"""The least size that the caching allocator takes from its memory for large tensors."""


class PortSpan(NamedTuple):
    """The bytes `[start, stop)` of a port's buffer in one recording, and their place in the other.
    `stop` itself counts too: behind an input nothing else starts, see `memory.empty`."""

    start: int
    stop: int
    other: int
    is_output: bool = False
    has_neighbour: bool = False
    """True if something else was allocated at `stop`, in the other recording."""


class Word(NamedTuple):
    """8 bytes at `offset` of an argument that point `distance` bytes into the memory of a port;
    `distance` is None for an address that stays when the port moves."""

    offset: int
    port: int
    distance: int | None


def moving_words(mine: bytes, other: bytes, spans: dict[int, PortSpan]) -> Iterator[Word]:
    """Yield the words of an argument that lie in a port's memory, in steps of 4 bytes. They moved
    with it from one recording to the other, or stayed."""
    for offset in range(0, min(len(mine), len(other)) - 7, 4):
        (address,) = struct.unpack_from("<Q", mine, offset)
        for port, span in spans.items():
            if not span.start <= address <= span.stop:
                continue
            (moved,) = struct.unpack_from("<Q", other, offset)
            if moved - span.other == address - span.start:
                yield Word(offset, port, address - span.start)
            elif moved == address:
                yield Word(offset, port, None)
            # Anything else is left in padding by whoever used that memory before.


@dataclass
class Matches:
    """The arguments to re-point in one recording. Outputs count on from the inputs."""

    graph: CudaGraph
    ports: dict[int, CudaPort]  # port number -> a port that is to be re-pointed
    words: dict[int, list[tuple[Any, int]]] = field(default_factory=dict)
    """Port number -> (place that holds an address of it, distance)."""
    readers: dict[int, set[int]] = field(default_factory=dict)
    """Port number -> the nodes with such places."""
    setters: dict[int, nodes.Setter] = field(default_factory=dict)
    """Node -> the call that takes its words to the graph."""
    refused: set[int] = field(default_factory=set)  # ports that must be copied

    @property
    def outputs(self) -> list[int]:
        return [number for number in self.ports if number >= len(self.graph.inputs)]

    def note(self, port: int, node: int, word: Any, distance: int) -> None:
        self.words.setdefault(port, []).append((word, distance))
        self.readers.setdefault(port, set()).add(node)


def rebind(
    graph: CudaGraph,
    body: Callable[[Capture], object],
    state: Sequence[Tensor],
    generators: Sequence[torch.Generator],
    in_place: InPlace,
    filled: Sequence[Tensor] = (),
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Let kernels directly reach every port with a proof; see `Driver.rebind`."""
    matches = Matches(graph, _wanted(graph, in_place))
    if not matches.ports:
        return
    index = graph.pool.index
    with torch.cuda.device(index):
        try:
            examples = _compare(matches, body, generators, stream)
            candidates = {
                number
                for number in matches.words.keys() - matches.refused
                if number >= len(examples) or _can_tell(examples[number], matches.ports[number])
            }
            if not candidates:
                return
            drawn = list(generators)
            if graph.draws:
                drawn.append(torch.cuda.default_generators[index])
            with graph.pool.order.lock, torch.inference_mode():
                trial = _TrialLaunches(matches, examples, state, filled, drawn)
                proven = _largest_proven(trial, candidates)
                _direct(matches, proven)
        except torch.cuda.OutOfMemoryError:
            return  # no room for the proof: the copies stay
        except CaptureError as error:
            if error.code == "OL111":
                return  # or for a second recording
            raise
    graph.travels = tuple(
        Travel.REBIND if port in proven else travel for port, travel in enumerate(graph.travels)
    )
    graph.rebound = frozenset(n - len(examples) for n in proven if n >= len(examples))


def _wanted(graph: CudaGraph, in_place: InPlace) -> dict[int, CudaPort]:
    """Return the ports to reach directly, except outputs in memory of inputs."""

    def large(port: CudaPort, least: int | None) -> bool:
        return bool(port.node) and least is not None and port.nbytes >= least

    brought = Ranges()
    brought.set([(port.address, port.address + port.nbytes) for port in graph.inputs])
    ports = {n: p for n, p in enumerate(graph.inputs) if large(p, in_place.inputs)}
    for number, port in enumerate(graph.outputs, len(graph.inputs)):
        inside = brought.overlaps(port.address, port.address + port.nbytes)
        if large(port, in_place.outputs) and not inside:
            ports[number] = port
    return ports


def _largest_proven(trial: _TrialLaunches, candidates: set[int]) -> set[int]:
    try:
        if trial.passes(candidates):
            return candidates
        proven = {port for port in candidates if len(candidates) > 1 and trial.passes({port})}
        return proven if proven and trial.passes(proven) else set()
    except torch.cuda.OutOfMemoryError:
        return set()


# Finding.


def _compare(
    matches: Matches,
    body: Callable[[Capture], object],
    generators: Sequence[torch.Generator],
    stream: torch.cuda.Stream | None,
) -> list[Tensor]:
    """Record again in other memory, and compare. Return the source of each input."""
    graph, index = matches.graph, matches.graph.pool.index
    elsewhere = CudaPool(torch.device("cuda", index))
    bundled = bool(graph.wiring.gathers or graph.wiring.scatters)
    crowded: list[int] = []

    def again(recorder: CudaRecorder) -> None:
        recorder.held += _rooms(crowded, index)
        body(recorder)

    try:
        while True:
            with allocations(index) as history:
                recorded, _ = record(
                    again, elsewhere, generators, stream, bundled, draws=graph.draws
                )
                allocated = history.blocks()
            try:
                outputs = dict(enumerate(recorded.outputs, len(recorded.inputs)))
                alone = {n for n in matches.outputs if _is_alone(outputs[n], allocated)}
                if crowded or len(alone) == len(matches.outputs):
                    _search(matches, recorded, alone, allocated)
                    return recorded.examples
                crowded = [matches.ports[n].nbytes for n in matches.outputs if n not in alone]
            finally:
                recorded.graph.reset()
    finally:
        elsewhere.release()


def _rooms(sizes: list[int], index: int) -> list[Tensor]:
    """Leave free blocks in the pool under capture. Return the tensors between."""
    held: list[Tensor] = []
    free: list[Tensor] = []
    for nbytes in sizes * _ROOMS:
        for size, kept in ((nbytes, free), (min(nbytes, _APART_BYTES), held)):
            kept.append(torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}"))
    return held


def _search(
    matches: Matches, recorded: Recorded, alone: set[int], allocated: Sequence[tuple[int, int]]
) -> None:
    graph, starts = matches.graph, {start for start, _ in allocated}
    mine = nodes.handles(graph.raw[0])
    others = nodes.handles(recorded.graph.raw_cuda_graph())
    kinds = [nodes.kind(node) for node in mine]
    if kinds != [nodes.kind(node) for node in others] or not _KNOWN.issuperset(kinds):
        return
    moved = [*recorded.inputs, *recorded.outputs]
    spans: dict[int, PortSpan] = {}
    for number, port in matches.ports.items():
        is_output = number in matches.outputs
        if not is_output or number in alone:
            start, there = port.address, moved[number].address
            shared = is_output and there + port.nbytes in starts
            spans[number] = PortSpan(start, start + port.nbytes, there, is_output, shared)
    copies = {port.node for port in graph.inputs if port.node}
    # An output may be a copy of an input: one node, whose both ends change.
    outputs = {end.node.node: end for end in graph.wiring.write_ends.values()}
    everything = set(spans)
    own = {graph.outputs[n - len(graph.inputs)].node for n, s in spans.items() if s.is_output}
    for kind, node, other in zip(kinds, mine, others, strict=True):
        if node in copies:
            continue
        if kind == "KERNEL":
            if not _search_kernel(matches, node, other, spans):
                matches.refused |= everything
        elif kind == "MEMCPY" and node in own:
            continue
        elif kind == "MEMCPY":
            _search_memcpy(matches, node, outputs.get(node), spans)
        elif kind == "MEMSET":
            matches.refused |= _inside(nodes.memset_address(node), spans)


def _search_kernel(matches: Matches, node: int, other: int, spans: dict[int, PortSpan]) -> bool:
    a, b = nodes.KernelNode.read(node), nodes.KernelNode.read(other)
    if a is None or b is None or (a.name, a.shape) != (b.name, b.shape):
        return False
    hits = [
        (number, word)
        for number, (x, y) in enumerate(zip(a.blocks, b.blocks, strict=True))
        for word in moving_words(x.raw, y.raw, spans)
    ]
    if hits:
        matches.setters[node] = a.setter(matches.graph.raw[1])
    for number, word in hits:
        if word.distance is None:
            matches.refused.add(word.port)
        elif spans[word.port].is_output and word.distance == matches.ports[word.port].nbytes:
            if not spans[word.port].has_neighbour:  # the end of the output
                matches.refused.add(word.port)
        else:
            matches.note(word.port, node, a.word(number, word.offset), word.distance)
    return True


def _search_memcpy(
    matches: Matches, node: int, output: CopyEnd | None, spans: dict[int, PortSpan]
) -> None:
    copy = nodes.CopyNode(node) if output is None else output.node
    fields = copy.fields
    readable = _inside(fields.srcDevice, spans)
    writable = set[int]()
    if output is None:
        writable = _inside(fields.dstDevice, spans)
        matches.refused |= {port for port in writable if not spans[port].is_output}
    if not copy.linear:
        matches.refused |= readable | writable
    elif readable or writable:
        setter = copy.setter(matches.graph.raw[1]) if output is None else output.setter
        matches.setters[node] = setter
        for port in readable:
            matches.note(port, node, copy.source(), fields.srcDevice - spans[port].start)
        for port in writable:
            matches.note(port, node, copy.target(), fields.dstDevice - spans[port].start)


def _is_alone(port: CudaPort, allocated: Sequence[tuple[int, int]]) -> bool:
    """Return whether nothing larger than an output was allocated where it is."""
    start = port.address
    stop = start + in_blocks(port.nbytes)
    return all(
        start <= address and address + nbytes <= stop
        for address, nbytes in allocated
        if address < stop and address + nbytes > start
    )


def _inside(address: int, spans: dict[int, PortSpan]) -> set[int]:
    return {port for port, span in spans.items() if span.start <= address < span.stop}


def _direct(matches: Matches, ports: set[int]) -> None:
    """Let kernels reach these ports directly from the next launch on, and copy the others."""
    graph, wiring = matches.graph, matches.graph.wiring
    nodes.apply(wiring.rest())
    executable, first = graph.raw[1], len(graph.inputs)
    for port in matches.words:
        nodes.set_enabled(executable, matches.ports[port].node, port not in ports)
    wiring.reads[:] = [end.prepared for p, end in wiring.read_ends.items() if p not in ports]
    writes = [end.prepared for p, end in wiring.write_ends.items() if p + first not in ports]
    wiring.writes[:] = writes
    wiring.directs[:] = [_direct_port(matches, p, p) for p in sorted(ports) if p < first]
    wiring.places[:] = [_direct_port(matches, p, p - first) for p in sorted(ports) if p >= first]
    readers = {node for port in ports for node in matches.readers[port]}
    wiring.patches[:] = [matches.setters[node] for node in sorted(readers)]


def _direct_port(matches: Matches, number: int, place: int) -> Direct:
    port = matches.ports[number]
    aligned = min(port.address & -port.address, _MOST_ALIGNED)
    words = matches.words[number]
    return Direct(place, port.displacement, port.address, port.nbytes, aligned - 1, words)


# Proving.


def _source_bytes(example: Tensor, port: CudaPort) -> Tensor:
    return alias(example, torch.uint8, (port.nbytes,), (1,), -port.displacement)


def flipped(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reverse the order of the elements: each element has a value of the call, but another."""
    size = dtype.itemsize
    whole = data.numel() // size * size
    return torch.cat([data[:whole].view(-1, size).flip(0).flatten(), data[whole:]])


def poison(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Make values that nobody must read: NaN for floats, the call's own values at other places for
    others. A garbage index would be an assertion on the device, and the end of its use."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full_like(data, 0xFF)
    return flipped(data, dtype)


def _storage_bytes(t: Tensor) -> Tensor:
    """Return all memory that `t` is a part of: the callable may write other parts, too."""
    view = torch.empty(0, dtype=torch.uint8, device=t.device)
    return view.set_(t.untyped_storage())  # pyright: ignore[reportArgumentType]


def _can_tell(example: Tensor, port: CudaPort) -> bool:
    """Tell whether results show that the poison was read instead of the input."""
    data = _source_bytes(example, port)
    return not torch.equal(data, poison(data, example.dtype))


class _TrialLaunches:
    """Launches on the call's own values, and their results, bit for bit. A kernel might turn other
    values, even floats, into an index outside of all memory: `roi_align` does."""

    def __init__(
        self,
        matches: Matches,
        examples: Sequence[Tensor],
        state: Sequence[Tensor],
        filled: Sequence[Tensor],
        drawn: Sequence[torch.Generator],
    ) -> None:
        self._matches = matches
        self._graph = matches.graph
        self._examples = examples
        self._state = [_storage_bytes(t) for t in state]
        self._saved = [t.clone() for t in self._state]
        self._filled = [bytes_of(t) for t in filled]
        self._drawn = drawn

    def passes(self, ports: set[int]) -> bool:
        """Tell whether the recording does the same with and without copies of these ports."""
        _direct(self._matches, set())
        sizes = [port.nbytes for port in self._graph.outputs]
        zeros = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in sizes]
        expected, state, _ = self._run(set(), zeros)
        filled = [t.clone() for t in self._filled]
        _direct(self._matches, ports)
        got, changed, inputs = self._run(ports, [~t for t in expected])
        _, untouched = self._sources()
        pairs = zip((*expected, *state, *filled), (*got, *changed, *self._filled), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
        read = (port for port in ports if port < len(self._examples))
        return same and all(torch.equal(inputs[port], untouched[port]) for port in read)

    def _run(
        self, poisoned: set[int], results: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], dict[int, Tensor]]:
        """Launch, and return `results`, the state and the inputs after it."""
        sources, data = self._sources()
        stream = torch.cuda.current_stream().cuda_stream
        for number in poisoned:
            port = self._matches.ports[number]
            if number < len(self._examples):
                bad = poison(data[number], self._examples[number].dtype)
            else:  # read nowhere, unless by an address that no argument shows
                bad = flipped(~results[number - len(self._examples)], torch.int64)
            nodes.copy(port.address, bad.data_ptr(), port.nbytes, stream)
        ports = self._graph.outputs
        targets = [_at(t, port.displacement) for t, port in zip(results, ports, strict=True)]
        with self._undone():
            self._graph.launch(sources, targets)
            written = [t.clone() for t in self._state]
        return results, written, data

    def _sources(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Return a tensor for each port, and port node -> its bytes, in fresh memory."""
        sources: list[Tensor] = []
        data: dict[int, Tensor] = {}
        for number, (example, port) in enumerate(
            zip(self._examples, self._graph.inputs, strict=True)
        ):
            if port.travel != Travel.NODE or not port.nbytes:
                sources.append(example)
                continue
            data[number] = _source_bytes(example, port).clone()
            sources.append(_at(data[number], port.displacement))
        return sources, data

    @contextlib.contextmanager
    def _undone(self) -> Generator[None]:
        """Run, then put the state and the random numbers back."""
        random = [g.get_state() for g in self._drawn]
        try:
            yield
        finally:
            for generator, before in zip(self._drawn, random, strict=True):
                generator.set_state(before)
            for t, saved in zip(self._state, self._saved, strict=True):
                t.copy_(saved)


def _at(data: Tensor, displacement: int) -> Tensor:
    """Find the first element of the tensor whose bytes travel as `data`."""
    return data[displacement:] if displacement else data
