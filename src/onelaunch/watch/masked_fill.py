"""Fills by a number of the device, which torch reads on the host, done on the device.

https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/Indexing.cu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def fill_on_device(
    name: str, args: Sequence[Any], is_here: Callable[[Tensor], bool]
) -> Callable[[], Tensor] | None:
    """Return a function that does ``x.masked_fill(mask, value)`` with a tensor for a value, with
    the same bits; None for other operations.

    Args:
        name: ``aten::name``.
        is_here: returns whether a tensor is on the device.
    """
    if name not in ("aten::masked_fill", "aten::masked_fill_"):
        return None
    target, mask, value = args
    if not isinstance(value, Tensor) or value.dtype != target.dtype or not is_here(value):
        return None
    return partial(_fill if name.endswith("_") else _filled, target, mask, value)


def _fill(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return target.copy_(torch.where(mask, value, target))


def _filled(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return _fill(target.masked_fill(mask, 0), mask, value)  # in the layout that torch gives it
