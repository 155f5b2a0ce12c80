"""The memory of the emulated device: blocks that are reused, and poisoned when they are free.

An arena behaves as CUDA's caching allocator does where it matters to a recording: freed blocks are
handed out again at once, a pool's memory is apart from the rest, and what a stale pointer finds is
garbage. Here the garbage is 0xFF in every byte, which is NaN in every float format.

A block belongs to a storage of the device, as an attribute of the storage's Python object, which
torch keeps for as long as any tensor uses the storage. So a block lives exactly as long as memory
on a device does, whoever holds it: autograd, `p.data = q`, or Python.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.dispatch import no_functions, raw

NAME = "tape"
ALIGNMENT = 512
_SEGMENT_BYTES = 2 << 20

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_limit_bytes: int | None = None
_numbers = itertools.count(1)


def newest() -> int:
    """Return a number that no block has, larger than that of every block until now."""
    return next(_numbers)


class Block:
    """Allocated bytes, free again when nothing refers to this object.

    Attributes:
        address: the address of the first byte, a multiple of 512.
        nbytes: the size, rounded up to a multiple of 512.
        number: blocks are numbered as they are allocated, in all arenas.
        host: the same bytes as the storage of CPU tensors; it does not keep the block allocated.
    """

    def __init__(self, arena: Arena, address: int, nbytes: int) -> None:
        self.arena = arena
        self.address = address
        self.nbytes = nbytes
        self.number = next(_numbers)
        self.host: Any = torch._C._construct_storage_from_data_pointer(
            address, torch.device("cpu"), nbytes
        )

    def __del__(self) -> None:
        self.arena.release(self.address, self.nbytes)


class Arena:
    """Segments of memory, cut into blocks: best fit, neighbours merged when both are free.

    Args:
        of_graphs: recordings write this memory by address. A block that is free for one recording
            may hold intermediates of another that runs now. So only `allocate` and `poison` touch
            free blocks, in an order by the pool's lock.
    """

    def __init__(self, of_graphs: bool = False) -> None:
        self._of_graphs = of_graphs
        self.lane: int | None = None
        """The lane of new blocks: as a stream does on a GPU, it has segments of its own."""
        self.allocated: list[tuple[int, int]] = []
        """The addresses of the blocks allocated in this lane, since someone emptied it."""
        self._lanes: dict[int | None, list[tuple[int, int]]] = {}
        """lane -> the addresses of its segments."""
        self._segments: dict[int, mmap.mmap] = {}
        """address -> the segment that begins there."""
        self._free: dict[int, int] = {}
        """address -> bytes from there on that are not allocated."""
        # A block may be collected while this thread holds the lock, so it is only noted here.
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()
        _arenas.add(self)

    @property
    def reserved_bytes(self) -> int:
        return sum(map(len, self._segments.values()))

    def ranges(self) -> list[tuple[int, int]]:
        """List the addresses `[start, stop)` of the segments."""
        return [(start, start + len(s)) for start, s in self._segments.items()]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use."""
        with self._lock:
            self._sweep()
            return self.reserved_bytes - sum(self._free.values())

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block of at least `nbytes`, poisoned.

        Raises:
            torch.OutOfMemoryError: the emulated device is at its limit.
        """
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            self._sweep()
            fitting = [(n, a) for a, n in self._free.items() if n >= size]
            if self._lanes.keys() - {self.lane}:
                own = self._lanes.get(self.lane, [])
                fitting = [(n, a) for n, a in fitting if any(b <= a < c for b, c in own)]
            if not fitting:
                self._grow(size)
                return self.allocate(nbytes)
            found, address = min(fitting)
            del self._free[address]
            if found > size:
                self._free[address + size] = found - size
            if self._of_graphs:
                ctypes.memset(address, 0xFF, size)
            if self.lane is not None:
                self.allocated.append((address, address + size))
            return Block(self, address, size)

    def release(self, address: int, nbytes: int) -> None:
        """Take a block back, poisoned."""
        if not self._of_graphs:
            ctypes.memset(address, 0xFF, nbytes)
        self._released.append((address, nbytes))

    def poison(self) -> None:
        """Overwrite everything that is not allocated."""
        with self._lock:
            self._sweep()
            for address, nbytes in self._free.items():
                ctypes.memset(address, 0xFF, nbytes)

    def trim(self) -> None:
        """Give back the segments in which nothing is allocated."""
        with self._lock:
            self._sweep()
            for address, segment in list(self._segments.items()):
                if self._free.get(address) == len(segment):
                    del self._free[address], self._segments[address]
                    for lane, own in [*self._lanes.items()]:
                        self._lanes[lane] = [span for span in own if span[0] != address]

    def _grow(self, size: int) -> None:
        nbytes = -(-size // _SEGMENT_BYTES) * _SEGMENT_BYTES
        if _limit_bytes is not None and memory_reserved() + nbytes > _limit_bytes:
            raise torch.OutOfMemoryError(
                f"tape out of memory: {nbytes} bytes wanted, {memory_reserved()} of "
                f"{_limit_bytes} reserved"
            )
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 0xFF, nbytes)
        self._segments[address] = memory
        self._lanes.setdefault(self.lane, []).append((address, address + nbytes))
        self._free[address] = nbytes

    def _sweep(self) -> None:
        """Take released blocks back, and merge free neighbours of a segment."""
        if not self._released:
            return
        while self._released:
            address, nbytes = self._released.popleft()
            self._free[address] = nbytes
        merged: dict[int, int] = {}
        last = 0
        for address, nbytes in sorted(self._free.items()):
            if last and last + merged[last] == address and address not in self._segments:
                merged[last] += nbytes
            else:
                merged[address], last = nbytes, address
        self._free = merged


def memory_reserved() -> int:
    """Count the bytes that the device's arenas hold, in use or not."""
    return sum(a.reserved_bytes for a in list(_arenas))


