"""The distance between the results of two runs, in one of two measures.

`close` allows each element its own rounding: no element may depend on the difference of the runs.
`farthest` is of the farthest element: other kernels may have run, but they computed the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.driver.select import driver_of

_PIECE = 2**20  # the number of elements compared at once, in 20 bytes of the device's memory each
_SAMPLE = 2**14  # the number of elements for the usual magnitude of a result


def is_inexact(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def rounding(t: Tensor) -> float:
    """Return the relative rounding error by which kernels of other sizes may differ."""
    if t.dtype in (torch.float64, torch.complex128):
        return 1e-6
    if t.dtype in (torch.float32, torch.complex64):
        return driver_of(t.device.type).float32_rounding
    return 0.1


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same except for rounding, element by element; integers
    exactly. Waits for the device once. Kernels of another size round differently, TF32 and bfloat16
    by much; dependence on padding is far beyond that. A sum that cancels has the rounding of its
    terms. So an element may also differ by a share of the usual magnitude of its result."""
    if not a.numel():
        return True
    if not is_inexact(a):
        return bool((a == b).all())
    a, b = _real(a), _real(b)
    tolerance = rounding(a)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    least = min(8 * torch.finfo(a.dtype).eps, tolerance**2)
    usual = 4 * tolerance * _usual(b.detach().to(wide)) + least
    pieces = [t.detach().reshape(-1).split(_PIECE) for t in (a, b)]
    same = [_agree(x.to(wide), y.to(wide), tolerance, usual) for x, y in zip(*pieces, strict=True)]
    return bool(torch.stack(same).all())


def _usual(t: Tensor) -> Tensor:
    """Return the median magnitude of elements that are not 0, 0-dim."""
    flat = t.reshape(-1)[:: -(-t.numel() // _SAMPLE)].abs()
    median = torch.where((flat > 0) & flat.isfinite(), flat, torch.nan).nanmedian()
    return torch.where(median.isnan(), 0, median)


def _agree(a: Tensor, b: Tensor, tolerance: float, usual: Tensor) -> Tensor:
    finite = torch.isfinite(b)
    near = (a - b).abs() <= tolerance * torch.where(finite, b.abs(), 0) + usual
    return ((near & finite) | (a == b) | (a.isnan() & b.isnan())).all()


def farthest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the largest difference of an element, relative to the largest in its result.
    It is 1 for another shape or dtype, and for other integers. NaN counts as 0, infinity as 1."""
    if [(t.shape, t.dtype) for t in a] != [(t.shape, t.dtype) for t in b]:
        return 1.0
    largest = 0.0
    for x, y in zip(a, b, strict=True):
        if not is_inexact(x):
            largest = largest if torch.equal(x, y) else 1.0
        elif x.numel():
            x, y = (_real(t).double().nan_to_num(0.0, 1.0, -1.0) for t in (x, y))
            largest = max(largest, float((x - y).abs().max() / x.abs().max().clamp_min(1e-6)))
    return largest
