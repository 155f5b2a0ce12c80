"""Slots whose tensors a call replaces: recurrent state, and what each replay has to store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onelaunch.driver.driver import Driver
from onelaunch.errors import CaptureError
from onelaunch.observe import Observer
from onelaunch.slots import gradient_of
from onelaunch.spec import lies_on
from onelaunch.state import MISSING, Change, Slot, Walk
from onelaunch.tree import flatten


def recurrent(
    driver: Driver,
    device: torch.device,
    found: Sequence[Change],
    hidden: Sequence[Slot],
    observer: Observer,
    results: Sequence[Tensor],
) -> list[Slot]:
    """Slots whose old tensor was read, returned or moved to another slot, and which hold a new
    one now: recurrent state."""
    known = {slot.id for slot in hidden}
    passed = [*results, *(t for change in found for t in flatten(change.after).tensors)]
    used = {driver.storage(t) for t in passed if lies_on(t, device)}
    used |= observer.external.keys()
    return [
        change.slot
        for change in found
        if isinstance(change.before, Tensor)
        and change.slot.id not in known
        and lies_on(change.before, device)
        and driver.storage(change.before) in used
    ]


def rebound(
    found: Sequence[Change],
    before: Walk,
) -> Iterator[tuple[Slot, object]]:
    """The slots that each replay has to write, with what the capture put there."""
    holders = {id(slot.holder) for slot, _ in before.held.values()}
    holders |= set(before.containers)
    leaves = {id(t) for _, t in before.tensors()}
    for slot, old, new in found:
        if slot.key is gradient_of and id(slot.holder) in leaves:
            yield slot, new
            continue
        if id(slot.holder) not in holders:
            continue  # a new container: rebuilt as a whole where its own slot is
        tensors = flatten(new).tensors if new is not MISSING else []
        if not tensors and not isinstance(old, Tensor):
            continue  # a Python effect: it is not repeated
        grown = old is MISSING and not isinstance(slot.holder, dict)
        if new is MISSING or grown or isinstance(slot.holder, tuple):
            raise CaptureError("OL105", f"`{slot.name}` grew, or lost, a tensor in the call")
        yield slot, new
