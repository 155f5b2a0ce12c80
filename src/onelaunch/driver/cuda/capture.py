"""One stream capture, and the way back from a failed one."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.branches import Branches
from onelaunch.driver.cuda.bundles import MOST_BYTES, Copy, bundles
from onelaunch.driver.cuda.caches import no_shared_caches
from onelaunch.driver.cuda.device_waits import put_off
from onelaunch.driver.cuda.fft_plans import MORE_PLANS, Plans
from onelaunch.driver.cuda.generators import default_left, is_unregistered_draw
from onelaunch.driver.cuda.lanes import CudaLanes, streams
from onelaunch.driver.cuda.memory import CudaPool, allocations, borrowed
from onelaunch.driver.cuda.ragged import RowNode, captured
from onelaunch.driver.cuda.rewind import CudaRewind
from onelaunch.driver.cuda.streams import anything, bindings, capture_stream, random_order
from onelaunch.driver.cuda.triton_launches import watching_launches
from onelaunch.driver.protocol import Provenance, Travel
from onelaunch.driver.refusals import drawn_after_all
from onelaunch.driver.schedule import Parallel, Schedule
from onelaunch.driver.substitutes import refusing_events
from onelaunch.errors import CaptureError, GraphError, let_go
from onelaunch.gc_pause import no_collection
from onelaunch.sizes.dims import Varying
from onelaunch.source import user_frame

T = TypeVar("T")


@dataclass
class CudaPort:
    """A way in or out of a recording."""

    address: int  # the recording's end
    nbytes: int
    displacement: int  # bytes from the start of the copy to the caller's first element
    dtype: torch.dtype  # of the caller's tensor; of no use for an output
    travel: Travel
    node: int = 0  # the memcpy node; 0 where there is none
    buffer: Tensor | None = None
    """The recording's memory, where a launch needs it as a tensor; not kept allocated, for each
    launch brings its bytes anew."""
    rows: RowNode | None = None  # the node of a port of varying size
    bundle: tuple[nodes.KernelNode, int] | None = None
    """The node that it shares with others, and its place in it."""


def bring(early: Sequence[tuple[int, CudaPort]], sources: Sequence[Tensor]) -> None:
    """Copy the sources of ports to the recording's memory."""
    with torch.inference_mode():  # whatever mode the buffers were made in, and no autograd
        for index, port in early:
            buffer, source = port.buffer, sources[index]
            assert buffer is not None
            if port.travel == Travel.FILL:
                buffer.fill_(source)
            else:
                buffer.copy_(source)


