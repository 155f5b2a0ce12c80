"""Checks after a run: they refuse effects that no replay could repeat."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from onelaunch.call.dtensor import local
from onelaunch.call.spec import TensorSpec, lies_on
from onelaunch.call.tree import Tree, constants, flatten_call, is_code, is_plain, objects_in
from onelaunch.capture.io_plan import Inputs
from onelaunch.capture.result import CaptureRun
from onelaunch.errors import CaptureError, kind_of
from onelaunch.state.slots import Slot, gradient_of
from onelaunch.state.walk import Change, StateWalk
from onelaunch.watch.observer import Observer


def inspect_arguments(
    tree: Tree, now: Any, statics: Sequence[Tensor], plan: Inputs, observer: Observer
) -> None:
    """Refuse changes of the arguments other than writes into tensors."""
    flat = flatten_call(now[0], now[1], objects_in(tree))
    if flat.tree != tree or any(a is not b for a, b in zip(flat.tensors, statics, strict=False)):
        raise CaptureError("OL105", "the callable changed a container among its arguments")
    for path, t, spec in zip(flat.paths, statics, plan.specs, strict=False):
        if t.shape != spec.shape or t.stride() != spec.stride or t.dtype != spec.dtype:
            what = f"`{path}`, {spec}, became {list(t.shape)}"
            raise CaptureError("OL107", what, where=observer.reshaped_at(t))


def refuse_gradients(
    tree: Tree, now: Any, statics: Sequence[Tensor], plan: Inputs, read: bool
) -> None:
    """Refuse gradients of arguments: each launch has other arguments, and the callable sees only
    the recording's memory.

    Args:
        tree: the tree of the arguments.
        now: the arguments as the callable has them.
        read: True before the run: refuse a gradient that it may read. Else refuse one that it made.
    """
    paths = flatten_call(now[0], now[1], objects_in(tree)).paths
    for path, static, t in zip(paths, statics, plan.tensors, strict=False):
        if static is t or not static.is_leaf:  # the caller's own; or one that gets no gradient
            continue
        if static.grad is not None:
            raise CaptureError("OL115", f"the callable gives `{path}` a gradient")
        if read and t.is_leaf and t.grad is not None:
            raise CaptureError("OL115", f"`{path}` has a gradient, which the callable may read")


def refuse_opaque(tree: Tree) -> None:
    """Refuse results other than tensors and plain values: they would be shared between calls."""
    for path, constant in constants(tree):
        value = constant.value
        if not (is_plain(value) or is_code(value) or isinstance(value, nn.Module)):
            kind = type(value)
            what = f"`{path or 'result'}` is a {kind.__module__}.{kind.__qualname__}"
            raise CaptureError("OL108", what)


def refuse_parts(
    results: Sequence[Tensor], stored: Sequence[tuple[Slot, object]], held: Collection[int]
) -> None:
    """Refuse DTensors as results, except existing ones and gradients, which stay as they are: a
    DTensor is more than the memory that a replay would give."""
    kept = {id(t) for slot, t in stored if slot.key is gradient_of} | set(held)
    for t in results:
        if local(t) is not t and id(t) not in kept:
            what = f"the result holds {kind_of(t)}"
            raise CaptureError("OL108", what, fix="return t.full_tensor(), or t.to_local()")


_IN_PLACE = (
    "write into the memory that is there: `p.data.copy_(new)`, or under torch.no_grad() "
    "`p.sub_(lr * p.grad)`, for `p.data = new` and `vector_to_parameters`"
)
_SAVED = "ctx.save_for_backward(y) and `ctx.saved_tensors`, for an attribute, `ctx.y = y`"


def refuse_uncovered(
    before: StateWalk,
    after: StateWalk,
    every: Sequence[Tensor],
    observer: Observer,
    device: torch.device,
) -> None:
    """Refuse tensors of the recording in places where no replay will renew them."""
    covered = {id(t) for t in every}
    for slot, t in after.tensors():
        if id(t) not in covered and lies_on(t, device) and observer.known(t):
            if before.held.get(slot.id, (slot, None))[1] is t:
                what = f"`{slot.name}` is given memory made in the call"
                raise CaptureError("OL105", what, where=observer.made_at(t), fix=_IN_PLACE)
            what = f"`{slot.name}` keeps a tensor made in the call"
            raise CaptureError("OL105", what, where=observer.made_at(t))


def late_refusal(run: CaptureRun, holders: Collection[int]) -> CaptureError | None:
    """Return the refusal of a capture that seemed to succeed, or None.

    It is refused if a tensor of the callable's state was moved, or if one made in the run is kept
    where no slot leads: a hook's list, a tensor's attribute, an iterator. No replay would renew
    such a tensor, and each would overwrite it.
    """
    observer = run.observer
    moved = run.before.moved()
    if moved is not None:
        what = f"a tensor of the callable's state became {list(moved.shape)}"
        return CaptureError("OL107", what, where=observer.reshaped_at(moved))
    dropped = _dropped(run.found, run.before.walk)
    lasting = [part for t in run.lasting for part in (t, local(t))]
    expected = [*run.result, *lasting, *run.plan.statics, *dropped]
    stray = _survivor(observer, expected, holders)
    if stray is None:
        return None
    spec, where = TensorSpec.of(stray), observer.made_at(stray)
    if _on_a_context(stray):
        what = f"the context of an autograd.Function keeps a tensor made in the call, {spec}"
        return CaptureError("OL105", what, where=where, fix=_SAVED)
    what = f"something keeps a tensor made in the call, {spec}"
    return CaptureError("OL105", what, where=where)


def _on_a_context(t: Tensor) -> bool:
    """Return whether an attribute of an `autograd.Function`'s `ctx` is this tensor."""
    return any(
        isinstance(owner, FunctionCtx)
        for holder in gc.get_referrers(t)
        for owner in (holder, *(gc.get_referrers(holder) if isinstance(holder, dict) else ()))
    )


