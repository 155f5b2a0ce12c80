"""Which of the places that a callable reaches a recording relies on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelaunch.driver.driver import Driver
from onelaunch.objects import is_library_class
from onelaunch.observe import Observer
from onelaunch.slots import MISSING, gradient_of
from onelaunch.state import (
    Change,
    Slot,
    Walk,
    is_state,
)


def relied_on(
    before: Walk,
    found: Sequence[Change],
    rebound: set[tuple[int, object]],
    observer: Observer,
    driver: Driver,
    device: torch.device,
) -> list[tuple[Slot, object]]:
    """Which slots a call must find as the capture did, and what they must hold.

    Args:
        before: what the callable reached before the capture.
        found: what the capture changed of it.
        rebound: the slots that each replay writes, or that are inputs.
        observer: of the capture: which memory was read by address.
    """
    now = {change.slot.id: change.after for change in found}
    guarded: list[tuple[Slot, object]] = [
        (Slot("item", hooks, key, "a hook of modules", None), hook)
        for hooks in before.hooks
        for key, hook in hooks.items()
    ]
    for slot, value in before.held.values():
        if isinstance(value, Tensor):
            if slot.id in rebound or value.layout is not torch.strided:
                continue
            parameter = isinstance(slot.owner, nn.Module) and any(
                slot.holder is slot.owner.__dict__.get(kind) for kind in ("_parameters", "_buffers")
            )
            if value.device.type == device.type and (
                parameter or driver.storage(value) in observer.external
            ):
                guarded.append((slot, value))
            continue
        if slot.id in rebound:
            guarded.append((slot, value))
            continue
        if not _matters(slot, value, before, slot.id in now):
            continue
        # A counter that the call advanced is not advanced by replays: it stays where it is now.
        guarded.append((slot, now.get(slot.id, value)))
    guarded += _empty_gradients(before, found, guarded)
    owners = {id(slot.owner): slot.owner for slot, _ in guarded if hasattr(slot.owner, "__dict__")}
    guarded.extend(before.ways(owners.values()))
    return _with_ways(guarded, before)


def _empty_gradients(
    before: Walk, found: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[tuple[Slot, object]]:
    """The leaves that had no gradient, where the callable accumulates any.

    What it does with them depends on that: it stores where there is none, and adds where there is
    one; an optimizer passes over leaves without.
    """
    touched = [change.slot for change in found] + [slot for slot, _ in guarded]
    if not any(slot.key is gradient_of for slot in touched):
        return []
    leaves = {id(t): (slot, t) for slot, t in before.tensors() if t.requires_grad and t.is_leaf}
    return [
        (Slot("contents", t, gradient_of, f"{slot.name}.grad", None, slot), MISSING)
        for slot, t in leaves.values()
        if (id(t), gradient_of) not in before.held
    ]


def hooked_leaves(
    before: Walk, found: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[Tensor]:
    """The leaves whose hooks a backward in the call runs: all of them, where there may be one."""
    touched = [change.slot for change in found] + [slot for slot, _ in guarded]
    if not torch.is_grad_enabled() and not any(slot.key is gradient_of for slot in touched):
        return []
    leaves = [t for _, t in before.tensors() if t.requires_grad and t.is_leaf]
    return list({id(t): t for t in leaves}.values())


def _with_ways(guarded: list[tuple[Slot, object]], before: Walk) -> list[tuple[Slot, object]]:
    """Add the slots that lead to guarded ones: a list replaced is its items replaced."""
    known = {slot.id for slot, _ in guarded}
    for slot, _ in list(guarded):
        via = slot.via
        while via is not None and via.id not in known:
            known.add(via.id)
            guarded.append((via, before.held[via.id][1]))
            via = via.via
    return guarded


_SMALL = 64
"""Items of a container whose plain values are compared one by one."""


_MODULES_OWN = frozenset(vars(nn.Module()))


def _is_bookkeeping(slot: Slot) -> bool:
    """Whether a slot holds what torch or a library notes about a module: sets of names, of which
    each would cost 1 us at every call to compare, and a BERT has 235."""
    if not isinstance(slot.owner, nn.Module):
        return False
    private = str(slot.key).startswith("_") and is_library_class(type(slot.owner))
    return slot.key in _MODULES_OWN or private


def _matters(slot: Slot, value: object, before: Walk, changed: bool) -> bool:
    """Whether another value in this slot could lead the callable another way."""
    if isinstance(value, nn.Module):
        return True
    if slot.kind == "contents" and slot.via is not None and _is_bookkeeping(slot.via):
        return False
    if id(slot.holder) in before.containers and before.containers[id(slot.holder)][2] > _SMALL:
        return slot.key in before.names and before.is_read(slot)
    # An object that the call itself replaces at each call would be another at the next.
    return before.is_read(slot) and (is_state(value) or callable(value) or not changed)
