"""Host tensors in a run: the sources of their values, and their readers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from onelaunch.call.spec import has_strides
from onelaunch.driver.refusals import DRAWN, READ_BY_HOST, error_here
from onelaunch.state.host_values import MOST_BYTES, MOST_STORED_BYTES, bytes_of, is_comparable

_Origin = Literal["constant", "blank"] | frozenset[int]
"""The values are the same in each call, nothing is filled in yet, or they come from storages."""


class HostTensors:
    """The host tensors of one run."""

    def __init__(self) -> None:
        self._origins: dict[int, _Origin] = {}
        """storage that the call made -> the origin of its values."""
        self._random: set[int] = set()
        # Storage from before the call -> a tensor over it; the host has used the values of `_read`.
        self._outside: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}
        # Number of an argument -> the argument.
        self._arguments: dict[int, Tensor] = {}
        self._held_on_device: set[int] = set()
        # Kept so that no other tensor gets their addresses during the run.
        self._kept: list[Tensor] = []

    def hold_on_device(self, tensors: Iterable[Tensor]) -> None:
        """Take host tensors that a capture has on the device: numbers among the arguments, and
        seeds that an operator makes for its backward."""
        for storage in map(_storage, tensors):
            self._held_on_device.add(storage)
            # Results computed from it name it.
            if isinstance(self._origins.get(storage), frozenset):
                self._origins[storage] = frozenset({storage})

    def is_held_on_device(self, t: Tensor) -> bool:
        """Return whether a tensor comes from a tensor that a capture has on the device."""
        if not self._held_on_device or not has_strides(t):
            return False
        storage = _storage(t)
        return not self._held_on_device.isdisjoint(
            {storage} if self._is_known(storage) else self._roots(storage)
        )

    def note_arguments(self, arguments: Mapping[int, Tensor]) -> None:
        """Take the host arguments of the call, by number. A call must match 0-dim values."""
        self._arguments = dict(arguments)
        for t in arguments.values():
            if not t.dim():
                self._outside[_storage(t)] = t
                self._read[_storage(t)] = t

    def note_constant(self, t: Tensor) -> None:
        """Note a tensor made from a constant in the code."""
        self._kept.append(t)
        self._origins[_storage(t)] = "constant"

    def note_argument(self, t: Tensor) -> None:
        """Note an argument of an operation."""
        storage = _storage(t)
        if storage not in self._origins:
            self._outside.setdefault(storage, t)

    def note_result(self, t: Tensor, sources: Sequence[int], random: bool, idle: bool) -> None:
        """Note a result of an operation.

        Args:
            sources: the storages of the operation's arguments.
            idle: True if it fills nothing, as `torch.empty`.
        """
        storage = _storage(t)
        if storage in sources:
            return
        self._kept.append(t)
        if all(self._origins.get(source) == "constant" for source in sources) and not random:
            self._origins[storage] = "blank" if idle else "constant"
        else:
            self._depend(storage, sources, random)

    def written(self, t: Tensor, given: Sequence[Tensor], random: bool) -> bool:
        """Note that an operation writes into a tensor. Return whether the call made its memory.

        Args:
            given: the host tensors that the values come from.
        """
        storage = _storage(t)
        if storage not in self._origins:
            return False
        sources = {_storage(other) for other in given} - {storage}
        if random or not all(map(self._is_known, sources)):
            self._depend(storage, sources, random)
        elif self._origins[storage] == "blank":
            self._origins[storage] = "constant"
        return True

    def _depend(self, storage: int, sources: Collection[int], random: bool) -> None:
        if random or not self._random.isdisjoint(sources):
            self._random.add(storage)
        roots = self._origins.get(storage)
        before = roots if isinstance(roots, frozenset) else frozenset[int]()
        self._origins[storage] = before.union(*map(self._roots, sources))

    def _roots(self, storage: int) -> frozenset[int]:
        """Return the storages from before the call that the values of a storage come from."""
        roots = self._origins.get(storage, frozenset({storage}))
        return roots if isinstance(roots, frozenset) else frozenset()

    def varies(self, t: Tensor) -> bool:
        """Return whether a tensor's values may differ in another call that the recording fits."""
        return not self.is_constant(t) and _storage(t) not in self._read

    def is_drawn(self, t: Tensor) -> bool:
        """Return whether a tensor's values come from random numbers of the call."""
        return _storage(t) in self._random

    def fixes(self, t: Tensor) -> bool:
        """Return whether a tensor has the same values in each call that the recording fits. A
        tensor of the state joins the values that calls must match."""
        storage = _storage(t)
        if self._is_known(storage):
            return self.is_constant(t)
        if storage in self._random:
            return False
        for root in self._roots(storage):
            given = self._arguments_over(root)
            if given and root not in self._read:
                return False
            outside = self._outside.get(root, t)
            if not given and outside.untyped_storage().nbytes() > MOST_STORED_BYTES:
                return False
        self.read(t)
        return True

    def read(self, t: Tensor) -> None:
        """Note that the host uses the values of a tensor, which each call must match.

        Raises:
            CaptureError: OL104, they cannot be compared.
        """
        storage = _storage(t)
        if self._is_known(storage):
            return
        if storage in self._random:
            raise error_here("OL104", f"the host reads random numbers, {named(t)}", fix=DRAWN)
        self.note_argument(t)
        for root in self._roots(storage):
            outside = self._outside[root]
            if root in self._read:
                continue
            given = self._arguments_over(root)
            large = next((a for a in given if a.nbytes > MOST_BYTES), None)
            if not given and not is_comparable(outside):
                large = outside
            if large is not None:
                what = f"the host reads the values of {named(large)}, too many to compare"
                raise error_here("OL104", what, fix=READ_BY_HOST)
            self._read[root] = outside

    def _is_known(self, storage: int) -> bool:
        return isinstance(self._origins.get(storage), str)

    def _arguments_over(self, storage: int) -> list[Tensor]:
        return [a for a in self._arguments.values() if has_strides(a) and _storage(a) == storage]

    def made_here(self, t: Tensor) -> bool:
        return _storage(t) in self._origins

    def is_constant(self, t: Tensor) -> bool:
        """Return whether a tensor was made in the run from constants alone."""
        return self._origins.get(_storage(t)) == "constant"

    def read_arguments(self) -> dict[int, bytes]:
        """Return the bytes of the arguments that the host read, by number."""
        return {
            index: bytes_of(t)
            for index, t in self._arguments.items()
            if has_strides(t) and _storage(t) in self._read
        }

    def read_state(self) -> list[Tensor]:
        """Return the tensors whose values the host read, except arguments."""
        return [t for root, t in self._read.items() if not self._arguments_over(root)]

    def release(self) -> None:
        self._kept.clear()
        self._outside.clear()
        self._read.clear()
        self._arguments.clear()


def references(tensors: Sequence[Tensor]) -> list[int]:
    """Count the references to each tensor, from Python and from C++."""
    return [sys.getrefcount(t) + t._use_count() for t in tensors]  # pyright: ignore


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def named(t: Tensor) -> str:
    """Return a tensor's text for a message: ``float32[4, 8] on cuda:0``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"
