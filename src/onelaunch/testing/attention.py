"""Memory-efficient attention on the emulated device, and the place of its seeds.

As on CUDA: outside of a capture they are on the host, and its backward reads them there; in one
they are on the device. A backward that finds a seed where it does not look for it is an error here,
and the end of the process there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator
from onelaunch.driver.attention_seeds import seeds_of

_library: torch.library.Library | None = None


def install_attention() -> None:
    """Give the CPU the operator, which torch has for CUDA alone: the device's memory is there."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_efficient_attention"
    _library.impl(name, _forward, "CPU")
    _library.impl(f"{name}_backward", _backward, "CPU")


def refuse_seeds(op: Operator, args: Sequence[Any], captured: bool, device_tensor: type) -> None:
    """Raise where an operator is given a seed that it cannot read."""
    dropout = next((a for a in args if isinstance(a, float)), 0.0)
    for place in seeds_of(op.func).arguments:
        if dropout and isinstance(args[place], device_tensor) is not captured:
            where = "on the host, in a capture" if captured else "on the device, outside of one"
            raise RuntimeError(f"segmentation fault: `{op.label}` reads a seed {where}")


def with_seeds_on_host(op: Operator, result: Any, host: Callable[[Tensor], Tensor]) -> Any:
    """Bring the seeds of a result to the host: one outside of a capture."""
    places = seeds_of(op.func).results
    if not places:
        return result
    return tuple(host(t).clone() if i in places else t for i, t in enumerate(result))


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        upper = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
        scores = scores.masked_fill(upper, -math.inf)
    return scores


def _kept(like: Tensor, dropout: float, seed: Tensor) -> Tensor | float:
    """Draw the factors of the weights: 0 where they are dropped."""
    if not dropout:
        return 1.0
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.rand(like.shape, generator=generator, dtype=like.dtype, device="cpu")
    return (drawn >= dropout) / (1 - dropout)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = _weights(query, key, attn_bias, is_causal, scale or query.shape[-1] ** -0.5)
    seed = torch.zeros((), dtype=torch.long, device="cpu")
    if dropout_p:
        seed = torch.randint(1 << 62, (), device="cpu")
    weights = scores.softmax(-1) * _kept(scores, dropout_p, seed)
    return weights @ value, scores.logsumexp(-1), seed, torch.zeros_like(seed)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    factor = scale or query.shape[-1] ** -0.5
    scores = _weights(query, key, attn_bias, is_causal, factor)
    weights, kept = scores.softmax(-1), _kept(scores, dropout_p, philox_seed)
    of_weights = (grad_out @ value.transpose(-2, -1)) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    return (
        of_scores @ key * factor,
        of_scores.transpose(-2, -1) @ query * factor,
        (weights * kept).transpose(-2, -1) @ grad_out,
        of_scores if grad_input_mask[3] else None,
    )
