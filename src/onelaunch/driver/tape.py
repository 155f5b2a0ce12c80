"""The tape: a driver that records ATen operations, and repeats them at the same addresses.

It runs on any machine, over plain CPU tensors or over the emulated device of `emulated`, and gives
the contract of `driver` without a GPU. It is not fast in the way a CUDA graph is: a launch calls
each recorded operation from Python.
"""

# Recording is done with the dispatcher's own tools, which torch keeps in `torch._C`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from onelaunch.driver import emulated
from onelaunch.driver.arena import Arena
from onelaunch.driver.backing import NAME, apart, block_of, host, tensor_over
from onelaunch.driver.driver import Capture, Graph, Pool, Region, Released, Travel, Varying
from onelaunch.driver.memory import ArenaMemory, HostMemory
from onelaunch.driver.operators import Step
from onelaunch.driver.recorder import Numbered, Recorder, recording, recording_with
from onelaunch.driver.rows import first_rows, grow
from onelaunch.errors import CaptureError
from onelaunch.shards import local
from onelaunch.source import user_frame
from onelaunch.spec import TensorSpec

T = TypeVar("T")

_EXCLUSIVE = threading.RLock()


def _keys_above_kernels() -> torch._C.DispatchKeySet:
    # A replay repeats what these decided during the capture.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
    for name in ("AutogradFunctionality", "ADInplaceOrView", "AutocastCPU", "Python"):
        keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


_ABOVE = _keys_above_kernels()


def _raw() -> AbstractContextManager[object]:
    """Straight to the kernels: no autograd, autocast or dispatch modes."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE)


_no_functions = torch._C.DisableTorchFunction
"""No function modes either: torch's own tensors need none of them, and they cost a microsecond."""


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


class _Port:
    """One copy between the caller's memory and the recording's, at an address set by launch."""

    def __init__(self, buffer: Tensor, displacement: int, travel: Travel = "node") -> None:
        self.buffer = on_host(buffer)
        self.travel: Travel = travel
        self.displacement = displacement
        self.address = 0
        self._fixed = buffer.data_ptr()
        self._nbytes = buffer.numel()

    def fill(self, source: Tensor) -> None:
        """Copy the values of `source`, of any layout; of the host for ``"fill"``."""
        self.buffer.copy_(on_host(source))

    def point(self, t: Tensor) -> None:
        self.address = t.data_ptr() - self.displacement

    def bring(self) -> None:
        ctypes.memmove(self._fixed, self.address, self._nbytes)

    def take(self) -> None:
        ctypes.memmove(self.address, self._fixed, self._nbytes)


class _RowPort(_Port):
    """A port whose end at the caller may be smaller; `point` takes the caller's tensor itself."""

    def __init__(self, buffer: Tensor, varying: Varying) -> None:
        super().__init__(buffer, 0, "pad")
        self._rows = self.buffer.view(varying.dtype).view(varying.shape)
        self._varying = varying
        self._end: Tensor | None = None

    def point(self, t: Tensor) -> None:
        self._end = on_host(t)

    def bring(self) -> None:
        assert self._end is not None
        grow(self._rows, self._end, self._varying.dims, self._varying.fill)
        self._end = None

    def take(self) -> None:
        assert self._end is not None
        self._end.copy_(first_rows(self._rows, self._end.shape))
        self._end = None


class _Capture:
    """What a body may ask for while it is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.inputs: list[_Port] = []
        self.outputs: list[_Port] = []

    def input(
        self,
        source: Tensor,
        buffer: Tensor,
        travel: Travel,
        displacement: int = 0,
        varying: Varying | None = None,
    ) -> None:
        """Add an input port; see `Capture.input`. The example's bytes are brought in at once."""
        with _raw(), _no_functions():
            port = _RowPort(buffer, varying) if varying else _Port(buffer, displacement, travel)
            self._recorder.save(port.buffer)
            if travel in ("node", "pad"):
                self._recorder.steps.append(port.bring)
                port.point(source)
                port.bring()
            else:
                port.fill(source)
        self.inputs.append(port)

    def output(self, buffer: Tensor, displacement: int = 0, varying: Varying | None = None) -> None:
        """Add an output port; see `Capture.output`."""
        with _raw(), _no_functions():
            port = _RowPort(buffer, varying) if varying else _Port(buffer, displacement)
        self._recorder.steps.append(port.take)
        self.outputs.append(port)


