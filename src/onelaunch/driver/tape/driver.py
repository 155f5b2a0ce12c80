"""The tape: a driver that records ATen operations, and repeats them at the same addresses.

It keeps the contract of `Driver` without a GPU. It is not fast as a CUDA graph is: a launch calls
each recorded operation from Python.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec, extent_bytes
from onelaunch.call.wrappers import local
from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.protocol import Capture, DevicePool, Graph, InPlace, Region, Rewind
from onelaunch.driver.tape.graph import TapeGraph, TapePool
from onelaunch.driver.tape.ports import Ports
from onelaunch.driver.tape.recorder import TapeRecorder, is_recording, recording, recording_with
from onelaunch.driver.tape.rewind import TapeRewind
from onelaunch.errors import CaptureError
from onelaunch.source import user_frame
from onelaunch.unwinding import unwound

T = TypeVar("T")

_EXCLUSIVE = threading.RLock()


class TapeDriver:
    """A driver that records and replays on the CPU; see `Driver` for the promise of each method."""

    tensor_class: type[Tensor] = Tensor
    computes_on_host = True
    compiler: Literal["inductor", "aten"] | None = None
    demands_capturable = False
    float32_rounding = 1e-3
    lock = _EXCLUSIVE

    def region(self, t: Tensor) -> Region:
        t = local(t)
        start = t.data_ptr()
        stop = start + extent_bytes(t.shape, t.stride(), t.dtype)
        return Region(t.untyped_storage()._cdata, start, stop)

    def storage(self, t: Tensor) -> int:
        return local(t).untyped_storage()._cdata

    def alias(
        self,
        base: Tensor,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> Tensor:
        base = local(base)
        first, rest = divmod(int(base.storage_offset()) * base.itemsize + offset, dtype.itemsize)
        if rest:
            raise ValueError(f"{offset} bytes into {base.shape} is no multiple of {dtype}")
        return self.over(base.untyped_storage(), dtype, size, stride, first)

    def over(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> Tensor:
        """Make a tensor over a storage, its first element `offset` elements after the first."""
        with raw(), no_functions():
            return torch.empty(0, dtype=dtype, device="cpu").set_(
                storage, offset, tuple(size), tuple(stride)
            )

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Driver.empty`; torch aligns it to 64 bytes."""
        recorder = recording()
        with raw(), no_functions():
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            return block if recorder is None else recorder.memory.place(block)

    def allocator(self, spec: TensorSpec) -> Callable[[], Tensor]:
        return functools.partial(
            torch.empty_strided, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
        )

    def sized_allocator(
        self, spec: TensorSpec
    ) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
        return functools.partial(torch.empty_strided, dtype=spec.dtype, device=spec.device)

    def varies(self, device: torch.device) -> bool:
        """See `Driver.varies`: they always work."""
        return True

    capturing = staticmethod(is_recording)

    def exclusive(self) -> AbstractContextManager[Any]:
        return _EXCLUSIVE

    def new_pool(self, device: torch.device, beside: DevicePool | None = None) -> TapePool:
        return TapePool()

    def stream_reader(self, device: torch.device) -> Callable[[], int]:
        """See `Driver.stream_reader`: there is one stream, 0."""
        return int

    def join(self, streams: Sequence[object]) -> None:
        """See `Driver.join`: there is one stream."""

    def new_stream(self, device: torch.device) -> object:
        """See `Driver.new_stream`: there is one stream."""
        return None

    def warmup(self, run: Callable[[], T], device: torch.device, stream: object = None) -> T:
        """See `Driver.warmup`: there is one stream."""
        return run()

    def foresee(
        self, run: Callable[[], T], device: torch.device, staged: Sequence[int]
    ) -> tuple[T, int]:
        """See `Driver.foresee`. The host's memory is not watched."""
        return run(), 0

    def rewind(self, device: torch.device, after: Rewind | None = None) -> TapeRewind:
        return TapeRewind([torch], after)

    def capture(
        self,
        body: Callable[[Capture], T],
        pool: DevicePool,
        generators: Sequence[torch.Generator] = (),
        stream: object = None,
        bundled: bool = False,
        rewind: Rewind | None = None,
    ) -> tuple[TapeGraph, T]:
        assert isinstance(pool, TapePool)
        assert rewind is None or isinstance(rewind, TapeRewind)
        if is_recording():
            raise CaptureError("OL109", "A capture was begun during a capture.")
        with pool.lock, pool.growing():
            try:
                return self._record(body, pool, generators, rewind)
            except torch.OutOfMemoryError as error:
                raise CaptureError("OL111", str(error)) from error

    def _record(
        self,
        body: Callable[[Capture], T],
        pool: TapePool,
        generators: Sequence[torch.Generator],
        rewind: TapeRewind | None,
    ) -> tuple[TapeGraph, T]:
        memory = pool.memory()
        recorder = TapeRecorder(memory, generators)
        ports = Ports(recorder)
        result: T | None = None
        torch.clear_autocast_cache()
        try:
            rewinding = nullcontext() if rewind is None else rewind.capturing(recorder)
            with unwound(), recording_with(recorder), rewinding:
                result = body(ports)
        except Exception as error:
            if recorder.refused is None:
                if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
                    raise _unknown_operator(error) from error
                raise
        finally:
            torch.clear_autocast_cache()
            recorder.restore()
        if recorder.refused is not None:  # whatever the body made of it
            raise recorder.refused
        return TapeGraph(pool, memory, ports, recorder.steps), cast(T, result)

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
        """See `Driver.rebind`. Copies cost little beside the calls of a tape: they stay, and what a
        launch leaves in the recording's end of such ports is overwritten."""
        assert isinstance(graph, TapeGraph)
        graph.reach(in_place, [self.region(t) for t in (*state, *filled)])
        return graph

    def synchronize(self, device: torch.device) -> None:
        """See `Driver.synchronize`: a launch has run when it returns."""


def _unknown_operator(error: NotImplementedError) -> CaptureError:
    place = user_frame(error.__traceback__)
    return CaptureError(
        "OL109",
        "A higher-order operator was called, whose branches a recording would fix.",
        where=place,
    )
