"""Values of host tensors that the host reads in a call: a recording fits only calls with the same.

`x.split(lengths.tolist())` puts them into shapes and branches, which a replay repeats. Small
tensors are compared by their bytes; a larger one of the callable's own by how often it was written,
which says nothing of writes through NumPy; a larger argument is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from onelaunch.call.spec import has_strides
from onelaunch.state.slots import Slot

MOST_BYTES = 512
"""Of a tensor that is compared byte for byte at each call: a microsecond."""


def bytes_of(t: Tensor) -> bytes:
    """The elements of a host tensor, as they lie in memory one after another."""
    if not t.is_contiguous() or t.is_conj() or t.is_neg():
        t = t.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel() * t.itemsize) if t.numel() else b""


def stored_bytes(t: Tensor) -> bytes:
    """All bytes of a host tensor's storage."""
    storage = t.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def version_of(t: Tensor) -> int:
    """How often a tensor was written in place."""
    return t._version


def key_of(t: Tensor) -> Callable[[Tensor], object]:
    """What tells whether a tensor's values are still the same; see `is_comparable`."""
    if t.untyped_storage().nbytes() <= MOST_BYTES:
        return stored_bytes
    return id if t.is_inference() else version_of


def values_of(tensors: Iterable[Tensor]) -> dict[int, bytes]:
    """The elements of the small ones that are the host's, by number."""
    return {
        i: bytes_of(t)
        for i, t in enumerate(tensors)
        if t.device.type == "cpu" and has_strides(t) and t.nbytes <= MOST_BYTES
    }


def is_comparable(t: Tensor) -> bool:
    """Whether it can be told that the values are still the same."""
    return t.untyped_storage().nbytes() <= MOST_BYTES or not t.is_inference()


def slots_of(
    read: Iterable[Tensor], known: Iterable[tuple[Slot, Tensor]]
) -> Iterator[tuple[Slot, object]]:
    """What a guard watches of the host tensors that were read: where they are, and their values.

    Args:
        known: the slots of the callable that hold tensors.
    """
    places = {id(t): slot for slot, t in reversed(list(known))}
    for t in read:
        slot = places.get(id(t))
        if slot is not None:
            yield slot, t
        name = f"the value of {slot.name}" if slot is not None else "the value of a host tensor"
        key = key_of(t)
        yield Slot("contents", t, key, name, None, slot), key(t)
