"""Host tensors in a run: the sources of their values, and their readers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from onelaunch.call.spec import has_strides
from onelaunch.driver.refusals import DRAWN, READ_BY_HOST, error_here
from onelaunch.state.host_values import MOST_BYTES, MOST_STORED_BYTES, bytes_of, is_comparable


class HostTensors:
    """The host tensors of one run."""

    def __init__(self) -> None:
        # Storages that the call made: of constants, and not filled yet.
        self._constant: set[int] = set()
        self._blank: set[int] = set()
        # Storage that the call computed -> the storages that its values come from.
        self._roots: dict[int, frozenset[int]] = {}
        self._random: set[int] = set()
        # Storage from before the call -> a tensor over it; the host has used the values of `_read`.
        self._outside: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}
        # Number of an argument -> the argument.
        self._arguments: dict[int, Tensor] = {}
        self._held_on_device: set[int] = set()
        # Kept so that no other tensor gets their addresses during the run.
        self._kept: list[Tensor] = []

    def hold_on_device(self, found: Iterable[Tensor]) -> None:
        """Take host tensors that a capture has on the device: numbers among the arguments, and
        seeds that an operator makes for its backward."""
        for storage in map(_storage, found):
            self._held_on_device.add(storage)
            if storage in self._roots:  # the run made it: results computed from it name it
                self._roots[storage] = frozenset({storage})

    def is_held_on_device(self, t: Tensor) -> bool:
        """Return whether a tensor comes from a tensor that a capture has on the device."""
        if not self._held_on_device or not has_strides(t):
            return False
        storage = _storage(t)
        return not self._held_on_device.isdisjoint(self._roots.get(storage, (storage,)))

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
        self._constant.add(_storage(t))

    def used(self, t: Tensor) -> None:
        """Note an argument of an operation."""
        storage = _storage(t)
        if not self._is_known(storage) and storage not in self._roots:
            self._outside.setdefault(storage, t)

    def made(self, t: Tensor, sources: Sequence[int], random: bool, idle: bool) -> None:
        """Note a result of an operation.

        Args:
            sources: the storages of the operation's arguments.
            idle: True if it fills nothing, as `torch.empty`.
        """
        storage = _storage(t)
        if storage in sources:
            return
        self._kept.append(t)
        if all(source in self._constant for source in sources) and not random:
            (self._blank if idle else self._constant).add(storage)
        else:
            varying = [source for source in sources if not self._is_known(source)]
            self._depend(storage, varying, random)

    def written(self, t: Tensor, given: Sequence[Tensor], random: bool) -> bool:
        """Note that an operation writes into a tensor. Return whether the call made its memory.

        Args:
            given: the host tensors that the values come from.
        """
        storage = _storage(t)
        if not self._is_known(storage) and storage not in self._roots:
            return False
        sources = {_storage(other) for other in given} - {storage}
        varying = [source for source in sources if not self._is_known(source)]
        if varying or random:
            self._constant.discard(storage)
            self._blank.discard(storage)
            self._depend(storage, varying, random)
        elif storage in self._blank:
            self._blank.discard(storage)
            self._constant.add(storage)
        return True

    def _depend(self, storage: int, sources: Sequence[int], random: bool) -> None:
        if random or any(source in self._random for source in sources):
            self._random.add(storage)
        none: frozenset[int] = frozenset()
        roots = (self._roots.get(source, frozenset({source})) for source in sources)
        self._roots[storage] = self._roots.get(storage, none).union(*roots)

    def varies(self, t: Tensor) -> bool:
        """Return whether a tensor's values may differ in another call that the recording fits."""
        return _storage(t) not in self._constant and _storage(t) not in self._read

    def is_drawn(self, t: Tensor) -> bool:
        """Return whether a tensor's values come from random numbers of the call."""
        return _storage(t) in self._random

    def fixes(self, t: Tensor) -> bool:
        """Return whether a tensor has the same values in each call that the recording fits. State
        is compared from now on, so that it has."""
        storage = _storage(t)
        if self._is_known(storage):
            return storage in self._constant
        if storage in self._random:
            return False
        for root in self._roots.get(storage, frozenset({storage})):
            given = any(_is_over(a, root) for a in self._arguments.values())
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
        if storage not in self._roots:
            self._outside.setdefault(storage, t)
        for root in self._roots.get(storage, {storage}):
            outside = self._outside[root]
            if root in self._read:
                continue
            given = [a for a in self._arguments.values() if _is_over(a, root)]
            large = next((a for a in given if a.nbytes > MOST_BYTES), None)
            if not given and not is_comparable(outside):
                large = outside
            if large is not None:
                what = f"the host reads the values of {named(large)}, too many to compare"
                raise error_here("OL104", what, fix=READ_BY_HOST)
            self._read[root] = outside

    def _is_known(self, storage: int) -> bool:
        return storage in self._constant or storage in self._blank

    def made_here(self, t: Tensor) -> bool:
        return self._is_known(_storage(t)) or _storage(t) in self._roots

    def is_constant(self, t: Tensor) -> bool:
        """Return whether a tensor was made in the run from constants alone."""
        return _storage(t) in self._constant

    def read_arguments(self) -> dict[int, bytes]:
        """Return the bytes of the arguments that the host read, by number."""
        return {
            index: bytes_of(t)
            for index, t in self._arguments.items()
            if any(_is_over(t, root) for root in self._read)
        }

    def read_state(self) -> list[Tensor]:
        """Return the tensors whose values the host read, except arguments."""
        given = self._arguments.values()
        read = self._read.items()
        return [t for root, t in read if not any(_is_over(a, root) for a in given)]

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


def _is_over(t: Tensor, storage: int) -> bool:
    return has_strides(t) and _storage(t) == storage


def named(t: Tensor) -> str:
    """Return a tensor's text for a message: ``float32[4, 8] on cuda:0``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"
