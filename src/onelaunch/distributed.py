"""Modules that are spread over several processes: what of them a recording can hold.

A whole step holds their collectives as it holds any other work of the device. A forward and its
backward as a pair cannot: DDP and FSDP start theirs from hooks of the autograd engine, and
gradients that a recording computes never pass through those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onelaunch.errors import CaptureError, GraphError

DDP_WARMUP = 11
"""Of its first ten backwards DDP takes times with events that it waits for, and after the first it
orders its buckets anew."""

_STEP = (
    "graph the whole step: @ol.graph def step(x, y): optimizer.zero_grad(); "
    "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); return loss"
)


def refuse_module(module: nn.Module) -> None:
    """Refuse a module that synchronises gradients itself, or has such a part.

    Raises:
        GraphError: OL112.
    """
    for part in module.modules():
        kind = spread(part)
        if kind is not None:
            raise GraphError("OL112", _skipped(part), fix=_pair_fix(kind))


def refuse_pair(reached: Iterable[object]) -> None:
    """Refuse a forward whose backward is outside the callable and would start collectives.

    Args:
        reached: what the callable reaches.

    Raises:
        CaptureError: OL112.
    """
    for part in reached if _initialized() else ():
        kind = spread(part)
        if kind is not None:
            raise CaptureError("OL112", _skipped(part), fix=_pair_fix(kind))


def refuse_step(reached: Iterable[object], device: str) -> None:
    """Refuse a callable that shards its parameters in a way that no recording can hold.

    Args:
        reached: what the callable reaches.
        device: the type of the device that it runs on.

    Raises:
        CaptureError: OL112.
    """
    for part in reached if _initialized() else ():
        kind = spread(part)
        name = type(part).__name__
        if kind == "FSDP1":
            fix = "torch.distributed.fsdp.fully_shard(model, reshard_after_forward=False)"
            why = "it frees and allocates its flat parameters behind the dispatcher"
            raise CaptureError("OL112", f"`{name}` in a recording", why=why, fix=fix)
        if kind != "FSDP2":
            continue
        if device != "cuda":
            why = "its all-gather allocates the storage of its parameters anew, where a recording "
            why += "without CUDA's pools would still write to the old one"
            fix = "run the step eagerly here, or on CUDA; DistributedDataParallel is recorded here"
            raise CaptureError("OL112", f"`{name}` on {device}", why=why, fix=fix)
        if _reshards(part):
            why = "its parameters are freed after the forward and gathered a second time in the "
            why += "backward, into memory that belongs to nobody in between"
            fix = "fully_shard(module, reshard_after_forward=False), for the root and every part"
            raise CaptureError("OL112", f"`{name}` reshards after forward", why=why, fix=fix)


def least_warmup(reached: Iterable[object]) -> int:
    """How many calls must come before a capture: more than ten where DDP is in it."""
    found = reached if _initialized() else ()
    return DDP_WARMUP if any(isinstance(part, DistributedDataParallel) for part in found) else 0


def spread(part: object) -> str | None:
    """``"DDP"``, ``"FSDP1"`` or ``"FSDP2"``, or None for any other object."""
    if isinstance(part, DistributedDataParallel):
        return "DDP"
    if not isinstance(part, nn.Module):
        return None
    # Nothing is an instance of a class whose module nobody imported.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    if isinstance(part, fsdp.FSDPModule):
        return "FSDP2"
    return "FSDP1" if isinstance(part, fsdp.FullyShardedDataParallel) else None


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _reshards(part: Any) -> bool:
    """Whether an FSDP2 module frees its parameters between forward and backward."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group.post_forward_mesh_info for group in groups)


def _skipped(part: object) -> str:
    name = type(part).__name__
    return f"the gradients of a recorded pair would not pass through the hooks of `{name}`"


def _pair_fix(kind: str) -> str:
    inside = "DistributedDataParallel(ol.graph(module)), the graph inside"
    return f"{inside}; or {_STEP}" if kind == "DDP" else _STEP
