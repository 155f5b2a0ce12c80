"""Backwards before there is a backward: warmed up, and captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.autograd.pair import AutogradPair
from onelaunch.autograd.proxies import CapturedGraph
from onelaunch.call.tree import flatten, unique


def rehearse_backward(result: Any, wanting: Sequence[Tensor]) -> list[Tensor]:
    """Run the backward of what a callable returned, for gradients that nobody sees.

    Hooks do not run: a tensor that has one is left out.

    Args:
        wanting: arguments and parameters that require grad.

    Returns:
        Those of them that get no gradient; none where no result requires grad.
    """
    outputs = unique([t for t in flatten(result).tensors if t.requires_grad])
    if not outputs:
        return []
    graph = CapturedGraph(outputs, wanting)
    reached = unique([*wanting, *(t for t in graph.leaves if t.requires_grad)])
    inputs = [t for t in reached if not (t._backward_hooks or t.retains_grad)]
    seeds = [torch.zeros_like(t) for t in outputs]
    # CUDA has no context in an engine's new thread before its first kernel, and cuBLAS warns of it.
    last = [t * 1 for t in outputs]
    grads = torch.autograd.grad(last, inputs, seeds, allow_unused=True) if inputs else ()
    given = cast(Sequence[Tensor | None], grads)
    unused = {id(t) for t, g in zip(inputs, given, strict=True) if g is None}
    return [t for t in wanting if id(t) in unused]


def capture_backward(pair: AutogradPair) -> None:
    """Capture the backward of gradients as they usually come; see `AutogradPair.capture_ahead`.

    Outside of autocast, as backwards should run. Where another thread captures at this moment, it
    is left to the first backward.
    """
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        with torch.enable_grad(), torch._C._DisableAutocast():
            seed = torch.zeros((), device=pair.static.device, requires_grad=True)
            torch.autograd.grad(_Ahead.apply(seed, pair), seed, allow_unused=True)
    finally:
        torch.set_autocast_cache_enabled(cache)


class _Ahead(torch.autograd.Function):
    """A node whose backward captures another: so it is the engine that calls."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, pair: AutogradPair) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.pair = pair
        return seed.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.pair.capture_ahead()
        return None, None
