"""The precision of a whole engine: the distance of its results, all elements together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.driver.distance import is_inexact


def relative_error(found: Sequence[Tensor], reference: Sequence[Tensor], scale: float = 0) -> float:
    """Compute ||found - reference|| / ||reference|| over all tensors together, in float64.

    The divisor is `scale` at least. NaN wherever either holds one; equal infinities agree. Costs
    one synchronisation.
    """
    off = size = 0.0
    for mine, theirs in zip(found, reference, strict=True):
        mine, theirs = _real(mine).double(), _real(theirs).double()
        agree = mine == theirs
        off += float((mine - theirs).masked_fill(agree, 0).square().sum())
        size += float(theirs.masked_fill(agree & theirs.isinf(), 0).square().sum())
    if off == 0.0:
        return 0.0
    if math.isnan(off) or math.isnan(size):
        return math.nan
    least = max(math.sqrt(size), scale)
    return math.sqrt(off) / least if least else math.inf


def norm(found: Sequence[Tensor]) -> float:
    """Compute ||found|| over all floating tensors together."""
    return math.sqrt(sum(float(_real(t).double().square().sum()) for t in found if is_inexact(t)))


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
