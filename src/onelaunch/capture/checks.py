"""Checks before and after a run: they refuse effects that no replay could repeat."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.call.kinds import kinds_in
from onelaunch.call.spec import lies_on
from onelaunch.call.tree import Tree, constants, flatten_call, is_code, is_plain
from onelaunch.call.wrappers import is_compound, local
from onelaunch.capture.io_plan import Inputs
from onelaunch.errors import CaptureError, kind_of
from onelaunch.state.slots import Slot, gradient_of
from onelaunch.state.walk import StateWalk
from onelaunch.watch.observer import Observer


def inspect_arguments(
    tree: Tree, now: Any, statics: Sequence[Tensor], plan: Inputs, observer: Observer
) -> None:
    """Refuse changes of the arguments other than writes into tensors."""
    flat = flatten_call(now[0], now[1], kinds_in(tree))
    if flat.tree != tree or any(a is not b for a, b in zip(flat.tensors, statics, strict=False)):
        raise CaptureError("OL105", "the callable changed a container among its arguments")
    for path, t, spec in zip(flat.paths, statics, plan.specs, strict=False):
        if t.shape != spec.shape or t.stride() != spec.stride or t.dtype != spec.dtype:
            what = f"`{path}`, {spec}, became {list(t.shape)}"
            raise CaptureError("OL107", what, where=observer.reshaped_at(t))
    given = zip(flat.paths, flat.tensors, plan.tensors, strict=False)
    refuse_attributes([(path, t) for path, t, original in given if t is not original])


def refuse_attributes(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse attributes that the callable set on tensors: a replay gives others.

    Args:
        tensors: paths, and tensors that were made in the capture.
    """
    for path, t in tensors:
        name = next((name for name in vars(t) if not name.startswith(_OF_TORCH)), None)
        if name is not None:
            what = f"`{path}.{name}` is set in the call, on a tensor"
            raise CaptureError("OL105", what, why=_ATTRIBUTE, fix=_BESIDE)


_OF_TORCH = ("_dynamo", "_is_param")
_ATTRIBUTE = "a replay sets no attributes"
_BESIDE = "return it beside the tensor, or set it after the call"


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
    paths = flatten_call(now[0], now[1], kinds_in(tree)).paths
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
    """Refuse DTensors as results, except existing ones and gradients, which stay as they are, and
    tensors made of several: both are more than the memory that a replay would give."""
    kept = {id(t) for slot, t in stored if slot.key is gradient_of} | set(held)
    for t in results:
        if is_compound(t):
            raise CaptureError("OL108", f"the result holds {kind_of(t)}", fix=_PLAIN)
        if local(t) is not t and id(t) not in kept:
            what = f"the result holds {kind_of(t)}"
            raise CaptureError("OL108", what, fix="return t.full_tensor(), or t.to_local()")


_PLAIN = "return it as a plain tensor, `t.dequantize()` say"


def refuse_compound_leaves(before: StateWalk) -> None:
    """Refuse a run with gradients that reaches a tensor made of several which requires grad: a
    capture has no memory of it to put a stand-in over, or to write the gradient for."""
    if not (torch.is_grad_enabled() or before.runs_backward()):
        return
    for slot, t in before.held.values():
        if is_compound(t) and before.is_read(slot) and t.requires_grad:
            what = f"`{slot.name}`, {kind_of(t)}, requires grad and is made of several tensors"
            raise CaptureError("OL114", what, why=_UNSEEN, fix=_FROZEN)


_UNSEEN = "its gradient would go to memory that a replay does not know"
_FROZEN = (
    "freeze it, `weight.requires_grad_(False)`, or call under `torch.no_grad()`; a weight that "
    "learns must be a plain tensor"
)


WRITE_IN_PLACE = (
    "write into the memory that is there: `p.data.copy_(new)`, or under torch.no_grad() "
    "`p.sub_(lr * p.grad)`, for `p.data = new` and `vector_to_parameters`"
)


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
                raise CaptureError("OL105", what, where=observer.made_at(t), fix=WRITE_IN_PLACE)
            what = f"`{slot.name}` keeps a tensor made in the call"
            raise CaptureError("OL105", what, where=observer.made_at(t))
