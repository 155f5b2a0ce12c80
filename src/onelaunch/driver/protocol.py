"""What a device must do for onelaunch, and nothing of how.

Two drivers exist: `cuda` records real CUDA graphs; `tape` records ATen operations over memory of
fixed addresses, on any machine. The core speaks to both through this protocol, and the tests of
the contract run on both.

A recording is made of *ports* and a body. Input ports bring the caller's bytes to a buffer of the
recording, output ports take bytes of the recording to memory of the caller; each launch is told
where both are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import RLock
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.sizes.dims import Varying

T = TypeVar("T")

Travel = Literal["node", "copy", "fill", "rebind", "pad"]
"""How an input travels: by a memcpy node of the graph; by `copy_` before the launch (memory that a
memcpy cannot carry); by `fill_` before the launch (a 0-dim host tensor); not at all, because the
kernels that read it are re-pointed; or by a node that copies rows and adds what is missing."""


class Released(RuntimeError):
    """A launch of a recording that another thread reset, so the caller looks further."""


@dataclass(frozen=True)
class Region:
    """The bytes that a tensor touches: `[start, stop)` in addresses of one storage."""

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


class Pool(Protocol):
    """Device memory shared by recordings that never run at the same time."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that the pool holds now."""
        ...

    def kept_bytes(self, graph: Graph, tensors: Sequence[Tensor]) -> int:
        """What of it no later recording can use while `graph` and these tensors of it exist."""
        ...

    def written_by_others(self, tensors: Sequence[Tensor]) -> bool:
        """Whether recordings that were there before the last capture may write to these tensors of
        it: they lie in memory that the pool had already."""
        ...


