"""Whether results at two sizes agree: in their values, their layout, and how their sizes follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.buckets import Sizes
from onelaunch.padding import Follow


def line(dim: int, place: int, sizes: dict[Sizes, int]) -> Follow | None:
    """The line through these sizes of a dimension, if it depends on that one bucketed size."""
    by_size: dict[int, int] = {}
    for bucketed, size in sizes.items():
        if by_size.setdefault(bucketed[place], size) != size:
            return None
    (first, low), *_, (last, high) = sorted(by_size.items()) * (2 if len(by_size) == 1 else 1)
    if first == last or (high - low) % (last - first):
        return None
    scale = (high - low) // (last - first)
    more = low - scale * first
    if scale < 1 or any(scale * n + more != size for n, size in by_size.items()):
        return None
    return Follow(dim, place, scale, more)


def same_layout(t: Tensor, stride: Sequence[int]) -> bool:
    pairs = zip(t.shape, t.stride(), stride, strict=True)
    return t.numel() == 0 or all(n == 1 or a == b for n, a, b in pairs)


_TOLERANCE = {
    torch.float64: 1e-6,
    torch.complex128: 1e-6,
    torch.float32: 1e-2,
    torch.complex64: 1e-2,
}
_PIECE = 2**20
"""Elements that are compared at once, in 20 bytes of the device's memory each."""


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same but for rounding. Waits for the device once.

    Kernels of another size round differently, and TF32 and bfloat16 do so much; what this is to
    find is far beyond that. Of integers (an argmax) a few may differ.
    """
    if not a.numel():
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return bool((a == b).float().mean() > 0.5)
    tolerance = _TOLERANCE.get(a.dtype, 0.1)
    least = torch.complex64 if a.is_complex() else torch.float32
    wide = a.dtype if a.dtype in _TOLERANCE else least
    pieces = [t.detach().reshape(-1).split(_PIECE) for t in (a, b)]
    largest = [_finite(part.to(wide)).abs().amax() for part in pieces[1]]
    limit = tolerance * (torch.stack(largest).amax() + tolerance)
    same = [_agree(x.to(wide), y.to(wide), limit) for x, y in zip(*pieces, strict=True)]
    return bool(torch.stack(same).all())


def _finite(t: Tensor) -> Tensor:
    return torch.where(torch.isfinite(t), t, 0)


def _agree(a: Tensor, b: Tensor, limit: Tensor) -> Tensor:
    finite = torch.isfinite(b)
    near = (a - b).abs() <= limit
    return ((torch.isfinite(a) == finite) & (near | ~finite)).all()