@dataclass
class CudaRecorder:
    """The ports of a recording under capture: the body's `Capture`."""

    pool: CudaPool
    bundled: bool = False  # true if small ports may share a node
    draws: bool = True  # true if the graph has the default generator
    lanes: CudaLanes | None = None
    rewind: CudaRewind | None = None  # the random state that the body saves and sets
    runnable: bool = True  # see `Branches`
    branches: Branches | None = None  # operations of the graph, if they may run at the same time
    inputs: list[CudaPort] = field(default_factory=list)
    outputs: list[CudaPort] = field(default_factory=list)
    examples: list[Tensor] = field(default_factory=list)
    """The source of each input port, as it was given."""
    held: list[Tensor] = field(default_factory=list)
    """Memory that must not be given away before the capture ends."""
    _waiting: list[tuple[CudaPort, Copy]] = field(default_factory=list)
    _staged: bool = False

    @property
    def index(self) -> int:
        return self.pool.index

    def provenance(self, storage: torch.UntypedStorage) -> Provenance:
        return self.pool.provenance(storage)

    def input(
        self,
        source: Tensor,
        buffer: Tensor,
        travel: Travel,
        displacement: int = 0,
        varying: Varying | None = None,
    ) -> None:
        """See `Capture.input`."""
        port = CudaPort(buffer.data_ptr(), buffer.nbytes, displacement, source.dtype, travel)
        if varying is not None:
            stream = bindings._cuda_getCurrentRawStream(self.index)
            port.rows = captured(
                source.data_ptr(), port.address, varying, self.index, stream, grows=True
            )
        elif travel != Travel.NODE:
            port.buffer = borrowed(buffer)
        elif port.nbytes:
            self._copy(port, port.address, source.data_ptr() - displacement)
        self.inputs.append(port)
        self.examples.append(source)
        self.held.append(buffer)

    def output(self, buffer: Tensor, displacement: int = 0, varying: Varying | None = None) -> None:
        assert self._staged or not self.bundled, "the inputs would be brought in with the outputs"
        port = CudaPort(buffer.data_ptr(), buffer.nbytes, displacement, buffer.dtype, Travel.NODE)
        if varying is not None:
            stream = bindings._cuda_getCurrentRawStream(self.index)
            elsewhere = torch.empty_like(buffer)
            port.rows = captured(
                port.address, elsewhere.data_ptr(), varying, self.index, stream, grows=False
            )
        elif port.nbytes:
            # Captured towards other memory of the pool: a copy onto itself might be left out.
            elsewhere = torch.empty_like(buffer)
            self._copy(port, elsewhere.data_ptr(), port.address)
        self.outputs.append(port)
        self.held.append(buffer)

    def staged(self) -> None:
        """See `Capture.staged`. At the end of a capture the same for the outputs."""
        self._staged = True
        stream = bindings._cuda_getCurrentRawStream(self.index)
        copies = [copy for _, copy in self._waiting]
        if len(copies) > 1:
            placed = bundles(copies, self.index, stream)
            for (port, _), bundle in zip(self._waiting, placed, strict=True):
                port.bundle = bundle
        else:
            for port, copy in self._waiting:
                self._copy_node(port, copy)
        self._waiting.clear()

    def branch(self, graph: torch.cuda.CUDAGraph, lanes: CudaLanes) -> None:
        """Make a chain of a graph, and note what its operations touch."""
        assert self.pool.allocated is not None
        blocks = self.pool.allocated.blocks()
        groups = lanes.groups(graph.raw_cuda_graph(), blocks)
        # A state that is set while it runs is no trial's.
        runnable = self.runnable and not (self.rewind and self.rewind.used)
        self.branches = Branches(graph, self.index, groups, blocks, self._nodes(), runnable)
        self.branches.chain()

    def _nodes(self) -> set[int]:
        ours: set[int] = set()
        for port in (*self.inputs, *self.outputs):
            rows = [] if port.rows is None else [port.rows.kernel.node]
            shared = [] if port.bundle is None else [port.bundle[0].node]
            ours.update([*rows, *shared] or [port.node])
        return ours

    def _copy(self, port: CudaPort, target: int, source: int) -> None:
        copy = Copy(target, source, port.nbytes)
        if self.bundled and port.nbytes <= MOST_BYTES:
            self._waiting.append((port, copy))
        else:
            self._copy_node(port, copy)

    def _copy_node(self, port: CudaPort, copy: Copy) -> None:
        stream = bindings._cuda_getCurrentRawStream(self.index)
        nodes.copy(*copy, stream)
        port.node = nodes.latest(stream)


@dataclass
class Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[CudaPort]
    outputs: list[CudaPort]
    examples: list[Tensor]
    driver_bytes: int
    plans: Plans | None  # the plans of its FFTs, if it has any
    schedule: Schedule | None  # the lanes; None: it is a chain
    draws: bool  # false if it draws nothing from the default generator


