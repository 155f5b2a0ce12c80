"""The device memory that a run reads, writes and makes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.call.spec import has_strides
from onelaunch.driver.aten import OfKind
from onelaunch.driver.protocol import Driver, Region
from onelaunch.identity import id
from onelaunch.source import CodePoint, user_point
from onelaunch.watch.operations import OpCall


class DeviceMemory:
    """The memory that one run uses on its device.

    Args:
        inputs: device tensors that are inputs of the recording.
        held: storage -> tensors over it that exist already and that the callable can reach.
        save: copy memory before its first write, for `restore`.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        inputs: Iterable[Tensor],
        held: Mapping[int, Sequence[Tensor]],
        save: bool,
    ) -> None:
        self._driver = driver
        self._storage = driver.storage
        self.here = OfKind(device.type)
        """The devices of its type."""
        self.inputs: dict[int, int] = {}
        """storage -> the end of the inputs in it."""
        for region in map(driver.region, inputs):
            stop = self.inputs.get(region.storage, 0)
            self.inputs[region.storage] = max(stop, region.stop)
        self._held = held
        self._save = save
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._saved_regions: set[Region] = set()
        self.external: dict[int, list[Tensor]] = {}
        """storage -> the tensors over it that were read or written by address."""
        self.written: dict[int, Tensor] = {}
        """storage -> a tensor over it, for memory that existed before and was written."""
        self.version_bumped: set[int] = set()
        """The storages whose version counters the writes advanced: not BatchNorm's statistics."""
        self.made_tensors: list[weakref.ref[Tensor]] = []
        """Tensors made in the run, over memory of the recording."""
        self._new: dict[int, CodePoint | None] = {}
        """storage that the run allocated -> the line that did."""
        # ids of the run's views of external memory.
        self._views: set[int] = set()
        # Kept so that no other tensor gets their ids or addresses during the run.
        self._kept: list[Tensor] = []
        self._reshaped_at: dict[int, CodePoint | None] = {}
        """id of a tensor -> the line that reshaped it."""

    def on_device(self, t: Tensor) -> bool:
        return self.here[t.device]

    def storage_of(self, t: Tensor) -> int | None:
        """Return the storage of a tensor on the device; None for other tensors."""
        return self._storage(t) if self.on_device(t) and has_strides(t) else None

    def is_new(self, t: Tensor) -> bool:
        return self._storage(t) in self._new

    def is_own(self, t: Tensor) -> bool:
        """Return whether the recording made this memory, or it is an input."""
        storage = self._storage(t)
        return storage in self._new or storage in self.inputs

    def note_filled(self, t: Tensor) -> None:
        """Note new memory that was filled from Python, without the dispatcher."""
        self._new.setdefault(self._storage(t))

    def note_reads(self, call: OpCall) -> None:
        """Note the tensors that a kernel gets by address."""
        for t, storage in zip(call.on_device, call.read, strict=True):
            if storage in self._new or storage in self.inputs:
                continue
            held = self.external.setdefault(storage, [])
            if id(t) not in self._views and not any(t is other for other in held):
                held.append(t)

    def note_written(self, t: Tensor) -> None:
        """Note that an operation is about to write into a tensor."""
        if self._storage(t) in self._new:
            return
        region = self._driver.region(t)
        self.written.setdefault(region.storage, t)
        if self._save and region not in self._saved_regions:
            # Regions are saved before their first write; `restore` goes backwards.
            self._saved_regions.add(region)
            with _disable_current_modes():  # other modes must see the callable's operations alone
                memory = self._driver.alias(t, torch.uint8, (region.nbytes,), (1,), 0)
                self._saved.append((memory, memory.clone()))

    def note_made(self, t: Tensor, storage: int, arguments: Collection[int], locate: bool) -> None:
        """Note a result of an operation.

        Args:
            arguments: the storages of the operation's arguments.
            locate: True to keep the user's line that allocates memory.
        """
        if storage in self._held and storage not in self.external:
            # cuDNN makes a tensor over the weights' storage before any read of a weight.
            self.external[storage] = list(self._held[storage])
        if storage in self.external:
            self._views.add(id(t))
            self._kept.append(t)
            return
        if storage not in self.inputs:
            self._new.setdefault(storage)
            if locate and storage not in arguments:
                self._new[storage] = user_point()
        self.made_tensors.append(weakref.ref(t))

    def note_reshaped(self, t: Tensor) -> None:
        """Note that the user's line gives a tensor other sizes or strides."""
        self._reshaped_at[id(t)] = user_point()

    def made_at(self, t: Tensor) -> str | None:
        """Return the user's line that allocated a tensor's memory, for a message."""
        point = self._new.get(self._storage(t))
        return str(point.place()) if point else None

    def reshaped_at(self, t: Tensor) -> str | None:
        """Return the user's line that gave a tensor other sizes or strides, for a message."""
        point = self._reshaped_at.get(id(t))
        return str(point.place()) if point else None

    @property
    def own(self) -> set[int]:
        """ids of the tensors that are kept alive here."""
        return {id(t) for t in self.written.values()} | self._views

    @property
    def saved_bytes(self) -> int:
        """Bytes of the copies for `restore`."""
        return sum(before.nbytes for _, before in self._saved)

    def restore(self) -> None:
        """Restore every byte that existed before the run; needs `save`."""
        for memory, before in reversed(self._saved):
            if memory.untyped_storage().nbytes():  # else the run allocated it and freed it
                memory.copy_(before)
        self._saved.clear()

    def release(self) -> None:
        """Release the tensors that the run made, so that their memory can be used again."""
        self.made_tensors.clear()
        self._kept.clear()
        self._views.clear()
        self._new.clear()
        self._reshaped_at.clear()
