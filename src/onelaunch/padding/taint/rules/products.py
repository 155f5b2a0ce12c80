"""Sums of products: matrices, tables, distances, and what is solved for each matrix of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from onelaunch.driver.aten import tensors
from onelaunch.padding.taint.rules.call import See, TaintedCall, any_over, everywhere


def contracted(call: TaintedCall, see: See, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`: a known zero on either side takes the other out of the sum. A row of padding remains
    padding, and so does a column."""
    live_a, live_b = ~call.zero(a), ~call.zero(b)
    from_a = (live_a & see(a)).float() @ live_b.float()
    from_b = live_a.float() @ (live_b & see(b)).float()
    found = (from_a + from_b) > 0
    if see is not call.unknown and a.shape[-1]:
        rows, columns = see(a).all(-1), see(b).all(-2 if b.dim() > 1 else -1)
        found = found | (rows.unsqueeze(-1) if b.dim() > 1 else rows)
        found = found | (columns.unsqueeze(-2) if a.dim() > 1 < b.dim() else columns)
    return found


def matmul(call: TaintedCall, see: See) -> list[Tensor]:
    return [contracted(call, see, call.args[0], call.args[1])]


def matmul_added(call: TaintedCall, see: See) -> list[Tensor]:
    found = contracted(call, see, call.args[1], call.args[2])
    return [found | see(call.args[0]).broadcast_to(found.shape)]


def linear(call: TaintedCall, see: See) -> list[Tensor]:
    found = see(call.args[0]).any(-1, keepdim=True)
    if any(bool(see(t).any()) for t in call.args[1:] if isinstance(t, Tensor)):
        found = torch.ones_like(found)
    return [found.broadcast_to(call.results[0].shape)]


def looked_up(call: TaintedCall, see: See) -> list[Tensor]:
    """`embedding(weight, indices)`."""
    weight, indices = call.args[0], call.args[1]
    found = see(indices).unsqueeze(-1) | see(weight).any()
    return [found.broadcast_to(call.results[0].shape)]


def scaled_matmul(call: TaintedCall, see: See) -> list[Tensor]:
    """`_scaled_mm(a, b, scale_a, scale_b, bias, scale_result)`: scales of rows, or of the whole."""
    found = contracted(call, see, call.args[0], call.args[1])
    for t in tensors((call.args[2:], call.kwargs)):
        plane = see(t)
        rows = plane.dim() == 2 and plane.shape == (found.shape[0], 1)
        found = found | (plane if rows else plane.any())
    return [found]


def outer(call: TaintedCall, see: See) -> list[Tensor]:
    """`addr(t, column, row)`."""
    t, column, row = call.args[:3]
    return [see(t) | see(column).unsqueeze(1) | see(row)]


def trilinear(call: TaintedCall, see: See) -> list[Tensor]:
    """Three tensors, each given dimensions of size 1, multiplied and summed."""
    found = torch.zeros((), dtype=torch.bool, device="cpu")
    for t, dims in zip(call.args[:3], call.args[3:6], strict=True):
        plane = see(t)
        for dim in dims:
            plane = plane.unsqueeze(dim)
        found = found.to(plane.device) | plane
    for dim in sorted((d % found.dim() for d in call.args[6]), reverse=True):
        found = found.any(dim)
    return [found]


def distances(call: TaintedCall, see: See) -> list[Tensor]:
    """`cdist`: rows of one against rows of the other."""
    one, other = see(call.args[0]).any(-1), see(call.args[1]).any(-1)
    return [one.unsqueeze(-1) | other.unsqueeze(-2)]


def bagged(call: TaintedCall, see: See) -> list[Tensor]:
    """`embedding_bag(weight, indices, offsets)`: a row for each bag of indices."""
    weight, indices, offsets = call.args[:3]
    real = call.real(indices)
    if bool(call.unknown(offsets).any()) or call.argument("include_last_offset") or real is None:
        return [_anything(call, see).broadcast_to(call.results[0].shape)]
    starts = call.value(offsets)
    entry = see(indices)
    factor = call.argument("per_sample_weights")
    entry = entry if factor is None else entry | see(factor)
    bag = torch.searchsorted(starts, torch.arange(len(entry), device=starts.device), right=True) - 1
    row = see(offsets).float().index_add(0, bag.clamp_min(0), entry.float()) > 0
    ends = see(offsets).roll(-1)
    ends = ends & (starts.roll(-1) != real[0])  # where the last real one ends in any case
    ends[-1:] = False
    row = (row | ends | see(weight).any()).unsqueeze(-1)
    return [row.broadcast_to(call.results[0].shape)]


def _anything(call: TaintedCall, see: See) -> Tensor:
    found = [see(t).any() for t in tensors((call.args, call.kwargs))]
    return torch.stack(found).any()


def each_matrix(call: TaintedCall, see: See) -> list[Tensor]:
    """The inverse, the determinant, a factorisation or a solution for each matrix of a batch."""
    given = tensors((call.args, call.kwargs))
    batch = given[0].dim() - 2
    found = torch.zeros((), dtype=torch.bool, device="cpu")
    for t in given:
        plane = see(t)
        if t.dim() < batch or t.shape[:batch] != given[0].shape[:batch]:
            plane = plane.any().reshape([1] * batch)
        else:
            plane = any_over(plane, range(batch, t.dim())).flatten(batch).any(-1)
        found = found.to(plane.device) | plane
    return [
        found.reshape(*found.shape, *[1] * (r.dim() - batch)).broadcast_to(r.shape)
        if r.numel()
        else torch.zeros(r.shape, dtype=torch.bool, device="cpu")
        for r in call.results
    ]


def values_of_each_matrix(call: TaintedCall, see: See) -> list[Tensor]:
    """Eigenvalues, singular values: their vectors have signs that depend on the kernel."""
    vectors = call.argument("compute_v", call.argument("compute_uv", True))
    return (everywhere if vectors else each_matrix)(call, see)


def crossed(call: TaintedCall, see: See) -> list[Tensor]:
    """`linalg_cross`: of three elements."""
    found = see(call.args[0]) | see(call.args[1])
    return [found.any(call.argument("dim", -1), keepdim=True).broadcast_to(found.shape)]


def transformed(call: TaintedCall, see: See) -> list[Tensor]:
    """Fourier transforms: all of the dimensions, whose size must be what it is."""
    t, dims = call.args[:2]
    real = call.real(t)
    if real is None or any(real[d] != t.shape[d] for d in dims):
        return everywhere(call, see)
    found = any_over(see(t), dims)
    return [found.broadcast_to(call.results[0].shape)]
