"""Places out of bounds, refused before a device sees them: there they end the process.

A proof runs a callable on values that nobody gave it. On a CPU torch raises; on a GPU an index out
of bounds is a device assert, after which CUDA is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_ALONG = frozenset(
    {
        *("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
        *("scatter_reduce_", "index_select", "index_add", "index_add_", "index_copy"),
        *("index_copy_", "index_fill", "index_fill_", "index_reduce", "index_reduce_"),
    }
)
"""Operations on (tensor, dimension, places along it)."""
_AT = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put"})
_SHARES = frozenset({"bernoulli", "binary_cross_entropy"})
"""Operations on numbers from 0 to 1, which a device asserts too."""


def check_bounds(packet: str, args: tuple[Any, ...]) -> None:
    """Raise IndexError where an operation would be told places that there are not. Waits for the
    device if it is told any."""
    for places, least, size in _told(packet, args):
        if places.numel() and not bool(((places >= least) & (places < size)).all()):
            raise IndexError(f"`{packet}` is told places out of bounds, of {size} that there are")
    shares = args[0] if packet in _SHARES and isinstance(args[0], Tensor) else None
    if shares is not None and bool(((shares < 0) | (shares > 1)).any()):
        raise ValueError(f"`{packet}` is given numbers that are not from 0 to 1")


def _told(packet: str, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int, int]]:
    """The places that an operation is told, the first that there is, and their end."""
    if packet in _ALONG:
        t, dim, places = args[:3]
        yield places, 0, t.shape[dim] if t.dim() else 1
    elif packet in _AT:
        dim = 0
        for places in args[1]:
            if places is None:
                dim += 1
            elif places.dtype in (torch.bool, torch.uint8):
                dim += places.dim()
            else:
                size = args[0].shape[dim]
                yield places, -size, size
                dim += 1
    elif packet in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        yield args[1], 0, args[0].shape[0]
    elif packet in ("take", "put", "put_"):
        count = args[0].numel()
        yield args[1], -count, count
    elif packet in ("nll_loss_forward", "nll_loss2d_forward"):
        scores, target, ignored = args[0], args[1], args[4]
        yield target[target != ignored], 0, scores.shape[1 if scores.dim() > 1 else 0]
