"""Memory shared by recordings, and its budget.

Recordings of one pool never run at once (a launch holds the lock of its pool's order), and each
replay copies its inputs in again. So all memory of a capture is free for the next, except memory
that a recording keeps: results under ``outputs="static"``. Evicting a recording frees its kept
memory. The shared memory goes back to the device with the pool's last recording. A pool whose
recordings came smallest first has too much: it is emptied and filled again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from onelaunch.capture.io_plan import staged_bytes
from onelaunch.driver.protocol import DevicePool, Driver, Graph
from onelaunch.runtime.stats import PoolStats, summed
from onelaunch.sizes.buckets import positive

if TYPE_CHECKING:
    from onelaunch.runtime.graphed import Graphed

T = TypeVar("T")


@dataclass(eq=False)
class PoolMember:
    """The memory of a recording in its pool, which refers to it weakly."""

    device_pool: DevicePool
    graph: Graph
    launches: list[int]  # their number, and the time of the last one by the pool's clock
    kept_bytes: int  # bytes of the pool that it keeps for itself
    forget: weakref.WeakMethod[Callable[[PoolMember], None]]
    """Takes the recording off its owner's table, so that nothing refers to its memory."""
    busy: Callable[[], bool] = bool
    """Returns whether something still needs the results of the last launch; then it stays."""


