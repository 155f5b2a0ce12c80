"""Tensors of a run that something still holds afterwards, where no replay would renew them."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from types import FrameType
from typing import cast

from torch import Tensor
from torch.autograd.function import FunctionCtx

from onelaunch.call.spec import TensorSpec
from onelaunch.call.wrappers import local
from onelaunch.capture.run import CaptureRun
from onelaunch.errors import CaptureError
from onelaunch.state.slots import Slot
from onelaunch.state.walk import Change, StateWalk
from onelaunch.watch.observer import Observer

_SAVED = "ctx.save_for_backward(y) and `ctx.saved_tensors`, for an attribute, `ctx.y = y`"


def late_refusal(run: CaptureRun) -> CaptureError | None:
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
    forward = run.job.forward
    stray = _survivor(observer, expected, forward.holders if forward else ())
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
