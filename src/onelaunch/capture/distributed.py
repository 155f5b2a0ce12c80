"""Modules that span several processes (DDP, FSDP): the parts that a recording can hold.

A recorded whole step holds their collectives like any other device work. A recorded forward and
backward pair cannot: DDP and FSDP start collectives from hooks of the autograd engine, and
gradients that a recording computes never pass through these hooks.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onelaunch.errors import CaptureError, GraphError

DDP_WARMUP = 11
"""The calls before a capture with DDP. DDP times its first ten backwards with events that it waits
for, and reorders its buckets after the first."""

FSDP_WARMUP = 2
"""The calls before a capture with FSDP. The first makes the state of FSDP and optimizers. DTensor
looks up the sharding of each operation once, the last of them in the second call."""

_INSIDE = (
    "DistributedDataParallel(ol.graph(module)), the graph inside; or "
    "graph the whole step: @ol.graph def step(x, y): optimizer.zero_grad(); "
    "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); return loss"
)

_WHOLE = (
    "DistributedDataParallel(model) where the model fits one GPU; else run the step eagerly, with "
    "ol.graph on the parts that are not sharded"
)

_KEPT = "fully_shard(module, reshard_after_forward=False), for every module that is sharded"

_SHARDED = ("FSDP1", "FSDP2")


def refuse_module(module: nn.Module) -> None:
    """Refuse (OL130) a module that synchronises gradients itself, or has such a submodule."""
    refused = refused_pair(module.modules())
    if refused is not None:
        raise GraphError(refused.code, refused.what, fix=refused.fix)


def sharded_values(reached: Callable[[], Iterable[object]]) -> list[object]:
    """Return the objects that a callable reaches, without a search if there is no process group."""
    return list(reached()) if initialized() else []


def refused_pair(reached: Iterable[object]) -> CaptureError | None:
    """Return the refusal (OL130) of a forward whose backward is outside the callable, or None."""
    for part in reached:
        kind = spread(part)
        if kind is not None:
            name = type(part).__name__
            what = f"the gradients of a recorded pair would not pass through the hooks of `{name}`"
            return CaptureError("OL130", what, fix=_INSIDE if kind == "DDP" else _WHOLE)
    return None


def refused_step(reached: Sequence[object]) -> CaptureError | None:
    """Return the refusal (OL130) of a whole step over these modules, or None."""
    for option in ("static_graph", "find_unused_parameters") if torch.is_grad_enabled() else ():
        if any(spread(part) == "DDP" and getattr(part, option) for part in reached):
            what = f"`DistributedDataParallel(..., {option}=True)` in a recording"
            why = "it reads on the host, in each backward, which parameters were used"
            fix = f"leave `{option}` out, where each parameter is used in each step"
            return CaptureError("OL130", what, why=why, fix=fix)
    parts = [part for part in reached if spread(part) in _SHARDED]
    if not parts:
        return None
    what = f"`{type(parts[0]).__name__}` in a recording"
    why = "it frees and allocates the storage of its parameters in each step"
    groups = [g for part in parts if spread(part) == "FSDP2" for g in _groups(_state(part))]
    if any(group.post_forward_mesh_info for group in groups):  # it frees parameters in between
        why += "; resharding after forward it does so twice"
        return CaptureError("OL130", what, why=why, fix=_KEPT)
    if any(spread(part) == "FSDP1" for part in parts):
        why += ", by ways that this version does not follow"
        return CaptureError("OL130", what, why=why, fix=_WHOLE)
    return None


def refused_ahead(reached: Sequence[object]) -> CaptureError | None:
    """Return the refusal (OL130) of a capture of an FSDP step ahead of its first call, or None."""
    sharded = [part for part in reached if spread(part) in _SHARDED]
    if not sharded:
        return None
    what = f"`{type(sharded[0]).__name__}` in a recording that is captured ahead"
    why = "FSDP counts and notes in Python what each step did, and that cannot be taken back"
    ahead = CaptureError("OL130", what, why=why, fix="call the step: its first calls warm it up")
    return refused_step(reached) or ahead


def abandon_step(reached: Iterable[object]) -> None:
    """Make FSDP2 forget a step that a failed capture broke off, and shard its parameters again."""
    for root in _root_states(reached):
        _forget_step(root)


def _root_states(reached: Iterable[object]) -> list[Any]:
    """Return FSDP2's state of each root module."""
    parts = [part for part in reached if spread(part) == "FSDP2"] if initialized() else []
    return [_state(part) for part in parts if _state(part)._is_root]


