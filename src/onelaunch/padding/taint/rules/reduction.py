"""Operations along dimensions: sums, the largest, softmax, norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import (
    Planes,
    TaintedCall,
    any_over,
    dims_of,
    each,
    fitted,
    hidden,
    more,
    spread,
    visible_over,
)


def reduced(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join the plane over the reduced dimensions."""
    t, dims = call.args[0], dims_of(call, call.args[0])
    plane = more(call, taint, t, dims)
    if call.name.startswith("any"):  # constants that are 0 add nothing
        plane = taint(t) | (plane & ~call.zero(t))
    return each(any_over(plane, dims), call.results)


def summed(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join the plane over the summed dimensions, except known zeros. A sum of padding stays
    padding, as a later operation may sort or count rows."""
    t, dims = call.args[0], dims_of(call, call.args[0])
    found = any_over(taint(t) & ~call.zero(t), dims)
    if taint is not call.unknown and t.numel():
        found = found | ~any_over(~taint(t), dims)
    return each(found, call.results)


def measured(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint a norm as a sum of powers, whose power of 0 is 0 for positive orders."""
    order = call.argument("ord", call.argument("p"))
    return (reduced if order is not None and order <= 0 else summed)(call, taint)


def averaged_over(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `mean` as a sum, if the number of elements is unchanged."""
    t = call.args[0]
    real = call.real(t)
    if real is None or any(real[d] != t.shape[d] for d in dims_of(call, t)):
        return reduced(call, taint)
    return summed(call, taint)


def largest(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint a maximum: the lowest do not count beside others. The index of an element that moved
    with the size is tainted too."""
    dims = dims_of(call, call.args[0])
    found = above_low(call, taint, dims)
    numbers = found | (taint is not call.unknown and behind(call, taint, dims))
    planes = [found, *[numbers] * len(call.results)]
    return [fitted(plane, r.shape) for plane, r in zip(planes, call.results, strict=False)]


def behind(call: TaintedCall, taint: Planes, dims: Sequence[int]) -> Tensor:
    """Return whether real elements lie beyond the real size: behind padding, as after a `cat`."""
    t = call.args[0]
    real, plane = call.real(t), torch.zeros_like(taint(t))
    for dim in dims:
        size = 0 if real is None else min(real[dim], t.shape[dim])
        plane.narrow(dim, size, t.shape[dim] - size).fill_(True)
    return any_over(plane & ~taint(t), dims)


def above_low(call: TaintedCall, taint: Planes, dims: Sequence[int]) -> Tensor:
    t = call.args[0]
    return visible_over(more(call, taint, t, dims), hidden(call, t, dims), dims)


def softmax(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint a softmax: the lowest become 0 beside others, at every call, but stay padding."""
    t = call.args[0]
    dims = dims_of(call, t)
    low = hidden(call, t, dims)
    found = above_low(call, taint, dims).broadcast_to(t.shape)
    if taint is call.unknown:
        return [found & ~(low & any_over(~low, dims))]
    return [found | taint(t)]


def log_softmax(call: TaintedCall, taint: Planes) -> list[Tensor]:
    return [above_low(call, taint, dims_of(call, call.args[0])) | taint(call.args[0])]


def batch_norm(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint a row by the batch in training, by itself in eval."""
    t = call.args[0]
    training = call.argument("training", call.argument("train", False))
    mixed = spread(call, taint, t)
    if "no_stats" in call.name or "with_update" in call.name or training:
        found = any_over(taint(t), [d for d in range(t.dim()) if d != 1]) | mixed
        return [found, *[found.any()] * (len(call.results) - 1)]
    rest = torch.tensor(mixed, device="cpu")
    return [taint(t) | mixed, *[rest] * (len(call.results) - 1)]


def renormed(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `renorm` by each slice along a dimension."""
    t, dim = call.args[0], call.args[2] % call.args[0].dim()
    others = [d for d in range(t.dim()) if d != dim]
    return [taint(t) | any_over(taint(t) & ~call.zero(t), others)]
