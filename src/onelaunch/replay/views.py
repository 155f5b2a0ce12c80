"""Results that are views of memory which a call path has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.capture.io_plan import Output


def viewer(output: Output) -> Callable[[Tensor], Tensor]:
    """Makes a result over the memory of `base`, sharing its version counter as a view does."""
    spec, offset = output.spec, output.offset
    if not spec.inference and torch.is_inference_mode_enabled():
        # A view of a normal tensor is normal in inference mode, but one of another dtype is not.
        outside = _viewer_of(spec, offset, output.is_view)
        return lambda base: _outside_inference_mode(outside, base)
    return _viewer_of(spec, offset, output.is_view)


def _outside_inference_mode(view: Callable[[Tensor], Tensor], base: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return view(base)


def _viewer_of(spec: TensorSpec, offset: int, is_view: bool) -> Callable[[Tensor], Tensor]:
    def view(base: Tensor) -> Tensor:
        if base.is_conj():
            base = torch._conj(base)
        if base.is_neg():
            base = torch._neg_view(base)
        size = base.element_size()
        start = base.storage_offset() + offset // size
        if base.dtype != spec.dtype:
            # The bytes as one run of the one dtype, seen as the other.
            count = -(-(offset % size + spec.extent_bytes) // size)
            base = base.as_strided((count,), (1,), start).view(spec.dtype)
            start = base.storage_offset() + offset % size // base.element_size()
        if base.requires_grad and not spec.requires_grad and torch.is_grad_enabled():
            base = base.detach()
        made = base.as_strided(spec.shape, spec.stride, start)
        if spec.conj:
            made = torch._conj(made)
        if spec.neg:
            made = torch._neg_view(made)
        return made if is_view else made.detach()

    return view
