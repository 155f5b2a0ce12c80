"""Pools of device memory, and the bytes that tensors touch."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.cuda.order import Order, bindings, device_index
from onelaunch.driver.driver import Region

_GUARD_BYTES = 1


class Ranges:
    """Addresses `[start, stop)`, disjoint."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def set(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Replace them all."""
        ordered = sorted(ranges)
        self._starts = [start for start, _ in ordered]
        self._stops = [stop for _, stop in ordered]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether one of the ranges has an address of `[start, stop)`."""
        before = bisect_left(self._starts, stop)
        return before > 0 and self._stops[before - 1] > start


class CudaPool:
    """Segments of the caching allocator that only recordings of this pool use.

    Its memory goes back to the device when its last recording is reset and no tensor of it is left.
    """

    def __init__(self, device: torch.device) -> None:
        self.index = device_index(device)
        self.order = Order(self.index)
        self._holder = _Holder()
        self.ranges = Ranges()
        weakref.finalize(self, _retire, self._holder).atexit = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory reserved for the pool now; a walk over the allocator's blocks."""
        return sum(stop - start for start, stop in self._segments())

    def open(self) -> tuple[int, int]:
        """The id to capture with."""
        sweep()
        holder = self._holder
        if holder.pool is None:
            with torch.cuda.device(self.index):
                holder.pool = torch.cuda.MemPool()
        return holder.pool.id

    def refresh(self) -> None:
        """Note which addresses are the pool's in `ranges`."""
        self.ranges.set(self._segments())

    def release(self) -> None:
        """Give memory back to the device, if nothing is left in the pool."""
        pool = self._holder.pool
        if pool is not None and not any(s["active_size"] for s in _snapshot(pool.id)):
            self._holder.pool = None
            _retired.append(_Holder(pool))
        sweep()
        self.refresh()

    def _segments(self) -> list[tuple[int, int]]:
        pool = self._holder.pool
        if pool is None:
            return []
        found = _snapshot(pool.id)
        return [(int(s["address"]), int(s["address"]) + int(s["total_size"])) for s in found]


@dataclass(eq=False)
class _Holder:
    """Keeps a MemPool until no recording uses it: destroying it earlier is an error in torch."""

    pool: torch.cuda.MemPool | None = None


_retired: list[_Holder] = []
_sweeping = threading.Lock()


def _retire(holder: _Holder) -> None:
    _retired.append(holder)
    sweep()


def sweep() -> None:
    """Free retired pools whose recordings are gone; nothing while this thread captures."""
    if not _retired or torch.cuda.is_current_stream_capturing():
        return
    if not _sweeping.acquire(blocking=False):  # a finalizer inside another sweep
        return
    try:
        for holder in tuple(_retired):
            if holder.pool is None or holder.pool.use_count() == 1:
                _retired.remove(holder)
                holder.pool = None  # its destructor returns the segments to the device
    finally:
        _sweeping.release()


def _snapshot(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = bindings._cuda_memorySnapshot(pool_id)["segments"]
    return [s for s in segments if tuple(s["segment_pool_id"]) == tuple(pool_id)]


def region(t: Tensor) -> Region:
    """The bytes that `t` touches; the storage is named by its address."""
    start = t.data_ptr()
    storage = t.untyped_storage().data_ptr()
    if t.numel() == 0:
        return Region(storage, start, start)
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return Region(storage, start, start + (last + 1) * t.itemsize)


def alias(
    base: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """A tensor over the storage of `base`; see `Driver.alias`. About 3 us of host time."""
    made = torch.empty(0, dtype=dtype, device=base.device)
    start = base.storage_offset() * base.itemsize + offset
    if start % dtype.itemsize:
        raise ValueError(f"{dtype} at byte {start} of a storage, not a multiple of its size")
    return made.set_(base.untyped_storage(), start // dtype.itemsize, tuple(size), tuple(stride))


def empty(nbytes: int, device: torch.device) -> Tensor:
    """uint8 memory of shape (nbytes,), aligned to 512 bytes as all of the allocator's is.

    Of a recording: one byte more is taken, so that the address behind a buffer is never the start
    of another, and a kernel argument that holds it can be told to be an end.
    """
    guard = _GUARD_BYTES if torch.cuda.is_current_stream_capturing() else 0
    return torch.empty(nbytes + guard, dtype=torch.uint8, device=device)[:nbytes]


def bytes_of(t: Tensor) -> Tensor:
    """The bytes that `t` touches, as uint8 of shape (n,) over the same storage."""
    touched = region(t)
    return alias(t, torch.uint8, (touched.stop - touched.start,), (1,), 0)
