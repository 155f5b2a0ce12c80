"""Values of host tensors that the host reads in a call: a recording fits only calls with the same.

`x.split(lengths.tolist())` puts them into shapes and branches, which a replay repeats. Small
tensors are compared by their bytes. Larger state is compared by its version counter, which misses
writes through NumPy, `.data` and fused optimizers: no copy of it is kept on a device. A larger
argument is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from onelaunch.call.spec import has_strides
from onelaunch.identity import id
from onelaunch.state.slots import Slot

MOST_BYTES = 512
"""Largest argument that is compared byte for byte at each call: a microsecond."""
MOST_STORED_BYTES = 1 << 14
"""Largest tensor of the callable's state that is compared byte for byte: 2 us."""


def bytes_of(t: Tensor) -> bytes:
    """Return the elements of a host tensor as contiguous bytes."""
    if not t.is_contiguous() or t.is_conj() or t.is_neg():
        t = t.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel() * t.itemsize) if t.numel() else b""


def stored_bytes(t: Tensor) -> bytes:
    """Return all bytes of a host tensor's storage."""
    storage = t.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def version_of(t: Tensor) -> int:
    """Return the number of a tensor's writes in place."""
    return t._version


def key_of(t: Tensor) -> Callable[[Tensor], object]:
    """Return a reader whose result changes with a tensor's values; see `is_comparable`."""
    if t.untyped_storage().nbytes() <= MOST_STORED_BYTES:
        return stored_bytes
    return id if t.is_inference() else version_of


def values_of(tensors: Iterable[Tensor]) -> dict[int, bytes]:
    """Return index -> bytes for the small host tensors among tensors."""
    return {
        i: bytes_of(t)
        for i, t in enumerate(tensors)
        if t.device.type == "cpu" and has_strides(t) and t.nbytes <= MOST_BYTES
    }


def is_comparable(t: Tensor) -> bool:
    """Return whether a change of the tensor's values can be detected."""
    return t.untyped_storage().nbytes() <= MOST_STORED_BYTES or not t.is_inference()


def slots_of(
    read: Iterable[Tensor], tensors: Iterable[tuple[Slot, Tensor]]
) -> Iterator[tuple[Slot, object]]:
    """Return the slots of host tensors that were read, and slots of their values, for a guard.

    Args:
        tensors: the callable's slots that hold tensors.
    """
    hosted = list(read)
    places = {id(t): slot for slot, t in reversed(list(tensors))} if hosted else {}
    for t in hosted:
        slot = places.get(id(t))
        if slot is not None:
            yield slot, t
        name = f"the value of {slot.name}" if slot is not None else "the value of a host tensor"
        key = key_of(t)
        yield Slot("contents", t, key, name, None, slot), key(t)
