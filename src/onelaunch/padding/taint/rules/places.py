"""Operations that move elements, or pick them by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import Planes, TaintedCall, any_over, everywhere


def moved(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Apply the operation to the planes: elements change places, or come from constants."""

    def plane(value: Any) -> Any:
        if isinstance(value, Tensor):
            return taint(value).to(torch.uint8)
        if isinstance(value, (list, tuple)):
            return type(value)(plane(v) for v in value)
        return value

    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("dtype", "device", "layout")}
    found = call.func(*(plane(a) for a in call.args), **kwargs)
    return [f.bool() for f in (found if isinstance(found, (list, tuple)) else [found])]


def rolled(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Move the planes as `roll` does; rows that wrap around are others if the size changes."""
    t, dims, shifts = call.args[0], call.argument("dims"), call.args[1]
    real = call.real(t)
    (found,) = moved(call, taint)
    if real == t.shape:
        return [found]
    if real is None or not dims:
        return everywhere(call, taint)
    for dim, shift in zip(dims, shifts, strict=True):
        size = t.shape[dim]
        if real[dim] == size:
            continue
        count = min(abs(shift), size)
        found.narrow(dim, 0 if shift > 0 else size - count, count).fill_(True)
    return [found]


def padded(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Pad the plane as `constant_pad_nd` does: the added elements are constant."""
    found = torch.constant_pad_nd(taint(call.args[0]).to(torch.uint8), call.args[1], 0)
    return [found.bool()]


def index_select(call: TaintedCall, taint: Planes) -> list[Tensor]:
    t, dim, index = call.args
    found = reached(call, taint, t, dim, index).index_select(dim, call.value(index))
    shape = [1] * t.dim()
    if shape:
        shape[dim] = -1
    return [found | taint(index).reshape(shape)]


def gather(call: TaintedCall, taint: Planes) -> list[Tensor]:
    t, dim, index = call.args[:3]
    return [reached(call, taint, t, dim, index).gather(dim, call.value(index)) | taint(index)]


def reached(call: TaintedCall, taint: Planes, t: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the plane that an index picks from, which is never negative; the union over the real
    places if another call may index otherwise."""
    plane = taint(t)
    if not t.dim() or not bool(call.unknown(index).any()):
        return plane
    real = call.real(t)
    if real is None:
        return torch.ones_like(plane)
    return plane.narrow(dim, 0, real[dim]).any(dim, keepdim=True).broadcast_to(plane.shape)


def uncertain(call: TaintedCall, t: Tensor, indices: Sequence[Tensor | None]) -> list[int] | None:
    """Return the dimensions in which another call may index otherwise; None if an index there
    depends on the size, as a negative one does."""
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


def indexed(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Index the plane as `t[i, j]`; join over a dimension whose index is uncertain."""
    t, indices = call.args[0], call.args[1]
    values = tuple(slice(None) if i is None else call.value(i) for i in indices)
    dims = uncertain(call, t, indices)
    if any(i is not None and i.dtype == torch.bool and call.unknown(i).any() for i in indices):
        return everywhere(call, taint)  # their number is uncertain
    plane = (
        torch.ones_like(taint(t))
        if dims is None
        else any_over(taint(t), dims).broadcast_to(t.shape)
    )
    found = plane[values]
    return [found | index_taint(indices, taint, found)]


def index_taint(indices: Sequence[Tensor | None], taint: Planes, picked: Tensor) -> Tensor:
    """Return the planes of the indices at the places of the picked elements; joined for a mask."""
    given = [i for i in indices if i is not None]
    index_taint = torch.zeros((), dtype=torch.bool, device=picked.device)
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        for i in given:
            index_taint = index_taint | taint(i).any()
        return index_taint
    for i in given:
        index_taint = index_taint | taint(i)
    given_at = [n for n, i in enumerate(indices) if i is not None]
    first = given_at[0] if given_at[-1] - given_at[0] + 1 == len(given_at) else 0
    after = picked.dim() - first - index_taint.dim()
    return index_taint.reshape((*index_taint.shape, *[1] * after))


def index_put(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Put the values' planes at the indices; over a whole dimension whose index is uncertain."""
    t, indices, values = call.args[:3]
    old = taint(t)
    if any(i is not None and i.dtype == torch.bool and call.unknown(i).any() for i in indices):
        return _put_where(call, taint)
    dims = uncertain(call, t, indices)
    if dims is None:
        return [torch.ones_like(old)]
    where = tuple(slice(None) if i is None else call.value(i) for i in indices)
    picked = old[where]
    put = taint(values).broadcast_to(picked.shape) | index_taint(indices, taint, picked)
    if dims or call.argument("accumulate", False):
        found = torch.zeros_like(old)
        found[where] = put
        return [old | any_over(found, dims)]
    found = old.clone()
    found[where] = put
    return [found]


def _put_where(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `t[mask] = value` place by place for one value; else everything."""
    t, indices, values = call.args[:3]
    mask = indices[0]
    if len(indices) > 1 or values.numel() != 1:
        if taint is call.unknown or any(bool(taint(v).any()) for v in (t, mask, values)):
            return everywhere(call, taint)
        return [taint(t)]
    mask = taint(mask).reshape(*mask.shape, *[1] * (t.dim() - mask.dim()))
    return [taint(t) | mask | taint(values).any()]


def put_along(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Put, for `index_add`, `index_copy` and the like, the source's plane along a dimension."""
    t, dim, index, source = call.args[:4]
    real, old = call.real(t), taint(t)
    if real is None or real[dim] != t.shape[dim] or not t.dim() or index.dim() != 1:
        return everywhere(call, taint)
    shape = [1] * t.dim()
    shape[dim] = len(index)
    put = (taint(source) | taint(index).reshape(shape)).broadcast_to(
        [len(index) if d == dim % t.dim() else n for d, n in enumerate(t.shape)]
    )
    if bool(call.unknown(index).any()):
        return [old | put.any(dim, keepdim=True)]
    found = torch.zeros_like(old, dtype=torch.float32)
    found = found.index_add(dim, call.value(index), put.float()) > 0
    if call.name.startswith(("index_copy", "index_fill")):
        old = old.index_fill(dim, call.value(index), False)
    return [old | found]


def scattered(call: TaintedCall, taint: Planes) -> list[Tensor]:
    t, dim, index, source = call.args[:4]
    put = taint(source)
    put = put[tuple(slice(0, n) for n in index.shape)] if put.dim() else put
    old, put = taint(t).to(torch.uint8), (put | taint(index)).to(torch.uint8)
    if bool(call.unknown(index).any()):  # the place may be any along the dimension
        line = torch.zeros_like(old)
        if line.dim():
            line[tuple(slice(0, n) for n in index.shape)] = put
            return [(old | line.amax(dim, keepdim=True)).bool()]
        return [(old | put).bool()]
    index = call.value(index)
    if call.name.startswith(("scatter_add", "scatter_reduce")) or len(call.args) > 4:
        return [old.scatter_reduce(dim, index, put, "amax", include_self=True).bool()]
    return [old.scatter(dim, index, put.broadcast_to(index.shape)).bool()]
