"""The memory of the emulated device: blocks that are reused, and poisoned when they are free.

An arena behaves as CUDA's caching allocator does where it matters to a recording: freed blocks are
handed out again at once, a pool's memory is apart from the rest, and what a stale pointer finds is
garbage. Here the garbage is 0xFF in every byte, which is NaN in every float format.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass
class _Segment:
    memory: mmap.mmap
    address: int
    nbytes: int


class Arena:
    """Segments of memory, cut into blocks: best fit, neighbours merged when both are free.

    Args:
        of_graphs: recordings write this memory by address. A block of one may be what another uses
            at this moment for its intermediates, so a free block is not touched before `poison` or
            before it is allocated again, both of which the pool's lock orders.
    """

    def __init__(self, of_graphs: bool = False) -> None:
        self._of_graphs = of_graphs
        self._segments: list[_Segment] = []
        self._free: dict[int, int] = {}
        # A block may be collected while this thread holds the lock, so it is only noted here.
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()
        _arenas.add(self)

    @property
    def reserved_bytes(self) -> int:
        return sum(s.nbytes for s in self._segments)

    def ranges(self) -> list[tuple[int, int]]:
        """List the addresses `[start, stop)` of the segments."""
        return [(s.address, s.address + s.nbytes) for s in self._segments]

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
            if not fitting:
                self._grow(size)
                return self.allocate(nbytes)
            found, address = min(fitting)
            del self._free[address]
            if found > size:
                self._free[address + size] = found - size
            if self._of_graphs:
                ctypes.memset(address, 0xFF, size)
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
            for segment in list(self._segments):
                if self._free.get(segment.address) == segment.nbytes:
                    del self._free[segment.address]
                    self._segments.remove(segment)

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
        self._segments.append(_Segment(memory, address, nbytes))
        self._free[address] = nbytes

    def _sweep(self) -> None:
        while self._released:
            address, nbytes = self._released.popleft()
            self._free[address] = nbytes
        starts = {s.address for s in self._segments}
        merged: dict[int, int] = {}
        last = 0
        for address in sorted(self._free):
            if last and last + merged[last] == address and address not in starts:
                merged[last] += self._free[address]
            else:
                merged[address] = self._free[address]
                last = address
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
