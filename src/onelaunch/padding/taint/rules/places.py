"""Operations that move elements, or pick them by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import Planes, TaintedCall, any_over, everywhere, rerun


def rolled(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Move the planes as `roll` does; rows that wrap around are others if the size changes."""
    t, dims, shifts = call.args[0], call.argument("dims"), call.args[1]
    real = call.real(t)
    (found,) = rerun(call, taint)
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


def gather(call: TaintedCall, taint: Planes) -> list[Tensor]:
    t, dim, index = call.args[:3]
    plane, value = taint(t), call.value(index)
    found = plane.gather(dim, value)
    if t.dim() and bool(call.unknown(index).any()):
        joined = over_real(call, t, plane, [dim]).gather(dim, value)
        named = names(call, t, dim, index)
        found = torch.where(call.spare(index), found, joined) if named else joined
    return [found | taint(index)]


def names(call: TaintedCall, t: Tensor, dim: int, index: Tensor | None) -> bool:
    """Return whether an index names rows of the size that a dimension follows."""
    real = call.real(t)
    return real is not None and call.named(index) == (real[dim], t.shape[dim])


def only(indices: Sequence[Tensor | None]) -> tuple[int, Tensor | None]:
    """Return the dimension of the only index, and the index; None if there are several."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return given[0] if len(given) == 1 else (0, None)


def over_real(call: TaintedCall, t: Tensor, plane: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the union of a plane of `t` over the real places of these dimensions."""
    real, found = call.real(t), plane
    if real is None and dims:
        return torch.ones_like(plane)
    real = t.shape if real is None else real
    for dim in dims:
        found = found.narrow(dim, 0, min(real[dim], t.shape[dim])).any(dim, keepdim=True)
    return found.broadcast_to(plane.shape)


def uncertain(
    call: TaintedCall, t: Tensor, indices: Sequence[Tensor | None], real: Sequence[int] | None
) -> list[int] | None:
    """Return the dimensions in which another call may index otherwise; None if an index there
    depends on the size, as a negative one does. `real`: the size of the unpadded run; that of `t`
    if no index is negative."""
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
    """Index the plane as `t[i, j]`."""
    t, indices = call.args[:2]
    given = [i for i in indices if i is not None]
    named = all(bool((call.rows(i) | ~call.unknown(i)).all()) for i in given)
    return _picked(call, taint, indices, t.shape if named else call.real(t))


def index_select(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Index the plane along a dimension, by an index that is never negative."""
    return _picked(call, taint, indices_along(*call.args), call.args[0].shape)


def indices_along(t: Tensor, dim: int, index: Tensor) -> list[Tensor | None]:
    """Return the indices by which `t[..., index]` indexes a dimension."""
    return [*[None] * (dim % max(t.dim(), 1)), index]


def _picked(
    call: TaintedCall,
    taint: Planes,
    indices: Sequence[Tensor | None],
    real: Sequence[int] | None,
) -> list[Tensor]:
    """Return the plane of the elements that indices pick; the union over a dimension whose index is
    uncertain. Padding that names a row that is not real picks that. `real`: see `uncertain`."""
    t = call.args[0]
    values = tuple(slice(None) if i is None else call.value(i) for i in indices)
    dims = uncertain(call, t, indices, real)
    if any(i is not None and i.dtype == torch.bool and call.unknown(i).any() for i in indices):
        return everywhere(call, taint)  # their number is uncertain
    plane = torch.ones_like(taint(t)) if dims is None else over_real(call, t, taint(t), dims)
    found = plane[values]
    if names(call, t, *only(indices)):
        spare = index_taint(indices, call.spare, found)
        found = torch.where(spare, taint(t)[values], found)
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
    dims = uncertain(call, t, indices, call.real(t))
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
    if not t.dim() or index.dim() != 1:
        return everywhere(call, taint)
    shape = [len(index) if d == dim % t.dim() else n for d, n in enumerate(t.shape)]
    along = [-1 if d == dim % t.dim() else 1 for d in range(t.dim())]
    put = (taint(source) | taint(index).reshape(along)).broadcast_to(shape)

    def over(plane: Tensor) -> Tensor:
        return plane.reshape(along).broadcast_to(shape)

    return landed(call, taint, put, over, call.name.startswith(("index_copy", "index_fill")))


def scattered(call: TaintedCall, taint: Planes) -> list[Tensor]:
    t, _, index, source = call.args[:4]
    if not t.dim() or not index.dim():
        return everywhere(call, taint)
    put = taint(source)
    put = put[tuple(map(slice, index.shape))] if put.dim() else put
    put = (put | taint(index)).broadcast_to(index.shape)
    adds = call.name.startswith(("scatter_add", "scatter_reduce")) or len(call.args) > 4
    return landed(call, taint, put, lambda plane: plane, not adds)


def landed(
    call: TaintedCall,
    taint: Planes,
    put: Tensor,
    over: Callable[[Tensor], Tensor],
    replaces: bool,
) -> list[Tensor]:
    """Return the plane of a tensor into which elements are put along a dimension; places beyond the
    real size stay padding. `put`: the plane of the elements that are put. `over`: gives a tensor of
    the shape of the index the shape of `put`. `replaces`: whether the old elements go."""
    t, dim, index = call.args[:3]
    real, unknown = call.real(t), call.unknown(index)
    old, value = taint(t), over(call.value(index)).long()
    if replaces and not unknown.any():
        old = old.scatter(dim, value, torch.zeros_like(put))
    if real is None:
        return everywhere(call, taint)
    if real[dim] != t.shape[dim]:
        if not _in_place(call, t) or not _is_whole(call, index):
            return everywhere(call, taint)
        # Another known number may name a real row in another call.
        unknown = ~call.spare(index) if names(call, t, dim, index) else torch.ones_like(unknown)
    found = torch.zeros(t.shape, dtype=torch.uint8, device=put.device)
    exact = (put & ~over(unknown)).to(torch.uint8)
    found = found.scatter_reduce(dim, value, exact, "amax", include_self=True).bool()
    parts = (slice(None) if d == dim % t.dim() else slice(0, n) for d, n in enumerate(put.shape))
    found[tuple(parts)] |= (put & over(unknown)).any(dim, keepdim=True)
    grown = taint is not call.unknown and real != t.shape
    return [old | found | call.beyond(t.shape, real) if grown else old | found]


def _in_place(call: TaintedCall, t: Tensor) -> bool:
    """Return whether everything beyond the real size is padding, so that the rest is in place. It
    may be constant too: constants in other places show in the values."""
    real, other = call.real(t), call.padded(t) | ~call.unknown(t)
    return real is not None and bool((other | ~call.beyond(t.shape, real)).all())


def _is_whole(call: TaintedCall, index: Tensor) -> bool:
    """Return whether the elements that depend on padding are those that the unpadded run lacks."""
    real = call.real(index)
    return real is not None and int((~call.padded(index)).sum()) == math.prod(real)
