"""A byte for each element of a storage, which views see as they see the storage."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onelaunch.driver.aten import copy_bits

PADDED, UNKNOWN, LOW, SIZED, SKEWED = 1, 2, 4, 8, 16
"""Bits: it depends on padding; its value may differ from call to call; it is lower than any score;
it was made at a size that padding changes, so that PADDED says whether the run at the real size has
it; a view found it in another place than there."""


@dataclass(slots=True)
class Shadow:
    storage: Any
    bits: Tensor
    itemsize: int


@dataclass(slots=True)
class Memory:
    """The shadow of every storage that has any bit."""

    device: torch.device
    shadows: dict[int, Shadow] = field(default_factory=dict[int, Shadow])

    def of(self, t: Tensor) -> Tensor | None:
        """The bits of the elements of `t`, uint8 of its shape; None if it never had any."""
        key = storage_of(t)
        shadow = self.shadows.get(key)
        if shadow is None:
            return None
        resized = shadow.bits.numel() < _elements(t)
        if resized or shadow.itemsize != t.element_size():  # the memory seen as another dtype
            bits = _of_size(shadow, t)
            self.shadows[key] = shadow = Shadow(shadow.storage, bits, t.element_size())
        return shadow.bits.as_strided(t.shape, t.stride(), int(t.storage_offset()))

    def put(self, t: Tensor, bits: Tensor) -> None:
        """Set the bits of the elements of `t`."""
        view = self.of(t)
        if view is None:
            blank = torch.zeros(_elements(t), dtype=torch.uint8, device=self.device)
            storage = StorageWeakRef(t.untyped_storage())  # keeps its address from being reused
            self.shadows[storage_of(t)] = Shadow(storage, blank, t.element_size())
            view = self.of(t)
        assert view is not None
        copy_bits(view, bits.to(self.device).broadcast_to(t.shape))

    def fill(self, t: Tensor, bits: int) -> None:
        """Set the bits of the whole storage of `t`, of which there is a shadow."""
        self.shadows[storage_of(t)].bits.fill_(bits)

    def prune(self) -> None:
        """Forget storages that are gone."""
        gone = [key for key, shadow in self.shadows.items() if shadow.storage.expired()]
        for key in gone:
            del self.shadows[key]


def _of_size(shadow: Shadow, t: Tensor) -> Tensor:
    """The bits of memory that is seen as elements of another size, a complex number as two."""
    old, new, count = shadow.itemsize, t.element_size(), _elements(t)
    if old % new == 0 and shadow.bits.numel() * (old // new) == count:
        return shadow.bits.repeat_interleave(old // new) & ~LOW
    if new % old == 0 and shadow.bits.numel() == count * (new // old):
        parts = shadow.bits.reshape(count, -1).unbind(1)
        found = functools.reduce(torch.bitwise_or, parts) & ~(LOW | SIZED)
        return found | (functools.reduce(torch.bitwise_and, parts) & SIZED)
    return (union(shadow.bits) & ~(LOW | SIZED)).repeat(count)


def union(bits: Tensor) -> Tensor:
    """Every bit that any element has, 0-dim."""
    found = torch.zeros((), dtype=torch.uint8, device=bits.device)
    for bit in (PADDED, UNKNOWN, LOW, SIZED, SKEWED):
        found = found | ((bits & bit) != 0).any().to(torch.uint8) * bit
    return found


def storage_of(t: Tensor) -> int:
    """The storage of a tensor, as long as it lives."""
    return t.untyped_storage()._cdata


def _elements(t: Tensor) -> int:
    return -(-t.untyped_storage().nbytes() // t.element_size())