class TapeGraph:
    """One recording: calls with their arguments bound, in order."""

    def __init__(self, pool: TapePool, memory_bytes: int, tape: _Capture, recorder: Recorder):
        self.travels: tuple[Travel, ...] = tuple(p.travel for p in tape.inputs)
        self.memory_bytes = memory_bytes
        self._pool = pool
        self._inputs = tape.inputs
        self._outputs = tape.outputs
        self._steps: list[Step] = recorder.steps
        self._numbered = recorder.numbered
        pool.add(self)
        self._live = True

    driver_bytes = 0
    """See `Graph.driver_bytes`: there is no driver beneath."""

    @property
    def nodes(self) -> int:
        """Number of calls and copies that one launch runs."""
        return len(self._steps)

    def launch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Bring the sources in, run every call, take the results out; see `Graph.launch`."""
        if recording() is not None:
            raise CaptureError("OL109", "A recording was launched during a capture.")
        with self._pool.lock, _raw(), _no_functions():
            if not self._live:
                raise Released("this recording was reset, so it cannot be launched")
            if self._pool.arena is not None:
                self._pool.arena.poison()
            for port, source in zip(self._inputs, sources, strict=True):
                if port.travel in ("node", "pad"):
                    port.point(source)
                else:
                    port.fill(source)
            for port, target in zip(self._outputs, targets, strict=True):
                port.point(target)
            for step in self._steps:
                step()

    def dial(self, numbers: Sequence[float]) -> TapeDial:
        """See `Graph.dial`."""
        places = {value: i for i, value in reversed(list(enumerate(numbers)))}
        return TapeDial(self._pool, self._steps, self._numbered, places)

    def reset(self) -> None:
        """Free the recording; a launch after that is an error. Idempotent."""
        with self._pool.lock:
            self._steps, self._inputs, self._outputs, self._numbered = [], [], [], []
            self._live = False
            self._pool.discard(self)
            self._pool.trim()


class TapeDial:
    """Numbers among the arguments of recorded calls; see `Dial`."""

    def __init__(
        self,
        pool: TapePool,
        steps: list[Step],
        numbered: Sequence[Numbered],
        places: dict[float, int],
    ) -> None:
        self._pool, self._steps, self._places = pool, steps, places
        held = [(call, places.keys() & call.numbers()) for call in numbered]
        self._calls = [call for call, numbers in held if numbers]
        self.found = frozenset(places[n] for _, numbers in held for n in numbers)

    def write(self, numbers: Sequence[float]) -> None:
        """Bind the calls to these numbers; see `Dial.write`."""

        def change(value: Any) -> Any:
            return numbers[self._places[value]] if self._is_one(value) else value

        with self._pool.lock, _raw(), _no_functions():
            for call in self._calls:
                self._steps[call.position] = call.step(change)

    def _is_one(self, value: Any) -> bool:
        return type(value) is float and value in self._places


class TapeDriver:
    """Records and replays on the CPU; see `driver.Driver` for what each method promises."""

    name = "tape"
    lock = _EXCLUSIVE

    def region(self, t: Tensor) -> Region:
        """The bytes that `t` touches, as addresses of this process."""
        t = local(t)
        start = t.data_ptr()
        storage = t.untyped_storage()._cdata
        if t.numel() == 0:
            return Region(storage, start, start)
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return Region(storage, start, start + (last + 1) * t.itemsize)

    def storage(self, t: Tensor) -> int:
        """See `Driver.storage`."""
        return local(t).untyped_storage()._cdata

    def alias(
        self,
        base: Tensor,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> Tensor:
        """A tensor over the storage of `base`; see `Driver.alias`."""
        base = local(base)
        storage = base.untyped_storage()
        first, rest = divmod(int(base.storage_offset()) * base.itemsize + offset, dtype.itemsize)
        if rest:
            raise ValueError(f"{offset} bytes into {base.shape} is no multiple of {dtype}")
        if isinstance(base, emulated.TapeTensor):
            return tensor_over(emulated.TapeTensor, storage, dtype, size, stride, first)
        with _raw(), _no_functions():
            return torch.empty(0, dtype=dtype, device="cpu").set_(
                storage, first, tuple(size), tuple(stride)
            )

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """uint8 memory of shape (nbytes,); torch aligns it to 64 bytes."""
        if device.type == NAME:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        recorder = recording()
        with _raw(), _no_functions():
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            return block if recorder is None else recorder.memory.place(block)

    def allocator(self, spec: TensorSpec) -> Callable[[], Tensor]:
        """See `Driver.allocator`."""
        return functools.partial(
            torch.empty_strided, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
        )

    def sized_allocator(
        self, spec: TensorSpec
    ) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
        """See `Driver.sized_allocator`."""
        return functools.partial(torch.empty_strided, dtype=spec.dtype, device=spec.device)

    def varies(self, device: torch.device) -> bool:
        """Always."""
        return True

    def capturing(self) -> bool:
        """Whether this thread is inside the body of a capture."""
        return recording() is not None

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """One warm-up or capture at a time in the process; re-entrant in a thread."""
        with _EXCLUSIVE:
            yield

    def new_pool(self, device: torch.device) -> TapePool:
        """A pool without recordings."""
        return TapePool(device)

    def stream_reader(self, device: torch.device) -> Callable[[], int]:
        """Always 0: there is one stream."""
        return int

    def new_stream(self, device: torch.device) -> object:
        """None: there is one stream."""
        return None

    def warmup(self, run: Callable[[], T], device: torch.device, stream: object = None) -> T:
        """Run: there is one stream."""
        return run()

    def foresee(
        self, run: Callable[[], T], device: torch.device, staged: Sequence[int]
    ) -> tuple[T, int]:
        """See `Driver.foresee`; plain CPU memory is not watched."""
        if device.type != NAME:
            return run(), 0
        with apart() as arena:
            buffers = [arena.allocate(nbytes) for nbytes in staged]
            result = run()
            del buffers
        nbytes = arena.reserved_bytes
        arena.trim()
        return result, nbytes

    def capture(
        self,
        body: Callable[[Capture], T],
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        stream: object = None,
    ) -> tuple[TapeGraph, T]:
        """Record what `body` does; see `Driver.capture`."""
        assert isinstance(pool, TapePool)
        if recording() is not None:
            raise CaptureError("OL109", "A capture was begun during a capture.")
        with pool.lock:
            pool.capturing = True
            pool.earlier = pool.arena.ranges() if pool.arena is not None and pool.graphs() else []
            try:
                return self._record(body, pool, generators)
            except torch.OutOfMemoryError as error:
                raise CaptureError("OL111", str(error)) from error
            finally:
                pool.capturing = False
                pool.trim()

    def _record(
        self,
        body: Callable[[Capture], T],
        pool: TapePool,
        generators: Sequence[torch.Generator],
    ) -> tuple[TapeGraph, T]:
        memory = pool.memory()
        recorder = Recorder(memory, generators)
        tape = _Capture(recorder)
        torch.clear_autocast_cache()
        try:
            with recording_with(recorder):
                result = body(tape)
        except Exception as error:
            if recorder.refused is not None and error is not recorder.refused:
                raise recorder.refused from error  # the body made something else of the refusal
            if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
                raise _unknown_operator(error) from error
            raise
        finally:
            torch.clear_autocast_cache()
            recorder.restore()
        return TapeGraph(pool, memory.nbytes, tape, recorder), result

    def rebind(
        self,
        graph: Graph,
        body: Callable[[Capture], object],
        pool: Pool,
        state: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> Graph:
        """`graph` itself: the copies of a tape cost little beside its calls."""
        return graph

    def synchronize(self, device: torch.device) -> None:
        """Nothing: a launch has run when it returns."""


def _unknown_operator(error: NotImplementedError) -> CaptureError:
    place = user_frame(error.__traceback__)
    return CaptureError(
        "OL109",
        "A higher-order operator was called, whose branches a recording would fix.",
        where=str(place) if place else None,
    )


def _on_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if isinstance(t, emulated.TapeTensor)]


def on_host(t: Tensor) -> Tensor:
    """A CPU tensor over the memory of `t`: `t` itself, unless it is on the emulated device."""
    return host(t) if isinstance(t, emulated.TapeTensor) else t