def _survivor(
    observer: Observer, expected: Sequence[Tensor], holders: Collection[int]
) -> Tensor | None:
    """Return an unexpected tensor of the recording's memory that is still alive after the run."""
    # Views keep the tensor that they were made from. cuDNN makes another tensor over the weights'
    # storage, which the observer keeps.
    ids = {id(t) for t in expected} | {id(t._base) for t in expected} | observer.own

    def find() -> Tensor | None:
        found = [made() for made in observer.made_tensors]
        # One without elements has no memory that a replay could write over.
        alive = [t for t in found if t is not None and t.numel() and id(t) not in ids]
        del found
        # C++ keeps steps between a tensor and a view of it. All at once: each search for referrers
        # goes through every object of the process, which takes 30 ms.
        but = {*holders, id(alive)}
        if not alive or not _are_held(alive, but):
            return None
        for t in alive:  # no generator, which would hold it too
            if _are_held([t], but):
                return t
        return None

    if find() is None:
        return None
    gc.collect()  # it may be in a cycle that nobody holds
    return find()


def _are_held(tensors: list[Tensor], but: Collection[int]) -> bool:
    """Return whether a Python object other than a running frame holds one of these tensors."""
    return any(
        not isinstance(holder, FrameType) and id(holder) not in but and holder is not tensors
        for holder in gc.get_referrers(*tensors)
    )


def _dropped(found: Sequence[Change], before: StateWalk) -> list[Tensor]:
    """Return the tensors in containers that the callable replaced and only `before` still holds; a
    GradScaler replaces its findings so in each step."""
    ours = {id(entry) for entry in (*before.held.values(), *before.containers.values(), *found)}
    tensors: list[Tensor] = []
    for change in found:
        if isinstance(change.before, dict | list):
            holders = gc.get_referrers(change.before)
            if all(id(h) in ours or isinstance(h, FrameType | Slot) for h in holders):
                tensors += _inside(change.before)
    return tensors


def _inside(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [t for part in cast(Sequence[object], parts) for t in _inside(part)]
