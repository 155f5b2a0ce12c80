"""The way from a tensor of the emulated device to its memory, and back.

A block belongs to a storage of the device, as an attribute of the storage's Python object, which
torch keeps for as long as any tensor uses the storage. So a block lives exactly as long as memory
on a device does, whoever holds it: autograd, `p.data = q`, or Python.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from onelaunch.testing.arena import Arena, Block

T = TypeVar("T", bound=Tensor)

NAME = "tape"

ORDINARY = Arena()
"""The memory of tensors that no capture makes."""

_of_thread = threading.local()


def ordinary() -> Arena:
    """Find the arena of this thread's new tensors outside a capture."""
    return getattr(_of_thread, "arena", ORDINARY)


@contextmanager
def apart() -> Generator[Arena]:
    """Have this thread allocate in an arena of its own meanwhile, to see how much that takes."""
    before, arena = ordinary(), Arena()
    _of_thread.arena = arena
    try:
        yield arena
    finally:
        _of_thread.arena = before


def device_storage(block: Block) -> torch.UntypedStorage:
    """Make a storage of the device over `block`, which it owns."""
    storage: Any = torch._C._construct_storage_from_data_pointer(
        block.address, torch.device(NAME, 0), block.nbytes
    )
    storage.block = block
    return storage


def block_of(t: Tensor) -> Block:
    """Find the block in which a device tensor lives."""
    storage: Any = t.untyped_storage()
    if not hasattr(storage, "block"):  # made inside torch, for no elements
        bind(t, device_storage(ORDINARY.allocate(0)), 0, t.shape, t.stride())
        storage = t.untyped_storage()
    return storage.block


def host_over(
    block: Block, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """Make a CPU tensor over the memory of `block`, which it does not keep allocated."""
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            block.host, offset, tuple(size), tuple(stride)
        )


def host(t: Tensor) -> Tensor:
    """Make a CPU tensor over the memory of the device tensor `t`."""
    over = host_over(block_of(t), t.dtype, t.shape, t.stride(), int(t.storage_offset()))
    torch._C._set_conj(over, t.is_conj())
    torch._C._set_neg(over, t.is_neg())
    return over


def tensor_over(
    cls: type[T],
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> T:
    """Make a tensor of class `cls` over the device's `storage`, with `offset` in elements."""
    t = Tensor._make_wrapper_subclass(cls, (0,), dtype=dtype, device=torch.device(NAME, 0))
    bind(t, storage, offset, size, stride)
    return t


def bind(
    t: Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> None:
    """Let the device tensor `t` use `storage`, with `offset` in elements."""
    aten = torch.ops.aten
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        # torch has `set_` for its own devices and for meta; meta's takes any storage, and only
        # for no elements one that it may not resize. `as_strided_` then works on every device.
        include = torch._C._meta_in_tls_dispatch_include()
        aten.as_strided_.default(t, (0,), (1,), 0)
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            aten.set_.source_Storage_storage_offset(t, storage, 0, (0,), (1,))
        finally:
            torch._C._set_meta_in_tls_dispatch_include(include)
        aten.as_strided_.default(t, tuple(size), tuple(stride), offset)