def record(
    body: Callable[[CudaRecorder], T],
    pool: CudaPool,
    generators: Sequence[torch.Generator],
    stream: torch.cuda.Stream | None = None,
    bundled: bool = False,
    rewind: CudaRewind | None = None,
    parallel: Parallel = False,
    draws: bool = True,
) -> tuple[Recorded, T]:
    """Capture the work of `body` on `stream`, or on the capture stream of the device; nothing runs.
    `bundled`: let small ports share a node; `body` then calls `Capture.staged`. For the rest, and
    what it raises, see `Driver.capture`."""
    index = pool.index
    stream = stream or capture_stream(index)
    anything(index)  # while memory can still be had outside the pool
    recorder = CudaRecorder(pool, bundled, draws, rewind=rewind, runnable=parallel != "ahead")
    if parallel:
        streams(index)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    if rewind is not None:
        rewind.prepare(graph)
    rewinding = contextlib.nullcontext if rewind is None else rewind.capturing
    order = random_order(index)
    caller = torch.cuda.current_stream(index)
    plans = Plans(index)
    # A launch that draws random numbers waits until the capture is over: beginning it overwrites
    # the tensors that such a launch reads.
    own, allocated = no_shared_caches(index), allocations(index)
    with torch.cuda.device(index), order.lock, no_collection(), own, allocated as pool.allocated:
        if caller.cuda_stream != order.last:
            order.move(caller.cuda_stream)
        stream.wait_stream(caller)
        try:
            with put_off(), torch.cuda.stream(stream):
                begun = _begin(graph, pool, stream, generators, draws)
                try:
                    if parallel:
                        recorder.lanes = CudaLanes(index, stream)
                    with rewinding():
                        result, driver_bytes = _run(body, recorder, graph, stream)
                except BaseException:  # of the callable, or Ctrl-C: the stream is still capturing
                    _recover(begun)
                    raise
        finally:
            pool.allocated = None
            caller.wait_stream(stream)
            if order.marked:
                order.mark()
    ports = recorder.inputs, recorder.outputs, recorder.examples
    try:
        used = plans.used_by(graph)
    except CaptureError:
        graph.reset()
        raise
    schedule = None
    if recorder.branches is not None:
        try:
            schedule = _branched(recorder, recorder.branches, parallel)
        except BaseException:  # Ctrl-C too: it is launched by nobody
            graph.reset()
            raise
    return Recorded(graph, *ports, driver_bytes, used, schedule, draws), result


def _branched(recorder: CudaRecorder, branches: Branches, parallel: Parallel) -> Schedule | None:
    """Give a graph its branches, with the tensors of this call on the current stream."""
    pool = recorder.pool
    stream = torch.cuda.current_stream(pool.index).cuda_stream
    with torch.cuda.device(pool.index), _explained(), pool.order.launch(stream):
        buffered = ((i, p) for i, p in enumerate(recorder.inputs) if p.buffer is not None)
        bring([*buffered], recorder.examples)
        return branches.settle(parallel)


