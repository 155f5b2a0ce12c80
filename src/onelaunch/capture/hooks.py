"""The hooks that run inside a capture, whose Python no replay repeats."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from onelaunch.source import Place, line_of
from onelaunch.state.hooks import node_hooks, read_hooks, read_last_hooks
from onelaunch.state.slots import gradient_of
from onelaunch.state.walk import Change, StateWalk

_MODULES: Any = nn.modules.module
_STEPS: Any = importlib.import_module("torch.optim.optimizer")
_FORWARDS = ("forward_pre_hook", "forward_hook")
_BACKWARDS = ("backward_pre_hook", "backward_hook")
_LIBRARIES = ("torch", "onelaunch")


class HookInside(NamedTuple):
    """A hook that ran in a capture."""

    name: str  # its module or tensor, its kind and its function, for messages
    place: Place | None  # the line where it is defined; None for code without source


def hooks_inside(
    roots: Sequence[tuple[str, object]],
    before: StateWalk,
    changes: Sequence[Change],
    optimizers: Sequence[Optimizer],
    forward: bool,
) -> tuple[HookInside, ...]:
    """Return the user's hooks that ran in a capture: replays run their operations, not their
    Python. A search takes a microsecond for each module and leaf. `roots`: the captured object,
    whose own hooks run around a replay; then arguments. `forward`: whether the backward is outside,
    where hooks of parameters run as in eager."""
    changed = any(change.slot.key is gradient_of for change in changes)
    backward = not forward and torch.is_grad_enabled() and (before.runs_backward() or changed)
    kinds = (*_FORWARDS, *_BACKWARDS) if backward else _FORWARDS
    hooks: dict[str, Place | None] = {}
    for owner, kind, fn in (
        *_of_modules(roots, before, kinds),
        *(_of_leaves(before) if backward else ()),
        *_of_optimizers(optimizers),
    ):
        if not _is_torchs(fn):
            place = line_of(fn)
            hooks[f"{owner}.{kind} {_named(fn, place)}"] = place
    return tuple(HookInside(name, place) for name, place in hooks.items())


Hook = tuple[str, str, Callable[..., object]]
"""The name of the owner, the kind of hook, and its function."""


def _of_modules(
    roots: Sequence[tuple[str, object]], before: StateWalk, kinds: Iterable[str]
) -> Iterator[Hook]:
    of_state = before.holding(lambda kind: issubclass(kind, nn.Module))
    reached = [*roots[1:], *((slot.name, module) for slot, module in of_state)]
    modules = {id(v): (n, v) for n, v in reversed(reached) if isinstance(v, nn.Module)}
    modules.pop(id(roots[0][1]), None)
    for kind in kinds:
        for fn in getattr(_MODULES, f"_global_{kind}s").values() if modules else ():
            yield "every module", kind, fn
        for name, module in modules.values():
            for fn in vars(module).get(f"_{kind}s", {}).values():
                yield name, kind, fn


def _of_leaves(before: StateWalk) -> Iterator[Hook]:
    leaves = {id(t): (slot, t) for slot, t in reversed(list(before.tensors())) if t.requires_grad}
    for slot, t in leaves.values():
        for fn in (read_hooks(t) or {}).values():
            yield slot.name, "hook", fn
        for fn in (read_last_hooks(t) or {}).values():
            yield slot.name, "post_accumulate_grad_hook", fn
        for fn in (fn for hooks in node_hooks([t]) for fn in hooks.values()):
            yield f"{slot.name}.grad_fn", "hook", fn


def _of_optimizers(optimizers: Sequence[Optimizer]) -> Iterator[Hook]:
    for when in ("pre", "post"):
        everywhere = getattr(_STEPS, f"_global_optimizer_{when}_hooks")
        for optimizer in optimizers:
            hooks = vars(optimizer).get(f"_optimizer_step_{when}_hooks", {})
            for fn in (*hooks.values(), *everywhere.values()):
                yield type(optimizer).__name__, f"step_{when}_hook", fn


def _code_of(hook: Any) -> Any:
    """Return the function behind a hook, or the hook itself."""
    while isinstance(hook, functools.partial):
        hook = cast(Any, hook).func
    if not isinstance(hook, types.FunctionType | types.MethodType | type):
        hook = getattr(type(hook), "__call__", hook)  # noqa: B004
    return getattr(hook, "__func__", hook)


def _is_torchs(hook: Any) -> bool:
    """Return whether a hook is torch's or onelaunch's own: weight_norm, DDP, schedulers."""
    module = getattr(_code_of(hook), "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES


def _named(hook: Any, place: Place | None) -> str:
    fn = _code_of(hook)
    name = getattr(fn, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]
    return f"`{name}`" + (f" ({place._replace(source='')})" if place else "")
