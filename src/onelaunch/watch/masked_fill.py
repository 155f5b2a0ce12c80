"""Fills by a number of the device, which torch reads on the host, done on the device.

https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/Indexing.cu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FILLS = frozenset({"aten::masked_fill", "aten::masked_fill_"})


def fill_on_device(
    name: str, args: Sequence[Any], is_here: Callable[[Tensor], bool]
) -> Callable[..., Tensor] | None:
    """Return a function that does ``x.masked_fill(mask, value)`` with a tensor for a value, with
    the same bits; None for a number or a host tensor.

    Args:
        name: one of `FILLS`.
        is_here: returns whether a tensor is on the device.
    """
    target, _, value = args
    if not isinstance(value, Tensor) or value.dtype != target.dtype or not is_here(value):
        return None
    return _fill if name.endswith("_") else _filled


def _fill(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return target.copy_(torch.where(mask, value, target))


def _filled(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return _fill(target.masked_fill(mask, 0), mask, value)  # in the layout that torch gives it