def memory_allocated() -> int:
    """Count the bytes of the tensors on the device, each rounded up to a multiple of 512."""
    return sum(a.allocated_bytes for a in list(_arenas))


def set_memory_limit(nbytes: int | None) -> None:
    """Let the device have so many bytes at most; None: no limit.

    Beyond it an allocation raises `torch.OutOfMemoryError`, as on a GPU that is full.
    """
    global _limit_bytes
    _limit_bytes = nbytes


ORDINARY = Arena()
"""The memory of tensors that no capture makes."""

_of_thread = threading.local()


def ordinary() -> Arena:
    """Find the arena of this thread's new tensors outside a capture."""
    return getattr(_of_thread, "arena", ORDINARY)


@contextmanager
def own_arena() -> Generator[Arena]:
    """Have this thread allocate in an arena of its own meanwhile, to see how much that takes."""
    before, arena = ordinary(), Arena()
    _of_thread.arena = arena
    try:
        yield arena
    finally:
        _of_thread.arena = before


def device_storage(block: Block) -> torch.UntypedStorage:
    """Make a storage of the device over `block`, which it owns."""
    storage: Any = torch._C._construct_storage_from_data_pointer(
        block.address, torch.device(NAME, 0), block.nbytes
    )
    storage.block = block
    return storage


def block_of(t: Tensor) -> Block:
    """Find the block in which a device tensor lives."""
    storage: Any = t.untyped_storage()
    if not hasattr(storage, "block"):  # made inside torch, for no elements
        bind(t, device_storage(ORDINARY.allocate(0)), 0, t.shape, t.stride())
        storage = t.untyped_storage()
    return storage.block


def host_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> Tensor:
    """Make a CPU tensor over a storage of the host, its first element at `offset`, in elements."""
    with raw(), no_functions():
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            storage, offset, tuple(size), tuple(stride)
        )


def host(t: Tensor) -> Tensor:
    """Make a CPU tensor over the memory of the device tensor `t`."""
    over = host_over(block_of(t).host, t.dtype, t.shape, t.stride(), int(t.storage_offset()))
    torch._C._set_conj(over, t.is_conj())
    torch._C._set_neg(over, t.is_neg())
    return over


def bind(
    t: Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> None:
    """Let the device tensor `t` use `storage`, with `offset` in elements."""
    aten = torch.ops.aten
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        # torch has `set_` for its own devices and for meta; meta's takes any storage, and only
        # for no elements one that it may not resize. `as_strided_` then works on every device.
        include = torch._C._meta_in_tls_dispatch_include()
        aten.as_strided_.default(t, (0,), (1,), 0)
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            aten.set_.source_Storage_storage_offset(t, storage, 0, (0,), (1,))
        finally:
            torch._C._set_meta_in_tls_dispatch_include(include)
        aten.as_strided_.default(t, tuple(size), tuple(stride), offset)
