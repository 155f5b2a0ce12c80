"""Values that name rows: the rows where they put elements, and those that they never name.

A real one names a real row, whatever the call: each call is checked. One of padding names the last
row of the bucket, which is never real.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onelaunch.driver.aten import tensors
from onelaunch.padding.taint.rules.call import Planes, TaintedCall, rerun
from onelaunch.padding.taint.rules.elementwise import pointwise
from onelaunch.padding.taint.rules.places import index_taint, indices_along, names, only

_MOVES = frozenset(
    {
        *("cat", "stack", "repeat", "flip", "_unsafe_view"),
        *("_to_copy", "clone", "copy", "copy_"),
    }
)
_PICKS = frozenset({"index_select", "gather", "index"})


def named_by(call: TaintedCall) -> tuple[int, int] | None:
    """Return the size whose rows a result names, if it holds elements of inputs that name rows."""
    packet, t = call.packet, call.args[0] if call.args else None
    index = call.results[0].dtype in (torch.int32, torch.int64)
    if packet not in _MOVES | _PICKS or not index:
        return None
    if packet in _PICKS:
        return call.named(t)
    found = {call.named(v) for v in tensors(call.args)} - {None}
    return found.pop() if len(found) == 1 else None


def kept(call: TaintedCall, padded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the planes of a result that name real rows, and rows that are not real, as it holds
    such elements of its inputs. `padded`: the plane of the result's elements that depend on
    padding."""
    none, t = torch.zeros((), dtype=torch.bool, device=padded.device), call.args[0]
    packet = call.packet
    if packet in _MOVES:
        return rerun(call, call.rows)[0], rerun(call, call.spare)[0]
    if packet in _PICKS and bool((call.rows(t) | call.spare(t)).all()):
        indices = call.args[1] if packet == "index" else indices_along(*call.args[:3])
        named = names(call, t, *only(indices))
        if packet == "gather":
            return ~padded, call.spare(call.args[2]) if named else none
        return ~padded, index_taint(indices, call.spare, padded) & padded if named else none
    return none, none


def compared(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join the planes of two tensors that are compared. A real row never equals a known number
    beyond the real rows. Where padding equals something, the places vary with the size."""
    (found,) = pointwise(call, taint)
    a, b = call.args[:2]
    if taint is not call.unknown or call.named(a) is call.named(b) is None:
        return [found]
    for one, other in ((a, b), (b, a)):
        value, named = call.value(other), call.named(one)
        beyond_rows = (value < 0) | (value >= (named[1] - 1 if named else math.inf))
        found = found & ~(call.rows(one) & ~call.unknown(other) & beyond_rows)
    return [found | (call.padded(a) | call.padded(b)) & (call.value(a) == call.value(b))]
