"""Values that name rows: the rows where they put elements, and those that they never name.

A real one names a real row, whatever the call: each call is checked. One of padding names the last
row of the bucket, which is never real.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import Planes, TaintedCall, beyond
from onelaunch.padding.taint.rules.elementwise import pointwise

_COPIES = frozenset({"_to_copy", "clone", "copy", "copy_"})
_JOINS = frozenset({"cat", "stack", "repeat", "_unsafe_view"})
_PICKS = frozenset({"index_select", "gather", "index"})


def kept(call: TaintedCall, packet: str, padded: Tensor) -> Tensor:
    """Return the plane of a result that names real rows, as it holds such elements.

    Args:
        padded: the plane of the result's elements that depend on padding.
    """
    none, t = torch.zeros((), dtype=torch.bool, device=padded.device), call.args[0]
    if call.results[0].dtype not in (torch.int32, torch.int64):
        return none
    if packet in _COPIES:
        return call.rows(call.args[1] if packet.startswith("copy") else t)
    if packet in _JOINS:
        given = [call.rows(v) for v in t] if isinstance(t, list | tuple) else call.rows(t)
        return call.func(given, *call.args[1:], **call.kwargs)
    if packet in _PICKS and bool((call.rows(t) | call.padded(t)).all()):
        return ~padded
    return none


def compared(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join the planes of two tensors that are compared. A real row never equals a known number
    beyond the real rows. Where padding equals something, the places vary with the size."""
    (found,) = pointwise(call, taint)
    a, b = call.args[:2]
    if taint is not call.unknown or not (call.bound(a) or call.bound(b)):
        return [found]
    for one, other in ((a, b), (b, a)):
        value = call.value(other)
        beyond_rows = (value < 0) | (value >= call.bound(one))
        found = found & ~(call.rows(one) & ~call.unknown(other) & beyond_rows)
    return [found | (call.padded(a) | call.padded(b)) & (call.value(a) == call.value(b))]


def landed(
    call: TaintedCall, taint: Planes, put: Tensor, over: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return the plane of a tensor's places where elements of a plane are put along a dimension;
    None if they may be any. Places beyond the real size stay padding.

    Args:
        put: the plane of the elements that are put.
        over: gives a tensor of the shape of the index the shape of `put`.
    """
    t, dim, index = call.args[:3]
    real, value = call.real(t), over(call.value(index))
    unknown = over(call.unknown(index))
    if real is None:
        return None
    size = t.shape[dim]
    if real[dim] != size:
        if not _in_place(call, t) or not _is_whole(call, index):
            return None
        spare = (real[dim], size) in call.spare
        unknown = unknown | (value != size - 1) if spare else torch.ones_like(unknown)
    found = torch.zeros(t.shape, dtype=torch.uint8, device=put.device)
    exact = (put & ~unknown).to(torch.uint8)
    found = found.scatter_reduce(dim, value.long(), exact, "amax", include_self=True).bool()
    anywhere = (put & unknown).any(dim, keepdim=True)
    first = tuple(slice(None) if d == dim % t.dim() else slice(0, n) for d, n in enumerate(put.shape))
    found[first] |= anywhere
    grown = taint is not call.unknown and real != t.shape
    return found | beyond(t.shape, real, found.device) if grown else found


def _in_place(call: TaintedCall, t: Tensor) -> bool:
    """Return whether everything beyond the real size is padding, so that the rest is in place. It
    may be constant too: constants in other places show in the values."""
    real, other = call.real(t), call.padded(t) | ~call.unknown(t)
    return real is not None and bool((other | ~beyond(t.shape, real, other.device)).all())


def _is_whole(call: TaintedCall, index: Tensor) -> bool:
    """Return whether the elements that depend on padding are those that the unpadded run lacks."""
    real = call.real(index)
    return real is not None and int((~call.padded(index)).sum()) == math.prod(real)
