"""Attention in padded runs by kernels whose masks hide padding whatever the scores are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from onelaunch.driver.function_modes import UnnoticedMode, call

CUDNNS = frozenset({-65504.0, -65536.0})
"""The number by which cuDNN's attention applies a boolean mask, in float16 and in bfloat16. Other
kernels apply minus infinity."""
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
_ALIGNED = 8  # elements; the rows of a mask for the memory-efficient kernel begin at such places


class InfiniteMasks(UnnoticedMode):
    """A mode that leaves attention with a boolean mask to other kernels than cuDNN's. Torch's own
    switch would be noticed by other threads, so the mode calls the kernel that torch would."""

    concerns = frozenset({F.scaled_dot_product_attention})

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = None if types else _without_cudnn(*args, **kwargs)
        return call(func, types, args, kwargs) if made is None else made


def with_infinite_masks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable, run under `InfiniteMasks`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with InfiniteMasks():
            return fn(*args, **kwargs)

    return run


def _without_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the attention by the kernel that torch chooses where cuDNN's is switched off; None if
    torch would not choose cuDNN's, or the mask is not boolean."""
    if attn_mask is None or attn_mask.dtype is not torch.bool:
        return None
    qkv = [_as_autocast(t) for t in (query, key, value)]
    how = attn_mask, dropout_p, is_causal
    chosen: Any = torch._fused_sdp_choice
    if chosen(*qkv, *how, scale=scale, enable_gqa=enable_gqa) != _CUDNN:
        return None
    aten: Any = torch.ops.aten  # with the arguments of torch's own call, which traces compare
    hidden = aten.scalar_tensor(float("-inf"), dtype=qkv[0].dtype, device=attn_mask.device)
    mask = torch.where(attn_mask, 0.0, hidden)
    params: Any = torch.backends.cuda.SDPAParams
    if not torch.backends.cuda.can_use_efficient_attention(params(*qkv, *how, enable_gqa)):
        math = aten._scaled_dot_product_attention_math
        return math(*qkv, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    if mask.stride(-1) != 1 or any(n % _ALIGNED for n in mask.stride()[:-1]):
        last = mask.shape[-1]
        mask = F.pad(mask, (0, _ALIGNED - last % _ALIGNED))[..., :last]
    mask = mask.expand(*qkv[0].shape[:3], qkv[1].shape[2])
    for_backward = torch.is_grad_enabled() and any(t.requires_grad for t in qkv)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(*qkv, mask, for_backward, dropout_p, is_causal, scale=scale)[0]


def _as_autocast(t: Tensor) -> Tensor:
    """Cast as autocast does before torch's attention, which it does not see here."""
    kind = t.device.type
    casts = torch.is_autocast_enabled(kind) and t.is_floating_point()
    return t.to(torch.get_autocast_dtype(kind)) if casts and t.dtype is not torch.double else t
