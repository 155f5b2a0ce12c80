"""Shadow memory: a byte of taint bits for each element of a storage; views share it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onelaunch.driver.aten import copy_bits

PADDED, UNKNOWN, LOW, SIZED, SKEWED, ROW, SPARE = 1, 2, 4, 8, 16, 32, 64
"""Bits of an element. PADDED: it depends on padding. UNKNOWN: its value may differ from call to
call.
LOW: it is lower than any score. SIZED: its shape follows the padded size, so that PADDED also says
whether the unpadded run has it. SKEWED: a view read it at another place than in the unpadded
run. ROW: it names a real row of the storage's size, from 0, in every call. SPARE: it is padding,
and names a row that is not real."""

Rows = tuple[int, int]
"""The real and the padded size of a dimension whose last row is in no call a real row."""


@dataclass(slots=True)
class Shadow:
    storage: Any
    bits: Tensor
    itemsize: int
    rows: Rows | None = None  # the size whose rows the elements with ROW or SPARE name


@dataclass(slots=True)
class ShadowMemory:
    """The shadows of all storages that have taint bits."""

    device: torch.device
    shadows: dict[int, Shadow] = field(default_factory=dict)

    def of(self, t: Tensor) -> Tensor | None:
        """Return the bits of the elements of `t`, uint8 of its shape; None if it never had any."""
        key = storage_of(t)
        shadow = self.shadows.get(key)
        if shadow is None:
            return None
        resized = shadow.bits.numel() < _elements(t)
        if resized or shadow.itemsize != t.element_size():  # a view as another dtype
            bits = _of_size(shadow, t)
            self.shadows[key] = shadow = Shadow(
                shadow.storage, bits & ~(ROW | SPARE), t.element_size()
            )
        return shadow.bits.as_strided(t.shape, t.stride(), int(t.storage_offset()))

    def put(self, t: Tensor, bits: Tensor) -> None:
        view = self.of(t)
        if view is None:
            blank = torch.zeros(_elements(t), dtype=torch.uint8, device=self.device)
            storage = StorageWeakRef(t.untyped_storage())  # keeps its address from being reused
            self.shadows[storage_of(t)] = Shadow(storage, blank, t.element_size())
            view = self.of(t)
        assert view is not None
        copy_bits(view, bits.to(self.device).broadcast_to(t.shape))

    def name(self, t: Tensor, rows: Rows) -> None:
        """Set the size whose rows the elements of `t` name. Rows of two sizes are not followed."""
        shadow = self.shadows[storage_of(t)]
        if shadow.rows not in (None, rows):
            shadow.bits &= ~(ROW | SPARE)
        shadow.rows = rows

    def fill(self, t: Tensor, bits: int) -> None:
        """Set the bits of the whole storage of `t`, which must have a shadow."""
        self.shadows[storage_of(t)].bits.fill_(bits)

    def prune(self) -> None:
        """Drop the shadows of storages that were freed."""
        expired = [key for key, shadow in self.shadows.items() if shadow.storage.expired()]
        for key in expired:
            del self.shadows[key]


def _of_size(shadow: Shadow, t: Tensor) -> Tensor:
    """Return the bits of memory viewed as elements of another size, as a complex number as two."""
    old, new, count = shadow.itemsize, t.element_size(), _elements(t)
    if old % new == 0 and shadow.bits.numel() * (old // new) == count:
        return shadow.bits.repeat_interleave(old // new) & ~LOW
    if new % old == 0 and shadow.bits.numel() == count * (new // old):
        parts = shadow.bits.reshape(count, -1).unbind(1)
        found = functools.reduce(torch.bitwise_or, parts) & ~(LOW | SIZED)
        return found | (functools.reduce(torch.bitwise_and, parts) & SIZED)
    return (union(shadow.bits) & ~(LOW | SIZED)).repeat(count)


def union(bits: Tensor) -> Tensor:
    """Return every bit that any element has, 0-dim."""
    found = torch.zeros((), dtype=torch.uint8, device=bits.device)
    for bit in (PADDED, UNKNOWN, LOW, SIZED, SKEWED):
        found = found | ((bits & bit) != 0).any().to(torch.uint8) * bit
    return found


def storage_of(t: Tensor) -> int:
    """Return the id of a tensor's storage, valid as long as the storage lives."""
    return t.untyped_storage()._cdata


def _elements(t: Tensor) -> int:
    return -(-t.untyped_storage().nbytes() // t.element_size())
