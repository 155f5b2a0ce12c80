"""A byte for each element of a storage, which views see as they see the storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onelaunch.driver.operators import copy_bits


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
            bits = torch.full(
                (_elements(t),),
                int(shadow.bits.max()) if shadow.bits.numel() else 0,
                dtype=torch.uint8,
                device=self.device,
            )
            self.shadows[key] = shadow = Shadow(shadow.storage, bits, t.element_size())
        return shadow.bits.as_strided(t.shape, t.stride(), int(t.storage_offset()))

    def any(self, t: Tensor, bit: int) -> bool:
        """Whether an element of the storage of `t` has this bit."""
        shadow = self.shadows.get(storage_of(t))
        return shadow is not None and bool((shadow.bits & bit).any())

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

    def prune(self) -> None:
        """Forget storages that are gone."""
        gone = [key for key, shadow in self.shadows.items() if shadow.storage.expired()]
        for key in gone:
            del self.shadows[key]


def storage_of(t: Tensor) -> int:
    """The storage of a tensor, as long as it lives."""
    return t.untyped_storage()._cdata


def _elements(t: Tensor) -> int:
    return -(-t.untyped_storage().nbytes() // t.element_size())
