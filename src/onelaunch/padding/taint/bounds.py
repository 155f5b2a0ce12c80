"""Out-of-bounds values, refused before a device asserts and ends the process.

A proof runs a callable on made-up values. On a CPU torch raises; on a GPU an index out of bounds is
a device assert, after which CUDA is unusable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import tensors

_ALONG = frozenset(
    {
        *("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
        *("scatter_reduce_", "index_select", "index_add", "index_add_", "index_copy"),
        *("index_copy_", "index_fill", "index_fill_", "index_reduce", "index_reduce_"),
    }
)
"""Operations on (tensor, dimension, indices along it)."""
_AT = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put"})
_PROBABILITIES = frozenset({"bernoulli", "binary_cross_entropy"})
"""Operations on numbers that a device asserts to be from 0 to 1."""
_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim"})
"""Namespaces whose kernels make no index of a float by themselves."""


def check_bounds(packet: str, args: tuple[Any, ...]) -> None:
    """Raise IndexError if an operation would get indices out of bounds. Waits for the device if
    there are any indices."""
    for indices, least, size in _indices_of(packet, args):
        if indices.numel() and not bool(((indices >= least) & (indices < size)).all()):
            raise IndexError(f"`{packet}` is told places out of bounds, of {size} that there are")
    probabilities = args[0] if packet in _PROBABILITIES and isinstance(args[0], Tensor) else None
    if probabilities is not None and bool(((probabilities < 0) | (probabilities > 1)).any()):
        raise ValueError(f"`{packet}` is given numbers that are not from 0 to 1")
    if packet == "multinomial" and bool((args[0] < 0).any()):
        raise ValueError("`multinomial` is given numbers below 0")
    if packet == "_assert_async" and not bool(args[0]):
        raise ValueError("what the code asserts is not so")


def check_known(func: Any, args: tuple[Any, ...]) -> None:
    """Raise ValueError for a library's own operation on made-up floats. Its kernel may turn a float
    into an index, as `torchvision::roi_align` does."""
    library = getattr(func, "namespace", "aten")
    if library not in _TORCH_NAMESPACES and any(t.is_floating_point() for t in tensors(args)):
        raise ValueError(f"a kernel of `{library}` might take a number for a place in memory")


def _indices_of(packet: str, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int, int]]:
    """Return the index tensors of an operation, with the first valid index and the end."""
    if packet in _ALONG:
        t, dim, indices = args[:3]
        yield indices, 0, t.shape[dim] if t.dim() else 1
    elif packet in _AT:
        dim = 0
        for indices in args[1]:
            if indices is None:
                dim += 1
            elif indices.dtype in (torch.bool, torch.uint8):
                dim += indices.dim()
            else:
                size = args[0].shape[dim]
                yield indices, -size, size
                dim += 1
    elif packet in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        yield args[1], 0, args[0].shape[0]
    elif packet in ("take", "put", "put_"):
        count = args[0].numel()
        yield args[1], -count, count
    elif packet in ("nll_loss_forward", "nll_loss2d_forward"):
        scores, target, ignored = args[0], args[1], args[4]
        yield target[target != ignored], 0, scores.shape[1 if scores.dim() > 1 else 0]
