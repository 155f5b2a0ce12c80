"""Sums of products: matrices, embeddings, distances, and solutions for each matrix of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from onelaunch.driver.aten import tensors
from onelaunch.padding.taint.rules.call import Planes, TaintedCall, any_over, everywhere, spread


def contracted(call: TaintedCall, taint: Planes, a: Tensor, b: Tensor) -> Tensor:
    """Return the plane of `a @ b`: a known zero removes its factor from the sum. Rows and columns
    of padding stay padding."""
    live_a, live_b = ~call.zero(a), ~call.zero(b)
    from_a = (live_a & taint(a)).float() @ live_b.float()
    from_b = live_a.float() @ (live_b & taint(b)).float()
    found = (from_a + from_b) > 0
    if taint is not call.unknown and a.shape[-1]:
        rows, columns = taint(a).all(-1), taint(b).all(-2 if b.dim() > 1 else -1)
        found = found | (rows.unsqueeze(-1) if b.dim() > 1 else rows)
        found = found | (columns.unsqueeze(-2) if a.dim() > 1 < b.dim() else columns)
    return found


def matmul(call: TaintedCall, taint: Planes) -> list[Tensor]:
    return [contracted(call, taint, call.args[0], call.args[1])]


def matmul_added(call: TaintedCall, taint: Planes) -> list[Tensor]:
    return [contracted(call, taint, call.args[1], call.args[2]) | taint(call.args[0])]


def linear(call: TaintedCall, taint: Planes) -> list[Tensor]:
    return [taint(call.args[0]).any(-1, keepdim=True) | spread(call, taint, call.args[0])]


def embedded(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `embedding(weight, indices)` by index."""
    return [taint(call.args[1]).unsqueeze(-1) | spread(call, taint, call.args[1])]


def scaled_matmul(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `_scaled_mm(a, b, scale_a, scale_b, bias, scale_result)`; scales by row or whole."""
    found = contracted(call, taint, call.args[0], call.args[1])
    for t in tensors((call.args[2:], call.kwargs)):
        plane = taint(t)
        rows = plane.dim() == 2 and plane.shape == (found.shape[0], 1)
        found = found | (plane if rows else plane.any())
    return [found]


def distances(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `cdist`: rows of one tensor against rows of the other."""
    one, other = taint(call.args[0]).any(-1), taint(call.args[1]).any(-1)
    return [one.unsqueeze(-1) | other.unsqueeze(-2)]


def bagged(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `embedding_bag(weight, indices, offsets)` by bag of indices."""
    weight, indices, offsets = call.args[:3]
    real = call.real(indices)
    if bool(call.unknown(offsets).any()) or call.argument("include_last_offset") or real is None:
        return [torch.tensor(spread(call, taint), device="cpu")]
    starts = call.value(offsets)
    entry = taint(indices)
    factor = call.argument("per_sample_weights")
    entry = entry if factor is None else entry | taint(factor)
    bag = torch.searchsorted(starts, torch.arange(len(entry), device=starts.device), right=True) - 1
    row = taint(offsets).float().index_add(0, bag.clamp_min(0), entry.float()) > 0
    ends = taint(offsets).roll(-1)
    ends = ends & (starts.roll(-1) != real[0])  # the last real bag ends there in any case
    ends[-1:] = False
    return [(row | ends | taint(weight).any()).unsqueeze(-1)]


def each_matrix(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint an inverse, determinant, factorisation or solution matrix by matrix of a batch."""
    given = tensors((call.args, call.kwargs))
    batch = given[0].dim() - 2
    found = call.none
    for t in given:
        plane = taint(t)
        if t.dim() < batch or t.shape[:batch] != given[0].shape[:batch]:
            plane = plane.any().reshape([1] * batch)
        else:
            plane = any_over(plane, range(batch, t.dim())).flatten(batch).any(-1)
        found = found | plane
    return [
        found.reshape(*found.shape, *[1] * (r.dim() - batch))
        if r.numel()
        else torch.zeros(r.shape, dtype=torch.bool, device="cpu")
        for r in call.results
    ]


def values_of_each_matrix(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint eigenvalues or singular values by matrix; vectors everywhere: kernels choose signs."""
    vectors = call.argument("compute_v", call.argument("compute_uv", True))
    return (everywhere if vectors else each_matrix)(call, taint)


def transformed(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint Fourier transforms over their dimensions, whose size must be unchanged."""
    t, dims = call.args[:2]
    real = call.real(t)
    if real is None or any(real[d] != t.shape[d] for d in dims):
        return everywhere(call, taint)
    return [any_over(taint(t), dims)]