def _forget_step(root: Any) -> None:
    """Reset FSDP2's state as `reset_iter_state` of later torch does, without waiting on the GPU.
    Nothing ran, and events of a capture that was broken off cannot be waited for."""
    _clear(root._comm_ctx, _STEP_EVENTS)
    _clear(root._state_ctx, ("iter_forward_root",))
    root._state_ctx.post_backward_final_callback_queued = False
    for state in root._state_ctx.all_states:
        _clear(state, ("_modules_to_run_forward",))
        state._training_state = type(state._training_state).IDLE
        for group in _groups(state):
            gathered = group._all_gather_result
            if gathered is not None and group.device.type == "cpu":
                work = gathered.all_gather_work
                if isinstance(work, torch.distributed.Work):
                    work.wait()
            _clear(group, _GROUP_EVENTS)
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()


_STEP_EVENTS = (
    *("all_gather_state", "post_forward_order", "reduce_scatter_state"),
    *("reduce_scatter_states", "_last_post_reduce_events"),  # torch 2.13 (pytorch#177319) and later
)
_GROUP_EVENTS = (
    *("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_partial_reduce_output"),
    *("_reshard_after_forward_event", "_post_forward_indices"),
)
"""The attributes in which FSDP2 notes a step in progress; not all exist in every torch."""


def _clear(owner: Any, names: Iterable[str]) -> None:
    for name in names:
        noted = getattr(owner, name, None)
        if isinstance(noted, list | dict | set):
            noted.clear()
        elif noted is not None:
            setattr(owner, name, None)


def side_streams(reached: Iterable[object]) -> list[object]:
    """Return the streams of FSDP2's collectives. After their work FSDP2 makes them wait for the
    step's stream once more."""
    each = [value for root in _root_states(reached) for value in vars(root._comm_ctx).values()]
    return [value for value in each if isinstance(value, torch.Stream)]


def is_unsharded(reached: Callable[[], Iterable[object]]) -> bool:
    """Return whether FSDP2 holds whole parameters now, as after a forward without a backward. A
    step from this state frees memory that it did not allocate. It runs eagerly, and shards the
    parameters for the next step."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    parts = [part for part in sharded_values(reached) if spread(part) == "FSDP2"]
    return any(group.is_unsharded for part in parts for group in _groups(_state(part)))


_callables: weakref.WeakSet[Any] = weakref.WeakSet()
_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
"""Their recordings, which may outlive a callable until cycles are collected."""


def reset_before_shutdown(graphed: Any, graph: Any) -> None:
    """Reset a callable and its new recording before process groups are destroyed, if there is one.
    `destroy_process_group` hangs until every graph with a kernel of NCCL is freed."""
    if initialized():
        _callables.add(graphed)
        _graphs.add(graph)
        _wrap_shutdown()


@functools.cache
def _wrap_shutdown() -> None:
    destroy = torch.distributed.destroy_process_group

    @functools.wraps(destroy)
    def reset_and_destroy(group: Any = None) -> None:
        for each in [*_callables, *_graphs]:
            each.reset()
        destroy(group)

    places: tuple[Any, ...] = (torch.distributed, torch.distributed.distributed_c10d)
    for module in places:
        module.destroy_process_group = reset_and_destroy


def least_warmup(reached: Iterable[object]) -> int:
    """Return the number of calls that must come before a capture."""
    kinds = {spread(part) for part in reached}
    return DDP_WARMUP if "DDP" in kinds else FSDP_WARMUP if "FSDP2" in kinds else 0


def spread(part: object) -> str | None:
    """Return ``"DDP"``, ``"FSDP1"``, ``"FSDP2"``, or None for other objects."""
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


def initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and frees at once."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _state(part: Any) -> Any:
    return part._get_fsdp_state()
