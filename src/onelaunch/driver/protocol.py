"""The duties of a device for onelaunch, and nothing of how it does them.

Two drivers exist. `cuda` records real CUDA graphs. `onelaunch.testing` has the tape, which records
ATen operations over memory of fixed addresses, on any machine. The packages above speak to both
through this protocol, and the tests of the contract run on both.

A recording consists of *ports* and a body. Input ports bring the caller's bytes to a buffer of the
recording, output ports take bytes of the recording to memory of the caller. Each launch is told
where both are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, StrEnum, auto
from threading import RLock
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.driver.aten import Operator
from onelaunch.driver.schedule import Parallel, Schedule
from onelaunch.sizes.dims import Varying

T = TypeVar("T")
Allocate = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]
"""A function that allocates a tensor of a size and strides."""


class Travel(StrEnum):
    """The way of an input to its recording."""

    NODE = "node"  # a memcpy node of the graph
    COPY = "copy"  # `copy_` before the launch, of memory that a memcpy cannot carry
    FILL = "fill"  # `fill_` before the launch, by a 0-dim host tensor
    PAD = "pad"  # a node that copies a smaller input and fills up the rest
    REBIND = "rebind"  # no copy: the kernels that read it are re-pointed to the caller's memory
    ADDRESS = "address"
    """No copy: it is read where it was in the capture, and a call must have that very memory."""
    HOST = "host"  # no copy: the device does not use it


class Provenance(Enum):
    """The provenance of memory in a capture."""

    CAPTURE = auto()  # the capture itself: it lies in its pool
    MEANWHILE = auto()  # another thread has made it since the capture began
    BEFORE = auto()  # it was there before, or its origin is unknown


class InPlace(NamedTuple):
    """The tensors that kernels are to reach where the caller has them, where that is proven.
    `inputs`: the least bytes of an input; None: no inputs. `outputs`: likewise."""

    inputs: int | None
    outputs: int | None = None


class Released(RuntimeError):
    """A launch of a recording that another thread reset, or that has `lost` something."""


class Region(NamedTuple):
    """The bytes that a tensor touches: `[start, stop)` in addresses of one storage."""

    storage: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes, gaps between the tensor's elements included."""
        return self.stop - self.start

    def is_sparse(self, t: Tensor) -> bool:
        """Return whether most of a memcpy of these bytes, which `t` touches, is gaps."""
        return self.nbytes > max(2 * t.numel() * t.element_size(), 512)

    def overlaps(self, other: Region) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


