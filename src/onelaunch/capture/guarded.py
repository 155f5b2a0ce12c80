"""Which of the places that a callable reaches a recording relies on."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from onelaunch.driver.protocol import Driver
from onelaunch.state.slots import MISSING, Kind, gradient_of, has_gradient, look_at
from onelaunch.state.walk import Change, Slot, StateWalk, is_replaced, is_state
from onelaunch.watch.observer import Observer


def relied_on(
    before: StateWalk,
    found: Sequence[Change],
    rebound: set[tuple[int, object]],
    inputs: set[tuple[int, object]],
    observer: Observer,
    driver: Driver,
    device: torch.device,
) -> list[tuple[Slot, object]]:
    """Which slots a call must find as the capture did, and what they must hold.

    Args:
        before: what the callable reached before the capture.
        found: what the capture changed of it.
        rebound: the slots that each replay writes, or that are inputs.
        inputs: those that are.
        observer: of the capture: which memory was read by address.
    """
    now = {change.slot.id: change.after for change in found}
    guarded: list[tuple[Slot, object]] = []
    for slot, value in before.held.values():
        if isinstance(value, Tensor):
            if slot.id in rebound - inputs and slot.id in now and before.is_read(slot):
                # Whichever tensor it is, and the callable may ask whether it is one, and of what
                # shape. The call path asks that of the inputs.
                guarded.append((look_at(slot), look_at(slot).read()))
            if slot.id in rebound or value.layout is not torch.strided:
                continue
            parameter = isinstance(slot.owner, nn.Module) and any(
                slot.holder is slot.owner.__dict__.get(kind) for kind in ("_parameters", "_buffers")
            )
            mine = value.device.type == device.type
            by_address = mine and (parameter or driver.storage(value) in observer.external)
            if by_address or (before.is_read(slot) and slot.id not in now):
                guarded.append((slot, value))
            continue
        if slot.id in rebound:
            if before.is_read(slot):
                guarded.append((slot, value))
            continue
        if not _matters(slot, value, before, slot.id in now) or is_replaced(slot, now):
            continue
        # A counter that the call advanced is not advanced by replays: it stays where it is now.
        guarded.append((slot, now.get(slot.id, value)))
    guarded += _orders(before, now)
    guarded += _gradients(before, found, guarded)
    owners = {id(slot.owner): slot.owner for slot, _ in guarded if slot.owner is not None}
    owners |= {id(owner): owner for owner in before.touched()}
    guarded.extend(before.ways(owners.values()))
    # A replay stores where the capture did.
    places = {slot.id: slot for slot, _ in before.held.values()}
    places |= {change.slot.id: change.slot for change in found}
    stored = [places[key] for key in rebound if key in places]
    stored = [slot for slot in stored if not is_replaced(slot, now)]
    return _with_ways(guarded, stored, before)


def _orders(before: StateWalk, now: Collection[tuple[int, object]]) -> list[tuple[Slot, object]]:
    """The keys of dicts that are read as a whole, in the order in which a loop meets them."""
    dicts = [
        (slot, cast(dict[object, object], value))
        for slot, value in before.held.values()
        if type(value) in _ORDERED and before.is_read(slot)
    ]
    return [
        (Slot(_ORDERED[type(value)], value, tuple, f"the keys of `{slot.name}`", None, slot), keys)
        for slot, value in dicts
        if 1 < len(keys := tuple(value)) <= _SMALL
        and slot.id not in now
        and not is_replaced(slot, now)
    ]


def _gradients(
    before: StateWalk, found: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[tuple[Slot, object]]:
    """The leaves that had no gradient, where the callable accumulates any or asks; and those that
    had one, where it asks and no kernel reads it.

    What it does with them depends on that: it stores where there is none, and adds where there is
    one; an optimizer passes over leaves without.
    """
    touched = [change.slot for change in found] + [slot for slot, _ in guarded]
    backward = torch.is_grad_enabled() and before.runs_backward()
    asks = before.asks("grad")
    if not (backward or asks or any(slot.key is gradient_of for slot in touched)):
        return []
    leaves = {
        id(t): (slot, t)  # a frozen parameter may have a gradient that an optimizer reads
        for slot, t in before.tensors()
        if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))
    }
    known = {slot.id for slot in touched}
    gradients: list[tuple[Slot, object]] = []
    for slot, t in leaves.values():
        name = f"{slot.name}.grad"
        if (id(t), gradient_of) not in before.held:
            gradients.append((Slot("contents", t, gradient_of, name, None, slot), MISSING))
        elif asks and (id(t), gradient_of) not in known:
            gradients.append((Slot("contents", t, has_gradient, name, None, slot), True))
    return gradients


_ORDERED: dict[type, Kind] = {
    **dict.fromkeys((dict, defaultdict, Counter), "of"),
    OrderedDict: "contents",  # it keeps its order where the guard's C does not look
}


def hooked_leaves(
    before: StateWalk, found: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[Tensor]:
    """The leaves whose hooks a backward in the call runs: all of them, where there may be one."""
    touched = [change.slot for change in found] + [slot for slot, _ in guarded]
    if not torch.is_grad_enabled() and not any(slot.key is gradient_of for slot in touched):
        return []
    leaves = [t for _, t in before.tensors() if t.requires_grad and t.is_leaf]
    return list({id(t): t for t in leaves}.values())


def _with_ways(
    guarded: list[tuple[Slot, object]], stored: Sequence[Slot], before: StateWalk
) -> list[tuple[Slot, object]]:
    """Add the slots that lead to others: a list replaced is its items replaced."""
    known = {slot.id for slot, _ in guarded}
    for slot in [*(slot for slot, _ in guarded), *stored]:
        via = slot.via
        while via is not None and via.id not in known and via.id in before.held:
            known.add(via.id)
            guarded.append((via, before.held[via.id][1]))
            via = via.via
    return guarded


_SMALL = 64
"""Items of a container whose plain values are compared one by one."""


def _matters(slot: Slot, value: object, before: StateWalk, changed: bool) -> bool:
    """Whether another value in this slot could lead the callable another way."""
    if isinstance(value, nn.Module):
        return True
    if id(slot.holder) in before.containers and before.containers[id(slot.holder)][2] > _SMALL:
        return before.is_item_read(slot)
    # An object that the call itself replaces at each call would be another at the next.
    return before.is_read(slot) and (is_state(value) or callable(value) or not changed)
