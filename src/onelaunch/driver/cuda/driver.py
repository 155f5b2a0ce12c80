"""The CUDA driver: `Driver` with real CUDA graphs."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.call.wrappers import is_wrapped, parts
from onelaunch.driver.cuda import bundles as bundle
from onelaunch.driver.cuda import memory, ragged
from onelaunch.driver.cuda.caches import no_shared_caches, settle_attention
from onelaunch.driver.cuda.capabilities import capabilities
from onelaunch.driver.cuda.capture import record
from onelaunch.driver.cuda.generators import SHARED
from onelaunch.driver.cuda.graph import CudaGraph
from onelaunch.driver.cuda.memory import CudaPool
from onelaunch.driver.cuda.rebind import rebind
from onelaunch.driver.cuda.rewind import CudaRewind
from onelaunch.driver.cuda.streams import bindings, capture_stream, device_index, new_stream
from onelaunch.driver.protocol import Allocate, Capture, DevicePool, Graph, InPlace, Rewind
from onelaunch.driver.schedule import Parallel
from onelaunch.driver.substitutes import watching_resizes

T = TypeVar("T")

_exclusive = threading.RLock()


class CudaDriver:
    """A driver that records CUDA graphs; see `Driver`. Making one starts nothing."""

    tensor_class: type[Tensor] = Tensor
    computes_on_host = False
    compiler: Literal["inductor", "aten"] | None = "inductor"
    demands_capturable = True
    float32_rounding = 1e-2  # the difference that TF32 makes
    lock = _exclusive

    def __init__(self) -> None:
        settle_attention(torch.device("cuda"))  # before the modes of the first call are read

    region = staticmethod(memory.region)
    storage = staticmethod(memory.storage)
    alias = staticmethod(memory.alias)
    empty = staticmethod(memory.empty)

    def allocator(self, spec: TensorSpec) -> Allocate:
        """See `Driver.allocator`. 0.9 us by Inductor's way in, 1.9 by `torch.empty_strided`."""
        index, make = device_index(spec.device), bindings._dynamo.guards._empty_strided_cuda
        current = bindings._cuda_getDevice
        dtype, device = spec.dtype, spec.device

        def allocate(size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
            if current() == index:
                return make(size, stride, dtype)
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

        return allocate

    def varies(self, device: torch.device) -> bool:
        """See `Driver.varies`. Takes 0.1 s the first time."""
        return ragged.kernel.ready(device)

    capturing = staticmethod(getattr(bindings, "_cuda_isCurrentStreamCapturing", lambda: False))
    """Return whether anybody captures the current stream."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """See `Driver.exclusive`; a launch does not wait for it."""
        settle_attention(torch.device("cuda"))
        return _exclusive

    def new_pool(self, device: torch.device, beside: DevicePool | None = None) -> CudaPool:
        """See `Driver.new_pool`. It takes no memory before its first recording."""
        return CudaPool(device, None if beside is None else _own(beside).order)

    def stream_reader(self, device: torch.device) -> Callable[[], int]:
        return functools.partial(bindings._cuda_getCurrentRawStream, device_index(device))

    def join(self, streams: Sequence[object]) -> None:
        for stream in streams:
            if isinstance(stream, torch.cuda.Stream):
                with torch.cuda.stream(stream):
                    forked = torch.cuda.is_current_stream_capturing()
                if forked:
                    torch.cuda.current_stream().wait_stream(stream)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """See `Driver.new_stream`; it is none of torch's pool of them."""
        return new_stream(device_index(device))

    def run_on_capture_stream(
        self, run: Callable[[], T], device: torch.device, stream: object = None
    ) -> T:
        """See `Driver.run_on_capture_stream`. No host sync."""
        index = device_index(device)
        caller, stream = torch.cuda.current_stream(index), _stream(stream, index)
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream), warnings.catch_warnings():
                # In a step, as it is told where it cannot be captured; to warm up it does no harm.
                warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
                result = run()
        finally:
            caller.wait_stream(stream)
        for t in _tensors(result, set()):
            for part in _parts(t):
                part.record_stream(caller)
        return result

    def foresee(
        self, run: Callable[[], T], device: torch.device, staged: Sequence[int]
    ) -> tuple[T, int]:
        """See `Driver.foresee`. The run has memory of its own, as a capture has, so that the bytes
        can be counted. Unused memory then goes back to the device, which waits for the GPU."""
        index = device_index(device)

        with no_shared_caches(index), memory.own_segments(index) as seen:
            buffers = [memory.empty(nbytes, torch.device("cuda", index)) for nbytes in staged]
            result = run()
            del buffers
        memory.give_back()
        return result, seen.nbytes

    def rewind(self, device: torch.device, after: Rewind | None = None) -> CudaRewind:
        assert after is None or isinstance(after, CudaRewind)
        return CudaRewind(device_index(device), after)

    def capture(
        self,
        body: Callable[[Capture], T],
        pool: DevicePool,
        generators: Sequence[torch.Generator] = (),
        stream: object = None,
        bundled: bool = False,
        rewind: Rewind | None = None,
        parallel: Parallel = False,
        draws: bool = True,
    ) -> tuple[CudaGraph, T]:
        pool = _own(pool)
        assert rewind is None or isinstance(rewind, CudaRewind)
        draws = draws or not SHARED
        if rewind is not None:
            draws = rewind.registers(draws)
        bundled = bundled and bundle.kernel.ready(torch.device("cuda", pool.index))
        generators = _of_device(generators, pool.index)
        pool.earlier = pool.ranges.copy() if pool.recordings else memory.Ranges()
        pool.capturing = True
        try:
            with watching_resizes(memory.resized):
                on = _stream(stream, pool.index)
                parallel = capabilities().rebind and parallel
                recorded, result = record(
                    body, pool, generators, on, bundled, rewind, parallel, draws
                )
            grown = pool.memory_bytes - pool.earlier.nbytes
            rewinds = rewind if rewind is not None and (rewind.used or not rewind.done) else None
            graph = CudaGraph(recorded, pool, grown, generators, rewinds)
            if rewinds is not None:
                try:
                    rewinds.finish(recorded.graph, generators)
                except BaseException:  # Ctrl-C too must not leave it in the pool
                    graph.reset()
                    raise
            return graph, result
        finally:
            pool.capturing = False
            pool.release()

    def rebind(
        self,
        graph: Graph,
        body: Callable[[Capture], object],
        state: Sequence[Tensor],
        generators: Sequence[torch.Generator],
        in_place: InPlace,
        filled: Sequence[Tensor] = (),
        stream: object = None,
    ) -> Graph:
        """See `Driver.rebind`. `graph` itself is changed and returned. Costs one or two more
        captures, in memory that is given back. Each port costs up to four launches or more."""
        if isinstance(graph, CudaGraph) and capabilities().rebind:
            own = _of_device(generators, graph.pool.index)
            rebind(graph, body, state, own, in_place, filled, cast(Any, stream))
        return graph

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def finish(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()


def _of_device(generators: Sequence[torch.Generator], index: int) -> list[torch.Generator]:
    """Select a device's generators: with those of another CUDA ends the process."""
    return [g for g in generators if g.device == torch.device("cuda", index)]


def _own(pool: DevicePool) -> CudaPool:
    if not isinstance(pool, CudaPool):
        raise TypeError(f"a pool of this driver is needed, not {type(pool).__name__}")
    return pool


def _stream(given: object, index: int) -> torch.cuda.Stream:
    return given if isinstance(given, torch.cuda.Stream) else capture_stream(index)


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Iterate over the CUDA tensors in containers, dataclasses and plain objects, once each."""
    if id(value) in seen or isinstance(value, type | torch.nn.Module):
        return
    seen.add(id(value))
    inner: list[object] = []
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, dict):
        inner = list(cast("dict[object, object]", value).values())
    elif isinstance(value, tuple):  # of a class, perhaps, that shows itself otherwise
        inner = list(tuple.__iter__(cast("tuple[object, ...]", value)))
    elif isinstance(value, list | set | frozenset):
        inner = list(cast("Sequence[object]", value))
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        inner = list(vars(value).values())
    for item in inner:
        yield from _tensors(item, seen)


def _parts(t: Tensor) -> tuple[Tensor, ...]:
    """List a tensor, or the parts of a sparse, sharded or quantised tensor."""
    if is_wrapped(t):
        return ()  # no later work of this stream comes before what the caller's has by then
    if t.layout is torch.strided:
        return tuple(parts(t))
    if t.layout is torch.sparse_coo:
        return (t._indices(), t._values())
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (t.crow_indices(), t.col_indices(), t.values())
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (t.ccol_indices(), t.row_indices(), t.values())
    return ()