class Pool:
    """Device memory that many recordings of many callables share.

    Recordings of one pool never run at the same time: a launch waits, on the device, for the launch
    before it. So their buffers lie in the same memory, and the pool needs about as much as its
    largest recording. Capture the largest first: the others then fit into its memory.

    Args:
        max_bytes: the most bytes that the pool reserves, on all devices. The need of a recording is
            estimated from its warm-up. To make room the least recently used recordings are evicted;
            they are captured again when they are called again. A signature that does not fit at all
            runs eagerly, with one warning (OL304). None: no limit. A limit makes a replay about 50
            ns slower.

    Raises:
        ArgumentError: OL401, `max_bytes` is not a positive integer.

    Example:
        >>> import onelaunch as ol
        >>> pool = ol.Pool()
        >>> first, second = ol.graph(torch.sin, pool=pool), ol.graph(torch.cos, pool=pool)
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        most = None if max_bytes is None else positive("max_bytes", max_bytes)
        self._manager = PoolManager(most)

    @property
    def max_bytes(self) -> int | None:
        """The most bytes that the pool may hold; None: no limit."""
        return self._manager.max_bytes

    @property
    def memory_bytes(self) -> int:
        """The bytes that the pool holds on all devices."""
        return self._manager.memory_bytes

    def stats(self) -> PoolStats:
        """Return the bytes that the pool holds, and the figures of its recordings.

        Costs a walk over the allocator's blocks, a millisecond or so, and no sync.
        """
        return self._manager.stats()

    def __copy__(self) -> Pool:
        """Return the pool itself: what is copied goes on with it, as with a device."""
        return self

    def __deepcopy__(self, memo: object) -> Pool:
        return self

    def __repr__(self) -> str:
        limit = "no limit" if self.max_bytes is None else f"at most {self.max_bytes}"
        return f"Pool({self.memory_bytes} bytes, {limit})"


@dataclass(slots=True, eq=False)
class PoolRoom:
    """Room in a pool for one recording; see `PoolManager.lease`. `again`: True if a second capture
    may fit where the first does not. Keeping the limit evicts other recordings and gaps."""

    pool: PoolManager
    has_room: bool  # True while a capture may fit
    again: bool

    def keep(self, member: PoolMember) -> bool:
        """Put a new recording into the pool, and evict others to keep its limit. Return False if it
        does not fit: then it is freed."""
        if self.pool.keep_within():
            self.pool.add(member)
            return True
        member.graph.reset()
        self.has_room, self.again = self.again, False
        return False


class PoolManager:
    """The device pools of one `Pool`, with their recordings and their budget. All methods but
    `stats`, `memory_bytes` and `free` are called inside `Driver.exclusive`. `max_bytes`: the most
    that it may hold, on all devices; None: no limit. `clock`: marks a launch in the order of all
    launches; None where there is no limit."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes: int | None = max_bytes
        self.clock: Callable[[], int] | None = None
        if max_bytes is not None:
            self.clock = itertools.count(1).__next__
        self._pools: dict[torch.device, DevicePool] = {}
        self._separate: weakref.WeakSet[DevicePool] = weakref.WeakSet()
        self._members: weakref.WeakSet[PoolMember] = weakref.WeakSet()
        self._users: weakref.WeakSet[Graphed[..., Any]] = weakref.WeakSet()
        self._evicts = True
        self._lock = threading.Lock()  # the lock of the sets, held for nothing else

    @property
    def memory_bytes(self) -> int:
        """The bytes held on all devices."""
        return sum(part.memory_bytes for part in self._parts())

    def stats(self) -> PoolStats:
        """Return the bytes held, and the figures of each callable's recordings."""
        with self._lock:
            users = list(self._users)
        each = tuple(user.stats() for user in users)
        limits: Any = {"memory_bytes": self.memory_bytes, "max_bytes": self.max_bytes}
        return PoolStats(**summed(each), **limits, callables=each)

    def _parts(self) -> list[DevicePool]:
        with self._lock:
            return [*self._pools.values(), *self._separate]

    def on(self, driver: Driver, device: torch.device) -> DevicePool:
        """Return the pool on one device, made at first use."""
        if device not in self._pools:
            pool = driver.new_pool(device)
            with self._lock:
                self._pools[device] = pool
        return self._pools[device]

    def separate(self, driver: Driver, device: torch.device) -> DevicePool:
        """Return a new device pool for one recording, counted as this pool's. The tensors that a
        forward saves for its backward must outlive every launch in between."""
        pool = driver.new_pool(device, beside=self.on(driver, device))
        with self._lock:
            self._separate.add(pool)
        return pool

    @contextmanager
    def limited(self, max_bytes: int | None) -> Generator[None]:
        """Keep a second limit, None for none, and evict nothing to make room for a recording. If
        its capture leaves the pool above the limit all the same, evictions follow."""
        before = self.max_bytes
        self.max_bytes = most = min((n for n in (before, max_bytes) if n is not None), default=None)
        was_within = most is not None and self.memory_bytes <= most
        self._evicts = False
        try:
            yield
        finally:
            self._evicts = True
            if was_within:
                self.keep_within()
            self.max_bytes = before

    def keep_within(self, without: DevicePool | None = None) -> bool:
        """Evict until the limit is kept; return False if that is impossible. `without`: a device
        pool whose recordings stay."""
        most = self.max_bytes
        return most is None or self._evict_until(lambda: self.memory_bytes <= most, without)

    def run_and_estimate(
        self, driver: Driver, device: torch.device, run: Callable[[], T], inputs: Sequence[Tensor]
    ) -> tuple[T, int]:
        """Run, and return the result and the estimated bytes of a recording. 0 bytes if unknown, or
        if there is no limit."""
        if self.max_bytes is None:
            return run(), 0
        return driver.foresee(run, device, staged_bytes(driver, inputs, device))

    @contextmanager
    def lease(
        self, driver: Driver, device: torch.device, need_bytes: int, user: Graphed[..., Any]
    ) -> Generator[PoolRoom]:
        """Make room for a recording, and give a lease to capture it under, while that has room.
        `need_bytes`: the bytes, or the least of them, that the recording would need in a pool for
        itself; 0 if unknown."""
        with self._lock:
            self._users.add(user)
        has_room = self._make_room(driver, device, need_bytes)
        lease = PoolRoom(self, has_room, again=self._evicts and bool(self._by_age()))
        try:
            yield lease
        except BaseException:  # from the callable, which runs in the capture, or Ctrl-C
            self.keep_within()  # the memory that it took goes back with the pool's last recording
            raise

    def free(self, member: PoolMember) -> None:
        """Free a recording. A thread that is about to launch it tries the next recording."""
        with self._lock:
            self._members.discard(member)
        member.graph.reset()

    def may_fit_later(self, need_bytes: int) -> bool:
        """Return whether there may be room later, when busy recordings can be evicted."""
        assert self.max_bytes is not None
        return need_bytes <= self.max_bytes and any(m.busy() for m in self._by_age())

    def add(self, member: PoolMember) -> None:
        if self.clock is not None:
            member.launches[1] = self.clock()  # a capture ahead is a use
        with self._lock:
            self._members.add(member)

    def _by_age(self, part: DevicePool | None = None) -> list[PoolMember]:
        """Return the recordings, the least recently used first."""
        with self._lock:
            members = list(self._members)
        chosen = [m for m in members if part is None or m.device_pool is part]
        return sorted(chosen, key=lambda m: m.launches[1])

    def _make_room(self, driver: Driver, device: torch.device, need_bytes: int) -> bool:
        """Evict until the need fits into free memory of the pool and its remaining limit. Return
        False if that is impossible."""
        most = self.max_bytes
        if most is None:
            return True
        if need_bytes > most:
            return False
        part = self.on(driver, device)

        def fits() -> bool:
            reserved = sum(p.memory_bytes for p in self._parts() if p is not part)
            members = self._by_age(part)
            shared = part.memory_bytes if members else 0
            kept_bytes = sum(m.kept_bytes for m in members)
            return reserved + max(shared, kept_bytes + need_bytes) <= most

        return self._evict_until(fits)

    def _evict_until(self, fits: Callable[[], bool], without: DevicePool | None = None) -> bool:
        """Evict recordings, the least recently used first; return False if none is left."""
        while not fits():
            members = (m for m in self._by_age() if m.device_pool is not without)
            oldest = next((m for m in members if not m.busy()), None)
            if oldest is None or not self._evicts:
                return False
            forget = oldest.forget()
            if forget is not None:
                forget(oldest)
            self.free(oldest)
        return True
