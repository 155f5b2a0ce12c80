"""Pools of device memory, and the bytes that tensors touch."""

from __future__ import annotations

import contextlib
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onelaunch.call.spec import extent_bytes
from onelaunch.call.wrappers import local
from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.capabilities import capabilities
from onelaunch.driver.cuda.streams import Order, bindings, device_index
from onelaunch.driver.protocol import Provenance, Region
from onelaunch.gc_pause import when_gone

_GUARD_BYTES = 16
"""A multiple of every item size: operations that clone a whole storage, as `select_scatter` does,
assert that it holds a whole number of elements."""
BLOCK_BYTES = 512  # unit of the caching allocator's sizes


def in_blocks(nbytes: int) -> int:
    """Return the bytes of the blocks that so many bytes take."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class Ranges:
    """Addresses `[start, stop)`, disjoint; `nbytes` of them in all."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._bounds: tuple[list[int], list[int]] = [], []

    def copy(self) -> Ranges:
        ranges = Ranges()
        ranges.nbytes, ranges._bounds = self.nbytes, self._bounds
        return ranges

    def set(self, ranges: Sequence[tuple[int, int]]) -> None:
        ordered = sorted(ranges)
        self.nbytes = sum(stop - start for start, stop in ordered)
        self._bounds = [start for start, _ in ordered], [stop for _, stop in ordered]

    def overlaps(self, start: int, stop: int) -> bool:
        """Tell whether one of the ranges has an address of `[start, stop)`."""
        starts, stops = self._bounds  # at once: another thread may be at `set`
        before = bisect_left(starts, stop)
        return before > 0 and stops[before - 1] > start

    def contains(self, start: int, stop: int) -> bool:
        """Tell whether one of the ranges has all addresses of `[start, stop)`."""
        starts, stops = self._bounds
        before = bisect_right(starts, start)
        return before > 0 and stops[before - 1] >= stop


def joined(spans: Iterable[tuple[int, int]]) -> Ranges:
    """Make ranges of spans that may overlap."""
    bounds, last = list[tuple[int, int]](), 0
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if bounds and start < last:
            bounds[-1] = bounds[-1][0], (last := max(last, stop))
        else:
            bounds.append((start, last := stop))
    ranges = Ranges()
    ranges.set(bounds)
    return ranges


class PooledRecording(Protocol):
    def reset(self) -> None: ...


