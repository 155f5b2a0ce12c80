"""The tape: a driver that records ATen operations, and repeats them at the same addresses.

It keeps the contract of `Driver` without a GPU, for plain CPU tensors and for those of the emulated
device. It is not fast as a CUDA graph is: a launch calls each recorded operation from Python. There
is one stream, and a launch has run when it returns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.call.wrappers import local
from onelaunch.driver.protocol import Allocate, Capture, DevicePool, Graph, InPlace, Region, Rewind
from onelaunch.driver.schedule import Parallel
from onelaunch.driver.select import register
from onelaunch.driver.substitutes import refusing_events
from onelaunch.errors import CaptureError
from onelaunch.source import user_frame
from onelaunch.testing.arena import NAME, host_over, own_arena
from onelaunch.testing.graph import TapeGraph, TapePool
from onelaunch.testing.lanes import TapeLanes, region
from onelaunch.testing.memory import HostMemory
from onelaunch.testing.ports import Ports
from onelaunch.testing.recorder import TapeRecorder, is_recording
from onelaunch.testing.rewind import TapeRewind
from onelaunch.testing.torch_module import Event
from onelaunch.unwinding import unwound

T = TypeVar("T")

_OPERATOR = "HigherOrderOperator"
_FIXED = "A higher-order operator was called, whose branches a recording would fix."


def install() -> None:
    """Add the emulated device ``"tape"`` to torch and to onelaunch, for the rest of the process.

    Call it before the first backward of the process, since autograd counts the devices only once,
    and not beside a GPU: torch takes the emulated device for its accelerator from then on. It takes
    over torch's PrivateUse1 backend. Starts no CUDA; a second call does nothing.

    Example:
        >>> import torch, onelaunch.testing
        >>> onelaunch.testing.install()
        >>> torch.ones(2, device="tape") * 2
        tensor([2., 2.], device='tape:0')
    """
    from onelaunch.testing.device import register_device  # plain CPU tensors need none of it
    from onelaunch.testing.tensors import ArenaMemory

    register_device()
    register(NAME, lambda: TapeDriver(ArenaMemory))


class TapeDriver:
    """A driver that records and replays on the CPU; see `Driver` for the promise of each method.

    Args:
        holder: the memory of its recordings: plain CPU tensors, or the emulated device's.
    """

    computes_on_host = True
    demands_capturable = False
    float32_rounding = 1e-3
    lock = threading.RLock()

    def __init__(self, holder: type[HostMemory] = HostMemory) -> None:
        self._holder = holder
        self.tensor_class = holder.tensor_class
        self.compiler: Literal["inductor", "aten"] | None = holder.compiler

    def region(self, t: Tensor) -> Region:
        return region(t)

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
        storage = base.untyped_storage()
        if storage.device.type == NAME:
            from onelaunch.testing.tensors import tensor_over

            return tensor_over(storage, dtype, size, stride, first)
        return host_over(storage, dtype, size, stride, first)

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Driver.empty`; torch aligns the memory of the host to 64 bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def allocator(self, spec: TensorSpec) -> Allocate:
        return functools.partial(torch.empty_strided, dtype=spec.dtype, device=spec.device)

    def varies(self, device: torch.device) -> bool:
        return True

    capturing = staticmethod(is_recording)

    def exclusive(self) -> AbstractContextManager[Any]:
        return self.lock

    def new_pool(self, device: torch.device, beside: DevicePool | None = None) -> TapePool:
        return TapePool(self._holder)

    def stream_reader(self, device: torch.device) -> Callable[[], int]:
        return int

    def join(self, streams: Sequence[object]) -> None:
        """See `Driver.join`."""

    def new_stream(self, device: torch.device) -> object:
        return None

    def run_on_capture_stream(
        self, run: Callable[[], T], device: torch.device, stream: object = None
    ) -> T:
        return run()

    def foresee(
        self, run: Callable[[], T], device: torch.device, staged: Sequence[int]
    ) -> tuple[T, int]:
        """See `Driver.foresee`. Plain memory of the host is not watched."""
        if device.type != NAME:
            return run(), 0
        with own_arena() as arena:
            buffers = [arena.allocate(nbytes) for nbytes in staged]
            result = run()
            del buffers
        nbytes = arena.reserved_bytes
        arena.trim()
        return result, nbytes

    def rewind(self, device: torch.device, after: Rewind | None = None) -> TapeRewind:
        return TapeRewind(after)

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
    ) -> tuple[TapeGraph, T]:
        assert isinstance(pool, TapePool)
        assert rewind is None or isinstance(rewind, TapeRewind)
        if is_recording():
            raise CaptureError("OL109", "A capture was begun during a capture.")
        with pool.lock, pool.growing() as memory:
            recorder = TapeRecorder(memory, generators)
            lanes = TapeLanes(recorder.steps, pool.arena) if parallel else None
            ports = Ports(recorder, pool.provenance, lanes)
            result: T | None = None
            torch.clear_autocast_cache()
            try:
                rewinding = nullcontext() if rewind is None else rewind.capturing(recorder)
                events = refusing_events(Event, lambda _: True)
                with unwound(), recorder.recording(), rewinding, events:
                    result = body(ports)
            except Exception as error:
                if recorder.refused is None:
                    if isinstance(error, torch.OutOfMemoryError):
                        raise CaptureError("OL111", str(error)) from error
                    if isinstance(error, NotImplementedError) and _OPERATOR in str(error):
                        place = user_frame(error.__traceback__)
                        raise CaptureError("OL109", _FIXED, where=place) from error
                    raise
            finally:
                torch.clear_autocast_cache()
                recorder.restore()
            if recorder.refused is not None:  # whatever the body made of it
                raise recorder.refused
            schedule = None if lanes is None else lanes.reorder()
            return TapeGraph(pool, memory, ports, recorder.steps, schedule), cast(T, result)

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
        """See `Driver.rebind`. Copies cost little beside the calls of a tape, so they stay. A
        launch overwrites the recording's end of a rebound port when it has run."""
        assert isinstance(graph, TapeGraph)
        graph.reach(in_place, [self.region(t) for t in (*state, *filled)])
        return graph

    def synchronize(self, device: torch.device) -> None:
        """See `Driver.synchronize`."""

    def finish(self, device: torch.device) -> None:
        """See `Driver.finish`."""
