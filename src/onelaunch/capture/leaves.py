"""Leaves of autograd graphs in a capture: what a callable may not do with them.

And the results of a whole step: their graphs are used up by the backward in it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from onelaunch.autograd.graph_walk import is_freed, is_pure_view
from onelaunch.call.tree import Flat
from onelaunch.capture.io_plan import ArgumentView, HeldView, Inputs, Output, Outputs, Own
from onelaunch.capture.recording import NeedsGrad
from onelaunch.driver.protocol import Travel
from onelaunch.errors import CaptureError
from onelaunch.source import user_frame
from onelaunch.state.slots import Slot, node_of
from onelaunch.watch.observer import Observer


class BackwardInside(Exception):
    """The callable ran a backward itself, or made a leaf for one."""


@contextmanager
def leaves_refused() -> Generator[None]:
    """Refuse (OL113) an in-place operation that autograd forbids in a capture alone, on a stand-in.
    Stand-ins for arguments and parameters are leaves, where eager may have none."""
    try:
        yield
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        place = user_frame(error.__traceback__)
        what = "a tensor that requires grad is changed in place"
        raise CaptureError("OL113", what, where=place) from error


def refuse_leaves_of_host(plan: Inputs) -> None:
    """Refuse (OL103) arguments that require grad and are copied to the device."""
    for index in plan.going(Travel.FILL):
        if plan.tensors[index].requires_grad:
            fix = "keep it on the device, `torch.tensor(0.5, device=x.device, requires_grad=True)`"
            what = f"an argument, {plan.specs[index]}, is copied to the device"
            raise CaptureError("OL103", f"{what}, and its gradient back", fix=fix)


def mark_freed(
    outputs: Outputs,
    results: Sequence[Tensor],
    stored: Iterable[tuple[Slot, Flat]],
    observer: Observer,
    held: Mapping[int, Sequence[Tensor]],
) -> None:
    """Mark results, and tensors in slots, whose backward has run inside. Raises `NeedsGrad`: a
    tensor still needs a backward, and is more than a view of the caller's memory."""
    graded = any(output.spec.requires_grad for output in outputs.made)
    ends = {node_of(t) for ts in held.values() for t in ts} if graded else set[object]()
    slots = [(t, slot) for slot, part in stored for t in part.tensors]
    for t, slot in [*((t, None) for t in results), *slots]:
        output = outputs.made[outputs.numbers[id(t)]]
        owned = isinstance(output.memory, Own)
        output.freed = owned and is_freed(t)
        if output.spec.requires_grad and not output.freed and (owned or not is_pure_view(t, ends)):
            raise NeedsGrad(None if slot is None else (slot.name, observer.memory.made_at(t)))


def is_made_leaf(output: Output, t: Tensor, plan: Inputs) -> bool:
    """Return whether the call made a leaf over older memory, `x.detach().requires_grad_()`. Under
    `no_grad` a view of a tensor that requires grad looks the same."""
    match output.memory:
        case ArgumentView(index, _):
            owner = plan.specs[index].requires_grad
        case HeldView(tensor, _):
            owner = tensor.requires_grad
        case _:
            return False
    return output.spec.requires_grad and t.is_leaf and not (t._is_view() and owner)