class CudaPool:
    """Segments of the caching allocator that only recordings of this pool use. They go back to the
    device when the last recording is reset or gone. A tensor of a recording that somebody still
    holds keeps its segment until the next occasion, or until the allocator needs memory."""

    def __init__(self, device: torch.device, order: Order | None = None) -> None:
        self.index = device_index(device)
        self.order = order or Order(self.index)
        self.ranges = Ranges()
        self.earlier = Ranges()
        """Addresses of the pool before its last capture, if recordings were there."""
        self.allocated: Allocated | None = None  # blocks allocated since the present capture began
        self.recordings: weakref.WeakSet[PooledRecording] = weakref.WeakSet()
        self.guard = threading.Lock()
        """A lock held while a capture begins, a recording is freed, or recordings are listed."""
        self.capturing = False
        self._id: tuple[int, int] | None = None
        when_gone(self, give_back)

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory reserved for the pool now; walks all blocks of the allocator."""
        if self._id is not None:
            self.release()  # the last recording may have gone without a reset
        self.ranges.set([] if self._id is None else _segments(self._id))
        return self.ranges.nbytes

    def kept_bytes(self, graph: object, tensors: Sequence[Tensor]) -> int:
        """See `DevicePool.kept_bytes`: a recording itself keeps nothing allocated."""
        return sum(
            in_blocks(nbytes)
            for start, nbytes in _storages(tensors).items()
            if self.ranges.overlaps(start, start + nbytes)
        )

    def provenance(self, storage: torch.UntypedStorage) -> Provenance:
        """See `Capture.provenance`; walks all blocks of the allocator."""
        address, pool_id = storage.data_ptr(), self._id
        if pool_id is not None and any(a <= address < b for a, b in _segments(pool_id)):
            return Provenance.CAPTURE
        blocks = [] if self.allocated is None else self.allocated.blocks()
        since = any(start <= address < start + nbytes for start, nbytes in blocks)
        return Provenance.MEANWHILE if since else Provenance.BEFORE

    def written_by_others(self, tensors: Sequence[Tensor]) -> bool:
        storages = _storages(tensors).items()
        return any(self.earlier.overlaps(start, start + nbytes) for start, nbytes in storages)

    def listed(self) -> list[PooledRecording]:
        with self.guard:
            return list(self.recordings)

    def open(self) -> tuple[int, int]:
        """Find the id to begin a capture with; `guard` is held. The allocators forget an id with
        its last recording, and cannot be given it again."""
        if self._id is None or not self.recordings:
            self._id = torch.cuda.graph_pool_handle()
        return self._id

    def release(self) -> None:
        """Give the memory back to the device if no recording is left."""
        with self.guard:
            if self.recordings or self.capturing:
                return
            self._id = None
            self.ranges.set([])
        give_back()


class Allocated:
    """The blocks that torch's allocator gave out on a device since this was made, while it keeps
    its history."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._mark = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", index))
        """The beginning: a block that nobody else can have meanwhile."""

    def blocks(self) -> list[tuple[int, int]]:
        """List the (address, bytes) of each, freed ones too. Copies the allocator's history."""
        snapshot: Any = torch.cuda.memory._snapshot()
        mark, spans = self._mark.data_ptr(), list[tuple[int, int]]()
        for entry in reversed(snapshot["device_traces"][self._index]):
            if entry["action"] == "alloc":
                if entry["addr"] == mark:
                    break
                spans.append((entry["addr"], entry["size"]))
        return spans


def live_blocks(index: int) -> list[tuple[int, int]]:
    """List the (address, bytes) of the allocator's blocks on a device."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return [
        (int(block["address"]), int(block["size"]))
        for segment in segments
        if segment["device"] == index
        for block in segment["blocks"]
    ]


@contextlib.contextmanager
def allocations(index: int) -> Generator[Allocated]:
    """Have the allocator keep its history meanwhile. One of the program's own goes on as it was."""
    with _history:
        ours = _kept[0] > 0 or not bindings._cuda_isHistoryEnabled()
        if ours and not _kept[0]:
            _keep_history("all", context=None, stacks="python", clear_history=True)
        _kept[0] += ours
    try:
        yield Allocated(index)
    finally:
        with _history:
            _kept[0] -= ours
            if ours and not _kept[0]:
                _keep_history(None, clear_history=True)


_history = threading.Lock()
_kept = [0]  # the number of contexts for which the history is kept
_keep_history: Any = torch.cuda.memory._record_memory_history


def beside_captures() -> AbstractContextManager[None]:
    """Let this thread free what it must while others capture, without spoiling their captures."""
    return nodes.relaxed() if capabilities().records else contextlib.nullcontext()


def give_back() -> None:
    """Return the memory of pools that no recording uses to the devices. `torch.cuda.empty_cache`
    also frees everybody else's unused memory, which the next operations pay for, and spares a pool
    in use. `torch.cuda.MemPool` frees only its own, but ends the process during any capture."""
    if not torch.cuda.is_initialized():
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(beside_captures())
        for device in range(torch.cuda.device_count()):
            stack.enter_context(_pool_in_use(device))
        bindings._cuda_emptyCache()


@contextlib.contextmanager
def own_segments(index: int) -> Generator[Ranges]:
    """Have this thread allocate in memory of its own, whose addresses are known at the end. Tensors
    that outlive this stay where they are, and their memory is given back once it is free."""
    ranges = Ranges()
    with _pool_in_use(index) as pool_id:
        yield ranges
        ranges.set(_segments(pool_id))


