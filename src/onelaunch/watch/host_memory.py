"""Tensors of the host's in a run: where their values come from, and who reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from onelaunch.call.spec import has_strides
from onelaunch.driver.refusals import READ_BY_HOST, refuse
from onelaunch.state.host_values import MOST_BYTES, bytes_of, is_comparable


class HostMemory:
    """What is known of the host's memory in one run."""

    def __init__(self) -> None:
        # Storages made in the call from constants: the same each time, unlike all others.
        self._constant: set[int] = set()
        self._blank: set[int] = set()
        # Those computed in the call from others: from which; and those that are random.
        self._roots: dict[int, frozenset[int]] = {}
        self._random: set[int] = set()
        self._outside: dict[int, Tensor] = {}
        # Of those before, the ones whose values the host used.
        self._read: dict[int, Tensor] = {}
        self._arguments: dict[int, Tensor] = {}

    def give(self, arguments: Mapping[int, Tensor]) -> None:
        """Those of the call that are the host's, by number. A tensor of one element is a constant:
        its value is part of what a call must match."""
        self._arguments = dict(arguments)
        for t in arguments.values():
            if not t.dim():
                self._outside[_storage(t)] = t
                self._read[_storage(t)] = t

    def lifted(self, t: Tensor) -> None:
        """A tensor was made of a constant in the code."""
        self._constant.add(_storage(t))

    def used(self, t: Tensor) -> None:
        """An operation is given a tensor."""
        storage = _storage(t)
        if not self._is_known(storage) and storage not in self._roots:
            self._outside.setdefault(storage, t)

    def made(self, t: Tensor, sources: Sequence[int], random: bool, idle: bool) -> bool:
        """An operation gave a tensor; whether its memory is new.

        Args:
            sources: the storages of what it was given.
            idle: whether it fills nothing: memory from `torch.empty`, filled by who knows whom.
        """
        storage = _storage(t)
        if storage in sources:
            return False
        if all(source in self._constant for source in sources) and not random:
            (self._blank if idle else self._constant).add(storage)
            return True
        varying = [source for source in sources if not self._is_known(source)]
        if random or any(source in self._random for source in varying):
            self._random.add(storage)
        none: frozenset[int] = frozenset()
        roots = (self._roots.get(source, frozenset({source})) for source in varying)
        self._roots[storage] = none.union(*roots)
        return True

    def written(self, t: Tensor) -> bool:
        """An operation writes into a tensor; whether it is one of the call's own constants."""
        storage = _storage(t)
        if storage in self._blank:
            self._blank.discard(storage)
            self._constant.add(storage)
        return storage in self._constant

    def varies(self, t: Tensor) -> bool:
        """Whether a tensor's values may differ in another call that the recording fits."""
        return _storage(t) not in self._constant and _storage(t) not in self._read

    def read(self, t: Tensor) -> None:
        """The host uses the values of a tensor: they are part of what a call must match.

        Raises:
            CaptureError: OL104, they cannot be.
        """
        storage = _storage(t)
        if self._is_known(storage):
            return
        if storage in self._random:
            raise refuse("OL104", f"the host reads random numbers, {named(t)}")
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
                raise refuse("OL104", what, fix=READ_BY_HOST)
            self._read[root] = outside

    def _is_known(self, storage: int) -> bool:
        """Whether memory was made in the call from constants, or not filled yet."""
        return storage in self._constant or storage in self._blank

    def is_constant(self, t: Tensor) -> bool:
        """Whether a tensor was made in the run from constants alone."""
        return _storage(t) in self._constant

    def read_arguments(self) -> dict[int, bytes]:
        """The elements of the arguments that the host read, by number."""
        return {
            index: bytes_of(t)
            for index, t in self._arguments.items()
            if any(_is_over(t, root) for root in self._read)
        }

    def read_state(self) -> list[Tensor]:
        """The other tensors whose values it read."""
        given = self._arguments.values()
        read = self._read.items()
        return [t for root, t in read if not any(_is_over(a, root) for a in given)]

    def release(self) -> None:
        """Let go of all tensors."""
        self._outside.clear()
        self._read.clear()
        self._arguments.clear()


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _is_over(t: Tensor, storage: int) -> bool:
    return has_strides(t) and _storage(t) == storage


def named(t: Tensor) -> str:
    """A tensor in a message: ``float32[4, 8] on cuda:0``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"
