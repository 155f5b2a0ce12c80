"""Attention in padded runs by kernels whose masks hide padding whatever the scores are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.driver.function_modes import UnnoticedMode, call

CUDNNS = frozenset({-65504.0, -65536.0})
"""The number by which cuDNN's attention applies a boolean mask, in float16 and in bfloat16. Other
kernels apply minus infinity."""


class InfiniteMasks(UnnoticedMode):
    """A mode that leaves attention with a boolean mask to other kernels than cuDNN's."""

    concerns = frozenset({F.scaled_dot_product_attention})

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
            return call(func, types, args, kwargs)
        was = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return call(func, types, args, kwargs)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(was)


def with_infinite_masks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable, run under `InfiniteMasks`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with InfiniteMasks():
            return fn(*args, **kwargs)

    return run