class DevicePool(Protocol):
    """Device memory shared by recordings that never run at the same time."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that the pool holds now."""
        ...

    def kept_bytes(self, graph: Graph, tensors: Sequence[Tensor]) -> int:
        """Count the bytes that no later recording can use while `graph` and its `tensors` exist."""
        ...

    def written_by_others(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether recordings older than the last capture may write to its `tensors`. They then
        lie in memory that the pool had before."""
        ...


class OperatorCall(Protocol):
    """A call of an operation, taken apart; see `OpCall`."""

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_device: list[Tensor]
    storages: dict[int, int]
    with_memory: list[tuple[Tensor, int]]


class Lanes(Protocol):
    """The watch over a capture's operations that gives their recording its true order."""

    def run(self, call: OperatorCall, function: Callable[..., T], args: Sequence[Any]) -> T:
        """Run an operation, in memory that operations beside it do not use."""
        ...

    def note(self, call: OperatorCall) -> None:
        """Note what the operation that just ran touched."""


class Capture(Protocol):
    """The requests that a body may make while its operations are recorded."""

    @property
    def lanes(self) -> Lanes | None:
        """The lanes to run operations in; None: the recording is a chain."""
        ...

    def input(
        self,
        source: Tensor,
        buffer: Tensor,
        travel: Travel,
        displacement: int = 0,
        varying: Varying | None = None,
    ) -> None:
        """Add an input port; ports are numbered in the order in which they are added.

        Args:
            source: the tensor of the call under capture, an example for those of later launches.
            buffer: the recording's memory. ``"node"``: uint8 of shape (n,), to which n bytes
                are copied from address ``source.data_ptr() - displacement`` at each launch.
                ``"copy"`` and ``"fill"``: a tensor of the shape of `source`. ``"pad"``: uint8, the
                bytes of `varying`.
            travel: the way of the bytes, but for ``"rebind"``: see `Driver.rebind`.
            displacement: bytes from the start of the copy to `source`'s first element.
            varying: for ``"pad"``: the growth of a smaller, contiguous source to the buffer.
        """

    def staged(self) -> None:
        """Declare that all inputs are there; operations recorded from now on read them. Once."""

    def output(self, buffer: Tensor, displacement: int = 0, varying: Varying | None = None) -> None:
        """Add an output port: at the end of each launch, copy `buffer` (uint8, shape (n,)) to
        address ``target.data_ptr() - displacement``, after everything recorded so far. With
        `varying`: the first rows, as many as the target, which is contiguous, has."""

    def provenance(self, storage: torch.UntypedStorage) -> Provenance:
        """Tell where memory comes from."""
        ...


class Rewind(Protocol):
    """The random states that a callable saves and sets, over the captures of one recording."""

    @property
    def done(self) -> bool:
        """True if the last capture is final; else another has to follow."""
        ...

    @property
    def used(self) -> bool:
        """True if a state was saved or set in the last capture."""
        ...


Ambiguities = frozenset[tuple[int, ...]]  # places in the arguments of recorded operations


class AmbiguousMatch(Exception):
    """A value that looks like one of the numbers, and may be half an address. Its `places` hold the
    numbers if another recording, with other numbers, has matches there, too."""

    def __init__(self, places: Ambiguities) -> None:
        super().__init__(f"{len(places)} numbers may be halves of addresses")
        self.places = places


class ScalarPatch(Protocol):
    """Numbers in a recording that can be patched; see `Graph.scalar_patch`."""

    held: frozenset[int]  # positions of the numbers that some recorded operation holds

    def write(self, numbers: Sequence[float]) -> None:
        """Set the numbers of all later launches. Launches that are queued keep theirs. Costs 1 us
        for each kernel that holds one."""


class Launch(Protocol):
    """A function that replays a recording: `Graph.launch`."""

    def __call__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None: ...


class Graph(Protocol):
    """One instantiated recording."""

    travels: tuple[Travel, ...]  # the way of each input port's bytes
    rebound: frozenset[int]
    """The output ports that kernels write in the caller's memory; all others are copied."""
    schedule: Schedule | None
    """The lanes of its operations; None if each node waits for the one before it."""

    @property
    def nodes(self) -> int:
        """Number of nodes (kernels and copies) that one launch runs."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Device bytes that the pool grew by for this recording."""
        ...

    @property
    def driver_bytes(self) -> int:
        """Device bytes that the driver took for its own structures, outside the pool."""
        ...

    @property
    def lost(self) -> str | None:
        """The loss, in words, of a library's data for the recording, such as a plan of cuFFT. None
        while it can be launched."""
        ...

    def launch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Bring the sources in, run, take the results to the targets; asynchronous on a device.

        Runs on the caller's current stream, after every earlier launch of the same pool. One tensor
        per port, in order, of the captured dtype, sizes and strides. Safe from any thread.

        Raises:
            Released: the recording was reset, or has `lost` what it needs.
        """

    def scalar_patch(
        self, numbers: Sequence[float], confirmed: Ambiguities = frozenset()
    ) -> ScalarPatch | None:
        """Find the places where the recorded operations hold these numbers, their negatives or
        their reciprocals, in any precision. Return None if the recording cannot be changed.

        The numbers must be unlike all others of the recording. Costs as much as the instantiation.
        `confirmed`: places where a match is known to be a number.

        Raises:
            AmbiguousMatch: other places may hold a number or half an address.
        """
        ...

    def reset(self) -> None:
        """Free the recording; a launch after that is an error. Idempotent."""


class Driver(Protocol):
    """A device that can record and replay."""

    tensor_class: type[Tensor]
    """The class of the device's tensors besides `nn.Parameter`: memory and nothing more."""

    computes_on_host: bool  # True if the host's kernels and random generators serve the device

    compiler: Literal["inductor", "aten"] | None
    """The compiler with code that is recorded like torch's own; None: no compiler."""

    demands_capturable: bool
    """True if torch refuses, in a capture, an optimizer that is not marked capturable."""

    float32_rounding: float  # relative difference between two float32 kernels that compute the same

    lock: RLock
    """The lock of `exclusive`. The holder may wait for the thread of a backward, which may
    therefore only try it."""

    # Memory. `t` is any strided tensor of this driver.
    def region(self, t: Tensor) -> Region:
        """Find the bytes that `t` touches; `start == stop` for an empty tensor."""
        ...

    def storage(self, t: Tensor) -> int:
        """Name the storage of `t` as `region` does, in a quarter of the time."""
        ...

    def alias(
        self,
        base: Tensor,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> Tensor:
        """Make a tensor over `base`'s storage, `offset` bytes after `base`'s first element. It has
        no autograd; conj and neg bits are not set."""
        ...

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate uint8 memory of shape (nbytes,), with a storage of its own, aligned for every
        kernel. It is from the pool inside `capture`, from the ordinary allocator outside."""
        ...

    def allocator(self, spec: TensorSpec) -> Allocate:
        """Make a function that allocates a tensor of this kind, its values undefined, in the
        ordinary allocator. It runs at every call, so it must be quick."""
        ...

    def varies(self, device: torch.device) -> bool:
        """Prepare ports of varying size; False where they do not work. Not in a capture."""
        ...

    # State.
    def capturing(self) -> bool:
        """Tell whether somebody is recording the current stream (or thread) right now."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold `lock`: one warm-up or capture at a time in the process; re-entrant in a thread."""
        ...

    # Recording. Both are called inside `exclusive()`.
    def new_pool(self, device: torch.device, beside: DevicePool | None = None) -> DevicePool:
        """Make a pool, without recordings. `beside`: a pool of separate memory whose launches must
        not overlap with the new pool's. A backward reads memory that a forward wrote."""
        ...

    def stream_reader(self, device: torch.device) -> Callable[[], int]:
        """Make a function that gives the handle of the stream that a thread works on: 0.1 us."""
        ...

    def join(self, streams: Sequence[object]) -> None:
        """Let the capture under way end after the work of these streams in it, if there is any."""

    def new_stream(self, device: torch.device) -> object:
        """Make a stream that nobody else works on, to run and capture on; None: no streams."""
        ...

    def run_on_capture_stream(
        self, run: Callable[[], T], device: torch.device, stream: object = None
    ) -> T:
        """Run on the stream that will capture, ordered after and before the caller's stream. On a
        `stream` of one's own it may run outside `exclusive()`. Tensors of the result are safe to
        use on the caller's stream."""
        ...

    def foresee(
        self, run: Callable[[], T], device: torch.device, staged: Sequence[int]
    ) -> tuple[T, int]:
        """Run, and count the bytes of a pool for a recording of `run` alone. `staged`: the bytes of
        each input buffer that the recording will have besides. The second result is 0 where the
        driver cannot tell."""
        ...

    def rewind(self, device: torch.device, after: Rewind | None = None) -> Rewind:
        """Make a `Rewind` for the captures of one recording. `after`: another recording's rewind,
        whose saved states this recording may set. For a backward it is the forward's."""
        ...

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
    ) -> tuple[Graph, T]:
        """Record the operations of `body`, and return the graph with the body's result. Afterwards
        older memory and the random state are as they were. On any exception everything is freed,
        and the exception comes through. Tensors that the body's result refers to stay valid memory
        of the recording; later recordings of the pool may reuse the rest of its memory.

        Args:
            stream: made by `new_stream`; None: the stream of warm-ups.
            bundled: let small ports travel together, which `rebind` does not take apart; outputs
                then come after all else of the body.
            rewind: None: a body that saves or sets random state is refused.
            parallel: let operations run at the same time that need not wait for each other; see
                `Capture.lanes`. ``"auto"``: if the branches are faster than the chain, measured
                with the tensors of this call, whose memory is afterwards as it was.
            draws: False lets other threads draw from the device's default generator meanwhile.

        Raises:
            DrawsAfterAll: the body draws from that generator, in spite of `draws`.
            CaptureError: OL111, out of memory; OL109, a refusal of the device without a better
                code, raised from the original.
        """
        ...

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
        """Make a graph like `graph` in which kernels read ``"node"`` inputs, and write outputs,
        where the caller has them.

        `body` is recorded again, at other addresses, so it must have no effects of its own. Each
        port is rebound only if a trial on poisoned buffers agrees with `graph` bit for bit.
        `state`, the tensors that the recording writes, is restored after the trial. Ports without a
        proof are copied. `graph` itself is returned where nothing could be rebound.

        Args:
            filled: tensors in the recording's memory, beside its outputs, that are read after a
                launch: saved tensors of a backward.
            stream: see `capture`.
        """
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device."""

    def finish(self, device: torch.device) -> None:
        """Wait for this thread's stream, also while another thread captures."""