class Capture(Protocol):
    """What a body may ask for while its operations are recorded."""

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
            source: the tensor of the call under capture, an example of what `launch` will be given.
            buffer: the recording's memory. ``"node"``: uint8 of shape (n,), to which n bytes
                are copied from address ``source.data_ptr() - displacement`` at each launch.
                ``"copy"`` and ``"fill"``: a tensor of the shape of `source`. ``"pad"``: uint8, the
                bytes of `varying`.
            travel: how the bytes travel. ``"rebind"`` is not asked for here: see `Driver.rebind`.
            displacement: bytes between the start of what is copied and `source`'s first element.
            varying: for ``"pad"``: how a source of smaller sizes, contiguous, grows to the buffer.
        """
        ...

    def staged(self) -> None:
        """All inputs are there: what is recorded from now on reads them. To be called once."""
        ...

    def output(self, buffer: Tensor, displacement: int = 0, varying: Varying | None = None) -> None:
        """Add an output port: at the end of each launch, copy `buffer` (uint8, shape (n,)) to
        address ``target.data_ptr() - displacement``, after everything recorded so far.

        With `varying`: the first rows, as many as the target, which is contiguous, has.
        """
        ...


class Rewind(Protocol):
    """The random states that a callable saves and sets, over the captures of one recording."""

    @property
    def done(self) -> bool:
        """Whether the capture before was the last that it takes; else the graph that it gave is no
        good, and the same is to be captured again."""
        ...

    @property
    def used(self) -> bool:
        """Whether a state was saved or set in it."""
        ...


Ambiguities = frozenset[tuple[int, ...]]
"""Places in the arguments of recorded operations."""


class AmbiguousMatch(Exception):
    """What looks like one of the numbers may be something else: half an address.

    Attributes:
        places: where. What looks so at the same places in another recording, of which the numbers
            are others, is the numbers.
    """

    def __init__(self, places: Ambiguities) -> None:
        super().__init__(f"{len(places)} numbers may be halves of addresses")
        self.places = places


class ScalarPatch(Protocol):
    """Numbers in a recording that can be turned; see `Graph.scalar_patch`."""

    found: frozenset[int]
    """Which of the numbers some recorded operation holds, by position."""

    def write(self, numbers: Sequence[float]) -> None:
        """Have every launch from the next one on use these numbers. Launches that are queued keep
        theirs. 1 us for each kernel that holds one."""
        ...


class Launch(Protocol):
    """A function that replays a recording: `Graph.launch`."""

    def __call__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None: ...


class Graph(Protocol):
    """One instantiated recording."""

    @property
    def travels(self) -> tuple[Travel, ...]:
        """How each input port's bytes travel."""
        ...

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

    def launch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Bring the sources in, run, take the results to the targets; asynchronous on a device.

        Runs on the caller's current stream, after every earlier launch of the same pool. One tensor
        per port, in order, of the captured dtype, sizes and strides. Safe from any thread.

        Raises:
            Released: the recording was reset.
        """
        ...

    def scalar_patch(
        self, numbers: Sequence[float], confirmed: Ambiguities = frozenset()
    ) -> ScalarPatch | None:
        """Find where the recorded operations hold these numbers: themselves, their negatives or
        their reciprocals, in any precision. None where what is recorded cannot be changed.

        The numbers must be unlike all others of the recording. Costs as much as the instantiation.

        Args:
            confirmed: places where what looks like a number is one.

        Raises:
            AmbiguousMatch: at other places that cannot be told.
        """
        ...

    def reset(self) -> None:
        """Free the recording; a launch after that is an error. Idempotent."""
        ...


class Driver(Protocol):
    """A device that can record and replay."""

    tensor_class: type[Tensor]
    """The class of the device's tensors besides `nn.Parameter`: memory and nothing more."""

    computes_on_host: bool
    """The host's kernels and random generators serve the device."""

    records_compiled: bool
    """Kernels of Inductor's are recorded like torch's own."""

    demands_capturable: bool
    """In a capture torch refuses an optimizer that is not marked capturable, even a fused one."""

    float32_rounding: float
    """The relative difference between two float32 kernels that compute the same."""

    lock: RLock
    """What `exclusive` holds. A backward runs in a thread for which its holder may be waiting, so
    it may only be tried there."""

    # Memory. `t` is any strided tensor of this driver.
    def region(self, t: Tensor) -> Region:
        """The bytes that `t` touches; `start == stop` for an empty tensor."""
        ...

    def storage(self, t: Tensor) -> int:
        """What `region` names the storage of `t` by. A quarter of the time."""
        ...

    def alias(
        self,
        base: Tensor,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> Tensor:
        """A tensor over `base`'s storage, its first element `offset` bytes after `base`'s first.

        Made without autograd; conj and neg bits are not set.
        """
        ...

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """uint8 memory of shape (nbytes,), a storage of its own, aligned for every kernel: of the
        pool inside `capture`, of the ordinary allocator outside."""
        ...

    def allocator(self, spec: TensorSpec) -> Callable[[], Tensor]:
        """What makes a tensor of this kind in the ordinary allocator, its values undefined; the
        quickest way there is, since it runs at every call."""
        ...

    def sized_allocator(
        self, spec: TensorSpec
    ) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
        """The same for a size and strides that are told at each call."""
        ...

    def varies(self, device: torch.device) -> bool:
        """Whether ports of varying size work here; makes ready what they need. Not in a capture."""
        ...

    # State.
    def capturing(self) -> bool:
        """Whether somebody is recording the current stream (or thread) right now."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """One warm-up or capture at a time in the process; re-entrant in a thread."""
        ...

    # Recording. Both are called inside `exclusive()`.
    def new_pool(self, device: torch.device, beside: Pool | None = None) -> Pool:
        """A pool of its own, without recordings.

        Args:
            beside: a pool that has memory of its own, though its launches and those of the new one
                must not overlap: a backward reads what a forward wrote.
        """
        ...

    def stream_reader(self, device: torch.device) -> Callable[[], int]:
        """What gives the handle of the stream that a thread works on: 0.1 us."""
        ...

    def join(self, streams: Sequence[object]) -> None:
        """In the body of a capture: have it end after what these streams do in it, if anything."""
        ...

    def new_stream(self, device: torch.device) -> object:
        """A stream that nobody else works on, for `warmup` and `capture`; None: there are none."""
        ...

    def warmup(self, run: Callable[[], T], device: torch.device, stream: object = None) -> T:
        """Run on the stream that will capture, ordered after and before the caller's stream.

        On a `stream` of one's own it may run outside `exclusive()`.

        Tensors of the result are safe to use on the caller's stream.
        """
        ...

    def foresee(
        self, run: Callable[[], T], device: torch.device, staged: Sequence[int]
    ) -> tuple[T, int]:
        """`warmup`, and the bytes that a pool would hold for a recording of `run` alone.

        Args:
            staged: the bytes of each input buffer that the recording will have besides.

        The second result is 0 where the driver cannot tell.
        """
        ...

    def rewind(self, device: torch.device, after: Rewind | None = None) -> Rewind:
        """For the captures of one recording, and so that its launches draw the numbers again that
        eager would. `after`: of a recording whose saved states it may set: a backward's forward."""
        ...

    def capture(
        self,
        body: Callable[[Capture], T],
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        stream: object = None,
        bundled: bool = False,
        rewind: Rewind | None = None,
    ) -> tuple[Graph, T]:
        """Record what `body` does, and return the graph with the body's result.

        On the stream of warm-ups, or on one made by `new_stream`. `bundled`: small ports may travel
        together, which `rebind` cannot take apart; outputs then come after all else of the body.
        Without a `rewind` a body that saves or sets random state is refused.

        Nothing that the body did has happened afterwards: memory that existed before, and the
        random state, are as they were. On any exception, everything is freed and the exception
        comes through; where the device's refusal has no better name it is a `CaptureError` OL109
        raised from the original. Out of memory is OL111.

        Tensors that the body's result refers to stay valid memory of the recording; all else that
        it allocated may be reused by later recordings of the pool.
        """
        ...

    def rebind(
        self,
        graph: Graph,
        body: Callable[[Capture], object],
        pool: Pool,
        state: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> Graph:
        """A graph like `graph` in which kernels read `"node"` inputs where the caller has them.

        `body` is recorded again, at other input addresses, so it must have no effects of its own.
        Each input is rebound only if a trial on poisoned buffers agrees with `graph` bit for bit;
        `state`, the tensors that the recording writes, is restored after the trial. Inputs that
        cannot be proven stay `"node"`. `graph` itself is returned where nothing could be rebound.
        """
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device."""
        ...
