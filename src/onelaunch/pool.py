"""Memory shared by recordings."""

from __future__ import annotations

import weakref

import torch

from onelaunch.driver.driver import Driver
from onelaunch.driver.driver import Pool as DevicePool
from onelaunch.errors import GraphError


class Pool:
    """Device memory that many recordings of many callables share.

    Recordings of one pool never run at the same time: a launch waits, on the device, for the launch
    before it. So their buffers may lie in the same memory, and the pool needs about what its
    largest recording needs.

    Args:
        max_bytes: a recording that would take the pool over this many bytes is given up again and
            its signature runs eagerly, with one warning (OL304). None: no limit.

    Example:
        >>> import onelaunch as ol
        >>> pool = ol.Pool()
        >>> first, second = ol.graph(torch.sin, pool=pool), ol.graph(torch.cos, pool=pool)
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (
            isinstance(max_bytes, bool) or not isinstance(max_bytes, int)
        ):
            raise GraphError("OL401", f"max_bytes must be an int or None, got {max_bytes!r}")
        if max_bytes is not None and max_bytes <= 0:
            raise GraphError("OL401", f"max_bytes must be positive, got {max_bytes}")
        self.max_bytes = max_bytes
        self._pools: dict[tuple[str, torch.device], DevicePool] = {}
        self._apart: weakref.WeakSet[DevicePool] = weakref.WeakSet()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the pool holds on all devices."""
        return sum(pool.memory_bytes for pool in (*self._pools.values(), *self._apart))

    def on(self, driver: Driver, device: torch.device) -> DevicePool:
        """The pool's part on one device, made on first use. Internal."""
        key = (driver.name, device)
        if key not in self._pools:
            self._pools[key] = driver.new_pool(device)
        return self._pools[key]

    def apart(self, driver: Driver, device: torch.device) -> DevicePool:
        """Memory that no other recording uses, counted as this pool's. Internal.

        What a forward saves for its backward must outlive every launch in between.
        """
        pool = driver.new_pool(device)
        self._apart.add(pool)
        return pool

    def __repr__(self) -> str:
        limit = "no limit" if self.max_bytes is None else f"at most {self.max_bytes}"
        return f"Pool({self.memory_bytes} bytes, {limit})"
