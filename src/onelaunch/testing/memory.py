"""The memory of recordings on the emulated device: an arena (`testing/arena.py`) for each pool."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, mapped, tensors
from onelaunch.driver.protocol import Graph, Provenance
from onelaunch.driver.tape.graph import TapeGraph, TapePool
from onelaunch.driver.tape.memory import HostMemory
from onelaunch.driver.tape.recorder import TapeRecorder
from onelaunch.testing import device as emulated
from onelaunch.testing.arena import Arena, Block, newest
from onelaunch.testing.device import Placer, TapeTensor
from onelaunch.testing.storage import block_of, host


class EmulatedPool(TapePool):
    """Recordings that share the memory of an arena.

    Attributes:
        arena: the memory, of this pool alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(of_graphs=True)
        self._capturing = False
        self._earlier: list[tuple[int, int]] = []
        """The addresses that the arena had before its last capture, if recordings were there."""
        self._newest = 0
        """The number of the newest block when the last capture began."""

    @property
    def memory_bytes(self) -> int:
        self.trim()  # a recording may have gone without a reset
        return self.arena.reserved_bytes

    def discard(self, graph: TapeGraph) -> None:
        """Forget a recording, and give back what no other needs."""
        super().discard(graph)
        self.trim()

    def kept_bytes(self, graph: Graph, tensors: Sequence[Tensor]) -> int:
        blocks = {id(b): b for b in map(block_of, _on_device(tensors)) if b.arena is self.arena}
        return sum(block.nbytes for block in blocks.values())

    def provenance(self, storage: torch.UntypedStorage) -> Provenance:
        block = getattr(storage, "block", None)
        if block is None:
            return Provenance.BEFORE
        if block.arena is self.arena:
            return Provenance.CAPTURE
        return Provenance.BEFORE if block.number <= self._newest else Provenance.MEANWHILE

    def written_by_others(self, tensors: Sequence[Tensor]) -> bool:
        return any(
            start <= block_of(t).address < stop
            for t in _on_device(tensors)
            for start, stop in self._earlier
        )

    def memory(self) -> EmulatedMemory:
        """Make a place in the arena for the tensors of one more recording."""
        return EmulatedMemory(self.arena)

    @contextmanager
    def growing(self) -> Generator[None]:
        """Surround a capture: the arena is kept meanwhile."""
        self._capturing = True
        self._newest = newest()
        self._earlier = self.arena.ranges() if self.graphs() else []
        try:
            yield
        finally:
            self._capturing = False
            self.trim()

    def begin_launch(self) -> None:
        """Fill with garbage what no recording has allocated."""
        self.arena.poison()

    def trim(self) -> None:
        """Give back what no recording needs any more."""
        with self.lock:
            if self._capturing or self.graphs():
                return
            self.arena.trim()
            if self.arena.reserved_bytes:  # results that somebody holds, no business of the pool's
                self.arena = Arena(of_graphs=True)


class EmulatedMemory(HostMemory):
    """Blocks of the pool's arena: results go there, and dead ones are reused.

    The calls of the recording hold addresses, as the kernels of a CUDA graph do, and keep nothing
    allocated.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._before = arena.reserved_bytes
        self._placer = _Owning(arena, self._own)

    @property
    def nbytes(self) -> int:
        """Bytes by which the arena grew."""
        return self._arena.reserved_bytes - self._before

    def owns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call has a tensor of the device, or makes one."""
        if emulated.names_device(kwargs.get("device")):
            return True
        return any(isinstance(t, TapeTensor) for t in tensors((args, kwargs)))

    def run(
        self, recorder: TapeRecorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operation on CPU tensors over the device's memory."""
        _refuse_transfers(recorder, op, args, kwargs)
        args, kwargs = mapped(args, _frozen), mapped(kwargs, _frozen)
        return emulated.run(op, args, kwargs, recorder.call, self._placer)

    @staticmethod
    def on_host(t: Tensor) -> Tensor:
        """Make a CPU tensor over the same memory."""
        return host(t) if isinstance(t, TapeTensor) else t

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        """Move `t` to a block of the pool."""
        return self._placer.place(t, defined)


class _Owning(Placer):
    def __init__(self, arena: Arena, own: dict[int, torch.UntypedStorage]) -> None:
        super().__init__(arena)
        self._own = own

    def allocate(self, nbytes: int) -> Block:
        block = super().allocate(nbytes)
        self._own[block.host._cdata] = block.host
        return block


def _frozen(value: Any) -> Any:
    # A number of the host: CUDA's kernels take its value at the capture, for ever.
    if isinstance(value, Tensor) and not isinstance(value, TapeTensor) and value.dim() == 0:
        return value.clone()
    return value


def _refuse_transfers(
    recorder: TapeRecorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = [t for t in tensors((args, kwargs)) if t.numel()]  # of nothing, nothing is copied
    on_device = {isinstance(t, TapeTensor) for t in given}
    mixed = op.name in emulated.TAKES_HOST and len(on_device) > 1
    if op.name == "aten::_to_copy" and kwargs.get("device") is not None:
        mixed = bool(on_device - {emulated.names_device(kwargs["device"])})
    if mixed:
        what = f"`{op.label}` copied between the host and the device during a capture."
        raise recorder.note_refusal("OL103", what)


def _on_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if isinstance(t, TapeTensor)]