@contextlib.contextmanager
def _pool_in_use(index: int) -> Generator[tuple[int, int]]:
    pool_id = torch.cuda.graph_pool_handle()
    bindings._cuda_beginAllocateCurrentThreadToPool(index, pool_id)
    try:
        yield pool_id
    finally:
        bindings._cuda_endAllocateToPool(index, pool_id)
        bindings._cuda_releasePool(index, pool_id)


def _segments(pool_id: tuple[int, int]) -> list[tuple[int, int]]:
    # Of all pools: asked for one, torch drops references to the id that it does not own
    # (pytorch#196366).
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return [
        (int(s["address"]), int(s["address"]) + int(s["total_size"]))
        for s in segments
        if tuple(s["segment_pool_id"]) == pool_id
    ]


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Map the addresses of the storages of GPU tensors to their bytes."""
    held = [local(t) for t in tensors if t.is_cuda and t.layout is torch.strided]
    held = [t for t in held if not t._is_zerotensor()]
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}


def region(t: Tensor) -> Region:
    """See `Driver.region`; the storage is named by its address."""
    t = local(t)
    start = t.data_ptr()
    return Region(storage(t), start, start + extent_bytes(t.shape, t.stride(), t.dtype))


def storage(t: Tensor) -> int:
    """See `Driver.storage`: the address, which storages over the same memory share. It is the
    storage's handle where the program frees the memory and allocates it again."""
    t = local(t)
    storage = t.untyped_storage()
    # Torch raises for the one kind without memory.
    address = 0 if t._is_zerotensor() else storage.data_ptr()
    if not address or (_resized and storage._cdata in _resized):
        return storage._cdata
    return address


_resized: dict[int, StorageWeakRef] = {}
"""Handle -> storage whose memory came and went in a capture, kept: no other gets its handle."""


def resized(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Take note that a program is about to free a storage, or to give it memory, as FSDP does."""
    if storage._cdata not in _resized:
        for name in [name for name, ref in _resized.items() if ref.expired()]:
            del _resized[name]
        _resized[storage._cdata] = StorageWeakRef(storage)


def alias(
    base: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """See `Driver.alias`. About 3 us of host time."""
    base = local(base)
    view = torch.empty(0, dtype=dtype, device=base.device)
    start = base.storage_offset() * base.itemsize + offset
    if start % dtype.itemsize:
        raise ValueError(f"{dtype} at byte {start} of a storage, not a multiple of its size")
    return view.set_(base.untyped_storage(), start // dtype.itemsize, tuple(size), tuple(stride))


def borrowed(t: Tensor) -> Tensor:
    """Make a tensor over the memory of `t` that does not keep it allocated; without autograd."""
    storage = t.untyped_storage()
    over = bindings._construct_storage_from_data_pointer(
        storage.data_ptr(), t.device, storage.nbytes()
    )
    view = torch.empty(0, dtype=t.dtype, device=t.device)
    view.set_(over, t.storage_offset(), tuple(t.shape), t.stride())
    bindings._set_conj(view, t.is_conj())
    bindings._set_neg(view, t.is_neg())
    return view


def empty(nbytes: int, device: torch.device) -> Tensor:
    """See `Driver.empty`; aligned to 512 bytes as all of the allocator's memory is. In a capture it
    may take some bytes more than asked. The address behind a buffer is then never the start of
    another, and a kernel argument with this address is surely an end."""
    spare = -nbytes % BLOCK_BYTES >= _GUARD_BYTES
    guard = 0 if spare or not torch.cuda.is_current_stream_capturing() else _GUARD_BYTES
    return torch.empty(nbytes + guard, dtype=torch.uint8, device=device)[:nbytes]


def bytes_of(t: Tensor) -> Tensor:
    """View the bytes that `t` touches, as uint8 of shape (n,) over the same storage."""
    touched = region(t)
    return alias(t, torch.uint8, (touched.nbytes,), (1,), 0)