class _Begun(NamedTuple):
    """A capture under way, as far as its end needs to know it."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    pool_id: Any
    generators: Sequence[torch.Generator]
    draws: bool


def _begin(
    graph: torch.cuda.CUDAGraph,
    pool: CudaPool,
    stream: torch.cuda.Stream,
    generators: Sequence[torch.Generator],
    draws: bool,
) -> _Begun:
    others = pool.listed()  # none of them is freed before the id is in use
    with pool.guard:
        begun = _Begun(graph, stream, pool.open(), generators, draws)
        try:
            with contextlib.nullcontext() if draws else default_left(pool.index):
                graph.capture_begin(pool=begun.pool_id, capture_error_mode="thread_local")
        except BaseException as error:  # Ctrl-C may come when it has begun
            captures = not isinstance(error, RuntimeError) and _is_capturing(stream)
            (_recover if captures else _forget)(begun)
            raise
    del others
    return begun


def _run(
    body: Callable[[CudaRecorder], T],
    recorder: CudaRecorder,
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
) -> tuple[T, int]:
    lanes = recorder.lanes
    launches = contextlib.nullcontext() if lanes is None else watching_launches(lanes.launched)
    try:
        with _explained(recorder.draws):
            with refusing_events(torch.cuda.Event, _is_capturing), launches:
                result = body(recorder)
            torch.cuda.set_stream(stream)  # the body may have left another one
            recorder.staged()
            if lanes is not None:
                lanes.join()
            _end(graph)
            if lanes is not None:
                recorder.branch(graph, lanes)
            driver_bytes = _instantiate(graph, recorder.index)
    finally:
        recorder.held.clear()
    return result, driver_bytes


@contextlib.contextmanager
def _explained(draws: bool = True) -> Generator[None]:
    """Raise a CaptureError for a refusal of the device. `draws`: see `CudaRecorder`."""
    try:
        yield
    except RuntimeError as error:
        drawn = not draws and is_unregistered_draw(error)
        place = user_frame(error.__traceback__)
        explained = drawn_after_all(place) if drawn else _explain(error)
        if explained is None:
            raise
        # The frames of the original hold tensors of the pool; the message has what they tell.
        let_go(error)
        raise explained from error


def _is_capturing(stream: torch.cuda.Stream | None) -> bool:
    with torch.cuda.stream(stream):  # with None it changes nothing
        return bindings._cuda_isCurrentStreamCapturing()


def _instantiate(graph: torch.cuda.CUDAGraph, index: int) -> int:
    """Make the executable; returns the bytes that the driver took for it, in steps of 2 MiB. What
    others take or free on the device meanwhile is counted in."""
    before, _ = torch.cuda.mem_get_info(index)
    graph.instantiate()
    after, _ = torch.cuda.mem_get_info(index)
    return max(0, before - after)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # A recording of views alone has no nodes, and is right.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
        graph.capture_end()


_RELEASE: Any = torch.__version__
_leaked: list[torch.cuda.CUDAGraph] = []


def _recover(begun: _Begun) -> None:
    """End the capture so that stream, allocator and generators go on as before."""
    graph, stream = begun.graph, begun.stream
    torch.cuda.set_stream(stream)
    try:
        _end(graph)
    except RuntimeError:
        # Either it had ended already, or CUDA has ended it and refused its graph. Before torch 2.13
        # PyTorch stops there (pytorch#180395): its allocator still believes in the capture, and in
        # 2.11 its generators do.
        if _ended(graph):
            pass
        elif _RELEASE >= (2, 13):
            if _RELEASE < (2, 14):  # whose `reset` gives back the pool of captures that ended well
                bindings._cuda_releasePool(stream.device_index, begun.pool_id)
        elif _RELEASE < (2, 12):
            # Let PyTorch's own way out end a capture that is good; 2.12 would know it for another.
            nodes.begin_capture(stream.cuda_stream)
            anything(stream.device_index).zero_()
            _end(graph)
        else:
            _forget(begun)
            return
    graph.reset()


def _forget(begun: _Begun) -> None:
    """Leave a capture that PyTorch neither began nor ended to the last."""
    if _RELEASE >= (2, 14):
        begun.graph.reset()  # which knows how far it came
        return
    with contextlib.suppress(RuntimeError):  # the allocator may not have got to know of it
        bindings._cuda_endAllocateToPool(begun.stream.device_index, begun.pool_id)
    # Since pytorch#167507 the allocator of pinned memory keeps a pointer to it.
    _leaked.append(begun.graph)
    _capture_nothing(begun)


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _capture_nothing(begun: _Begun) -> None:
    """Make a small capture: its success tells the generators that no capture is under way."""
    graph, index = torch.cuda.CUDAGraph(), begun.stream.device_index
    for generator in begun.generators:
        graph.register_generator_state(generator)
    with contextlib.nullcontext() if begun.draws else default_left(index):
        graph.capture_begin(capture_error_mode="thread_local")
    try:
        anything(index).zero_()
    finally:
        graph.capture_end()
        graph.reset()


_REFUSAL = re.compile(
    r"when stream is capturing|during capture|CUDA graph capture|cudaErrorStreamCapture"
    r"|StreamCaptureStatus|capture mode|capturing stage|capture sequence|capturing stream"
    r"|capturing blocking stream|uncaptured work|CUFFT_ALLOC_FAILED"
)
_ANOTHER_STREAM = re.compile(r"legacy stream|uncaptured work|another stream|unjoined|isolat")
_LOOK_FOR = (
    "keep `loss.detach()` or `loss.item()` of earlier steps, not `loss`, whose graph accumulates "
    "gradients on the stream where it was made; join a side stream again with `wait_stream`"
)


def _explain(error: RuntimeError) -> CaptureError | None:
    """Make the CaptureError for a refusal of the device; None for errors of other origin."""
    if isinstance(error, GraphError):
        return None
    where = user_frame(error.__traceback__)
    message = str(error).partition("\n")[0]
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return CaptureError("OL111", message, where=where)
    if "set_current_seed" in message:  # the generator itself refuses, before it is seen
        return CaptureError("OL106", message, where=where)
    if _REFUSAL.search(str(error)):
        fix = _LOOK_FOR if _ANOTHER_STREAM.search(message) else None
        fix = MORE_PLANS if "CUFFT" in message else fix
        return CaptureError("OL109", message, where=where, fix=fix)
    return None
