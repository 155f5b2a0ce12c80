"""Elements that change places, or are picked by numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import See, TaintedCall, any_over, everywhere


def moved(call: TaintedCall, see: See) -> list[Tensor]:
    """Elements change places, or come from constants: the same is done to the plane."""

    def plane(value: Any) -> Any:
        if isinstance(value, Tensor):
            return see(value).to(torch.uint8)
        if isinstance(value, (list, tuple)):
            return type(value)(plane(v) for v in value)
        return value

    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("dtype", "device", "layout")}
    found = call.func(*(plane(a) for a in call.args), **kwargs)
    return [f.bool() for f in (found if isinstance(found, (list, tuple)) else [found])]


def rolled(call: TaintedCall, see: See) -> list[Tensor]:
    """What comes round from the other end is other rows where the size changes."""
    t, dims, shifts = call.args[0], call.argument("dims"), call.args[1]
    real = call.real(t)
    (found,) = moved(call, see)
    if real == t.shape:
        return [found]
    if real is None or not dims:
        return everywhere(call, see)
    for dim, shift in zip(dims, shifts, strict=True):
        size = t.shape[dim]
        if real[dim] == size:
            continue
        count = min(abs(shift), size)
        found.narrow(dim, 0 if shift > 0 else size - count, count).fill_(True)
    return [found]


def padded(call: TaintedCall, see: See) -> list[Tensor]:
    """`constant_pad_nd`: what it adds is constant."""
    found = torch.constant_pad_nd(see(call.args[0]).to(torch.uint8), call.args[1], 0)
    return [found.bool()]


def index_select(call: TaintedCall, see: See) -> list[Tensor]:
    t, dim, index = call.args
    found = reached(call, see, t, dim, index).index_select(dim, call.value(index))
    shape = [1] * t.dim()
    if shape:
        shape[dim] = -1
    return [found | see(index).reshape(shape)]


def gather(call: TaintedCall, see: See) -> list[Tensor]:
    t, dim, index = call.args[:3]
    return [reached(call, see, t, dim, index).gather(dim, call.value(index)) | see(index)]


def reached(call: TaintedCall, see: See, t: Tensor, dim: int, index: Tensor) -> Tensor:
    """What an index that is never negative picks: any real place, where calls may differ."""
    plane = see(t)
    if not t.dim() or not bool(call.unknown(index).any()):
        return plane
    real = call.real(t)
    if real is None:
        return torch.ones_like(plane)
    return plane.narrow(dim, 0, real[dim]).any(dim, keepdim=True).broadcast_to(plane.shape)


def uncertain(call: TaintedCall, t: Tensor, indices: Sequence[Tensor | None]) -> list[int] | None:
    """The dimensions in which another call may index otherwise; None where what it means there
    depends on the size, as a negative index does."""
    real = call.real(t)
    dims: list[int] = []
    dim = 0
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        count = index.dim() if index is not None and masks else 1
        if index is not None and bool(call.unknown(index).any()):
            dims += range(dim, dim + count)
        dim += count
    if dims and (real is None or any(real[d] != t.shape[d] for d in dims)):
        return None
    return dims


def indexed(call: TaintedCall, see: See) -> list[Tensor]:
    """`t[i, j]`: what is picked, and everything where an index is not certain."""
    t, indices = call.args[0], call.args[1]
    values = tuple(slice(None) if i is None else call.value(i) for i in indices)
    dims = uncertain(call, t, indices)
    if any(i is not None and i.dtype == torch.bool and call.unknown(i).any() for i in indices):
        return everywhere(call, see)  # how many are picked is not certain
    plane = (
        torch.ones_like(see(t)) if dims is None else any_over(see(t), dims).broadcast_to(t.shape)
    )
    found = plane[values]
    return [found | doubt(indices, see, found)]


def doubt(indices: Sequence[Tensor | None], see: See, picked: Tensor) -> Tensor:
    """The planes of the indices, where what they pick lies; all of it for a mask."""
    given = [i for i in indices if i is not None]
    doubt = torch.zeros((), dtype=torch.bool, device=picked.device)
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        for i in given:
            doubt = doubt | see(i).any()
        return doubt
    for i in given:
        doubt = doubt | see(i)
    given_at = [n for n, i in enumerate(indices) if i is not None]
    first = given_at[0] if given_at[-1] - given_at[0] + 1 == len(given_at) else 0
    after = picked.dim() - first - doubt.dim()
    return doubt.reshape((*doubt.shape, *[1] * after))


def index_put(call: TaintedCall, see: See) -> list[Tensor]:
    """What is put, where it is put; in all of a dimension where a place is not certain."""
    t, indices, values = call.args[:3]
    old = see(t)
    if any(i is not None and i.dtype == torch.bool and call.unknown(i).any() for i in indices):
        return _put_where(call, see)
    dims = uncertain(call, t, indices)
    if dims is None:
        return [torch.ones_like(old)]
    where = tuple(slice(None) if i is None else call.value(i) for i in indices)
    picked = old[where]
    put = see(values).broadcast_to(picked.shape) | doubt(indices, see, picked)
    if dims or call.argument("accumulate", False):
        found = torch.zeros_like(old)
        found[where] = put
        return [old | any_over(found, dims)]
    found = old.clone()
    found[where] = put
    return [found]


def _put_where(call: TaintedCall, see: See) -> list[Tensor]:
    """`t[mask] = value`: of one value, each place by itself; else anything may be anywhere."""
    t, indices, values = call.args[:3]
    mask = indices[0]
    if len(indices) > 1 or values.numel() != 1:
        if see is call.unknown or any(bool(see(v).any()) for v in (t, mask, values)):
            return everywhere(call, see)
        return [see(t)]
    mask = see(mask).reshape(*mask.shape, *[1] * (t.dim() - mask.dim()))
    return [see(t) | mask | see(values).any()]


def put_along(call: TaintedCall, see: See) -> list[Tensor]:
    """`index_add`, `index_copy` and the like: what is put along a dimension, where it is put."""
    t, dim, index, source = call.args[:4]
    real, old = call.real(t), see(t)
    if real is None or real[dim] != t.shape[dim] or not t.dim() or index.dim() != 1:
        return everywhere(call, see)
    shape = [1] * t.dim()
    shape[dim] = len(index)
    put = (see(source) | see(index).reshape(shape)).broadcast_to(
        [len(index) if d == dim % t.dim() else n for d, n in enumerate(t.shape)]
    )
    if bool(call.unknown(index).any()):
        return [old | put.any(dim, keepdim=True)]
    found = torch.zeros_like(old, dtype=torch.float32)
    found = found.index_add(dim, call.value(index), put.float()) > 0
    if call.name.startswith(("index_copy", "index_fill")):
        old = old.index_fill(dim, call.value(index), False)
    return [old | found]


def scattered(call: TaintedCall, see: See) -> list[Tensor]:
    t, dim, index, source = call.args[:4]
    put = see(source)
    put = put[tuple(slice(0, n) for n in index.shape)] if put.dim() else put
    old, put = see(t).to(torch.uint8), (put | see(index)).to(torch.uint8)
    if bool(call.unknown(index).any()):  # anywhere in its line
        line = torch.zeros_like(old)
        if line.dim():
            line[tuple(slice(0, n) for n in index.shape)] = put
            return [(old | line.amax(dim, keepdim=True)).bool()]
        return [(old | put).bool()]
    index = call.value(index)
    if call.name.startswith(("scatter_add", "scatter_reduce")) or len(call.args) > 4:
        return [old.scatter_reduce(dim, index, put, "amax", include_self=True).bool()]
    return [old.scatter(dim, index, put.broadcast_to(index.shape)).bool()]
