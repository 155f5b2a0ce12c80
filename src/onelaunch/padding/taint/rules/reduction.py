"""Operations along dimensions: sums, the largest, softmax, norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import See, TaintedCall, any_over, dims_of, each, fitted


def reduced(call: TaintedCall, see: See) -> list[Tensor]:
    """Every element that is reduced counts."""
    t = call.args[0]
    found = any_over(see(t), dims_of(call, t))
    return [fitted(found, r.shape) for r in call.results]


def summed(call: TaintedCall, see: See) -> list[Tensor]:
    """Every element that is summed counts, but for known zeros. A sum of padding remains padding,
    for who sorts or counts rows."""
    t, dims = call.args[0], dims_of(call, call.args[0])
    found = any_over(see(t) & ~call.zero(t), dims)
    if see is not call.unknown and t.numel():
        found = found | ~any_over(~see(t), dims)
    return [fitted(found, r.shape) for r in call.results]


def measured(call: TaintedCall, see: See) -> list[Tensor]:
    """A norm: a sum of powers, where those of 0 are 0."""
    order = call.argument("ord", call.argument("p"))
    return (reduced if order is not None and order <= 0 else summed)(call, see)


def averaged_over(call: TaintedCall, see: See) -> list[Tensor]:
    """`mean`: a sum, and how many there are."""
    t = call.args[0]
    real = call.real(t)
    if real is None or any(real[d] != t.shape[d] for d in dims_of(call, t)):
        return reduced(call, see)
    return summed(call, see)


def largest(call: TaintedCall, see: See) -> list[Tensor]:
    """The lowest do not count where there is another. The number of one that moved with the size
    is another number."""
    dims = dims_of(call, call.args[0])
    found = above_low(call, see, dims)
    numbers = found | (see is not call.unknown and behind(call, see, dims))
    planes = [found, *[numbers] * len(call.results)]
    return [fitted(plane, r.shape) for plane, r in zip(planes, call.results, strict=False)]


def behind(call: TaintedCall, see: See, dims: Sequence[int]) -> Tensor:
    """Where what is no padding lies beyond the real size: behind padding, as by `cat`."""
    t = call.args[0]
    real, plane = call.real(t), torch.zeros_like(see(t))
    for dim in dims:
        size = 0 if real is None else min(real[dim], t.shape[dim])
        plane.narrow(dim, size, t.shape[dim] - size).fill_(True)
    return any_over(plane & ~see(t), dims)


def above_low(call: TaintedCall, see: See, dims: Sequence[int]) -> Tensor:
    t = call.args[0]
    low, plane = hiding(call.low(t), call.value(t), dims), see(t)
    some = any_over(~low, dims)
    return torch.where(some, any_over(plane & ~low, dims), any_over(plane, dims))


def hiding(low: Tensor, value: Tensor, dims: Sequence[int]) -> Tensor:
    """Where what is low hides: far below what is not, of the magnitudes of this run."""
    if not value.is_floating_point() or not bool((low & value.isfinite()).any()):
        return low
    highest = torch.where(low, -torch.inf, value.nan_to_num(torch.inf))
    hides = torch.where(low & value.isfinite(), value, -torch.inf)
    for dim in dims:
        highest, hides = highest.amax(dim, keepdim=True), hides.amax(dim, keepdim=True)
    return low & ((highest > hides / 10) | value.isneginf())


def softmax(call: TaintedCall, see: See) -> list[Tensor]:
    """The lowest become 0 where there is another, at every call; padding they remain."""
    t = call.args[0]
    dims = dims_of(call, t)
    low = hiding(call.low(t), call.value(t), dims)
    found = above_low(call, see, dims).broadcast_to(t.shape)
    if see is call.unknown:
        return [found & ~(low & any_over(~low, dims))]
    return [found | see(t)]


def log_softmax(call: TaintedCall, see: See) -> list[Tensor]:
    found = above_low(call, see, dims_of(call, call.args[0])) | see(call.args[0])
    return [found.broadcast_to(call.results[0].shape)]


def scanned(call: TaintedCall, see: See) -> list[Tensor]:
    """Each element depends on itself and those before it."""
    t = call.args[0]
    (dim,) = dims_of(call, t)[:1] or [0]
    found = see(t) if not t.dim() else see(t).to(torch.int32).cumsum(dim) > 0
    return [found.broadcast_to(r.shape) for r in call.results]


def normalized_last(call: TaintedCall, see: See) -> list[Tensor]:
    """`native_layer_norm` and `rms_norm`: the last dimensions together."""
    t = call.args[0]
    kept = t.dim() - len(call.args[1])
    found = any_over(see(t), range(kept, t.dim()))
    for parameter in call.args[2:4]:
        if isinstance(parameter, Tensor):
            found = found | see(parameter).any()
    return [found.broadcast_to(call.results[0].shape), *each(found, call.results[1:])]


def group_norm(call: TaintedCall, see: See) -> list[Tensor]:
    t, n, groups = call.args[0], call.args[3], call.args[6]
    found = see(t).reshape(n, groups, -1).any(-1)
    found = found | any(bool(see(p).any()) for p in call.args[1:3] if isinstance(p, Tensor))
    whole = found.unsqueeze(-1).broadcast_to(n, groups, max(t.numel() // max(n * groups, 1), 1))
    out = call.results[0]
    return [whole.reshape(out.shape), *each(found, call.results[1:])]


def batch_norm(call: TaintedCall, see: See) -> list[Tensor]:
    """In training a row's result depends on the batch; in eval on itself."""
    t = call.args[0]
    training = call.argument("training", call.argument("train", False))
    spread = any(bool(see(p).any()) for p in call.args[1:5] if isinstance(p, Tensor))
    if "no_stats" in call.name or "with_update" in call.name or training:
        found = any_over(see(t), [d for d in range(t.dim()) if d != 1]) | spread
        rest = [found.any().broadcast_to(r.shape) for r in call.results[1:]]
        return [found.broadcast_to(t.shape), *rest]
    rest = [torch.full(r.shape, spread, dtype=torch.bool, device="cpu") for r in call.results[1:]]
    return [see(t) | spread, *rest]


def renormed(call: TaintedCall, see: See) -> list[Tensor]:
    """`renorm`: each slice along a dimension by its own norm."""
    t, dim = call.args[0], call.args[2] % call.args[0].dim()
    others = [d for d in range(t.dim()) if d != dim]
    return [see(t) | any_over(see(t) & ~call.zero(t), others)]
