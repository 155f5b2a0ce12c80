"""The state that a recording relies on: each call must find it as the capture did."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from onelaunch.call.spec import lies_on
from onelaunch.call.wrappers import is_memory
from onelaunch.driver.protocol import Driver
from onelaunch.frames.stack import Use
from onelaunch.state.contents import is_library_class, is_library_module
from onelaunch.state.slots import (
    MISSING,
    Kind,
    Slot,
    bases_of,
    class_of,
    description_slot,
    gradient_of,
    has_gradient,
    is_leaf,
)
from onelaunch.state.walk import Change, StateWalk, is_replaced, is_state


def dependencies(
    before: StateWalk,
    found: Sequence[Change],
    rebound: set[tuple[int, object]],
    inputs: set[tuple[int, object]],
    external: Collection[int],
    driver: Driver,
    device: torch.device,
    sure: Collection[tuple[int, object]] = (),
    passed_on: Iterable[Tensor] = (),
) -> list[tuple[Slot, object]]:
    """Return the slots that a call must find as the capture did, each with its value.

    Args:
        before: the state that the callable reached before the capture.
        found: the changes that the capture made.
        rebound: the slots that each replay writes, or that are inputs.
        inputs: the slots that are inputs.
        external: the storages that the capture read or wrote by address.
        sure: ids of slots that it stored to for sure.
        passed_on: the tensors from before that the capture returned or stored, or views of which.
    """
    now = {change.slot.id: change.after for change in found}
    again = _stored_again(before, now)
    reached = [*passed_on, *again.values()]
    fixed = {*external, *(driver.storage(t) for t in reached if lies_on(t, device))}
    guarded: list[tuple[Slot, object]] = []
    for key, (slot, value) in before.held.items():
        use = before.uses.get(key)
        if is_memory(value):
            written = key in rebound and key not in inputs
            if written and key in now and use is Use.READ:
                # It may be any tensor, but the callable may read whether it is one, and its shape.
                # For inputs the call path checks that.
                guarded.append((description_slot(slot), description_slot(slot).read()))
            if key in rebound or value.layout is not torch.strided:
                continue
            parameter = isinstance(slot.owner, nn.Module) and any(
                slot.holder is slot.owner.__dict__.get(kind) for kind in ("_parameters", "_buffers")
            )
            mine = value.device.type == device.type
            by_address = mine and (parameter or driver.storage(value) in fixed)
            if by_address or key in again or (use is Use.READ and key not in now):
                guarded.append((slot, value))
            continue
        if key in rebound:
            # One that only stores, and is as it was: this run may not have come by the store.
            kept = use is Use.NONE and key not in now and key not in sure
            if use is Use.READ or kept:
                guarded.append((slot, value))
            continue
        if not _matters(slot, value, before, use, key in now) or is_replaced(slot, now):
            continue
        # Replays do not repeat a change of what is no slot of theirs: it is as the call left it.
        guarded.append((slot, now.get(key, value)))
    guarded += _orders(before, now)
    guarded += _gradients(before, found, guarded)
    owners = {id(slot.owner): slot.owner for slot, _ in guarded if slot.owner is not None}
    owners |= {id(owner): owner for owner in before.touched()}
    guarded.extend(before.paths(owners.values()))
    # A replay stores where the capture did.
    places = {key: before.held[key][0] for key in rebound if key in before.held}
    places |= {change.slot.id: change.slot for change in found if change.slot.id in rebound}
    stored = [slot for slot in places.values() if not is_replaced(slot, now)]
    guarded = _with_ways(guarded, stored, before)
    known = {slot.id for slot, _ in guarded}
    found_classes = classes(before, (value for _, value in guarded))
    return guarded + [pair for pair in found_classes if pair[0].id not in known]


def _stored_again(
    before: StateWalk, now: Collection[tuple[int, object]]
) -> dict[tuple[int, object], Tensor]:
    """Return the tensors in places that the callable only stores to, and that had them already:
    from another place, as they are in one. What it has stored so is no change."""
    tensors = {key: value for key, (_, value) in before.held.items() if is_memory(value)}
    places = Counter(map(id, tensors.values()))
    return {
        key: value
        for key, value in tensors.items()
        if before.uses.get(key) is Use.NONE and key not in now and places[id(value)] > 1
    }


def classes(before: StateWalk, values: Iterable[object]) -> list[tuple[Slot, object]]:
    """Return the classes of reached objects, and the bases of reached classes. Calls of special
    methods, `isinstance` and `type` depend on them, and load no attribute.

    Args:
        values: contents of slots.
    """
    reached = [*before.owners, *before.classes, *values]
    for _, held in before.held.values():
        if isinstance(held, set | frozenset | dict) and 0 < len(held) <= _SMALL:  # pyright: ignore
            reached.extend(cast(Iterable[object], held))
    distinct = {id(value): value for value in reached}.values()
    own = (kind for kind in before.classes if not is_library_class(kind))
    return [*(class_of(value) for value in distinct if _may_change(value)), *map(bases_of, own)]


def _may_change(value: object) -> bool:
    """Return whether an object can be given another class; a tensor's is part of its layout."""
    kind = type(value)
    if kind is types.ModuleType:
        return not is_library_module(cast(types.ModuleType, value))
    fixed = not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE
    return not (fixed or value is MISSING or issubclass(kind, Tensor))


def laid_out(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that must keep their memory and layout. Kernels read those of the device;
    those of the host are asked for their shape or dtype."""
    host = torch.device("cpu")
    return [t for t in tensors if lies_on(t, device) or lies_on(t, host)]


_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Flags of classes, whose instances can change to another: https://docs.python.org/3/c-api/typeobj.html#c.Py_TPFLAGS_HEAPTYPE"""


def _orders(before: StateWalk, now: Collection[tuple[int, object]]) -> list[tuple[Slot, object]]:
    """Return the keys of dicts that are read as a whole, in the order of iteration."""
    return [
        (
            Slot(_ORDERED[type(value)], value, tuple, f"the keys of `{slot.name}`", None, slot),
            tuple(value),
        )
        for slot, value in ordered(before, now)
    ]


def ordered(
    before: StateWalk, replaced: Collection[tuple[int, object]]
) -> list[tuple[Slot, dict[object, object]]]:
    """Return the dicts that are read as a whole, and not replaced by the call, with their slots."""
    dicts = [
        (slot, cast(dict[object, object], value))
        for key, (slot, value) in before.held.items()
        if type(value) in _ORDERED and before.uses.get(key) is Use.READ
    ]
    return [
        (slot, value)
        for slot, value in dicts
        if 1 < len(value) <= _SMALL and slot.id not in replaced and not is_replaced(slot, replaced)
    ]


def _gradients(
    before: StateWalk, found: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[tuple[Slot, object]]:
    """Return the leaves that had no gradient, if the callable accumulates gradients or reads
    `.grad`; and the leaves that had one, if it reads `.grad` and no kernel reads the gradient.

    Its work depends on that: it stores a gradient if there is none, and adds to an existing one; an
    optimizer skips leaves without a gradient.
    """
    touched = [change.slot for change in found] + [slot for slot, _ in guarded]
    backward = torch.is_grad_enabled() and before.runs_backward()
    asks = before.asks("grad")
    if not (backward or asks or any(slot.key is gradient_of for slot in touched)):
        return []
    read = {id(value) for slot, value in guarded if asks and slot.key is not gradient_of}
    leaves = {
        id(t): (slot, t)  # a frozen parameter may have a gradient that an optimizer reads
        for slot, t in before.tensors()
        if is_leaf(t) and (t.requires_grad or isinstance(t, nn.Parameter) or id(t) in read)
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
    OrderedDict: "contents",  # the guard's C code does not see the order that it keeps
}


def hooked_leaves(
    before: StateWalk, found: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[Tensor]:
    """Return the leaves whose hooks a backward in the call runs: all, if there may be one."""
    touched = [change.slot for change in found] + [slot for slot, _ in guarded]
    if not torch.is_grad_enabled() and not any(slot.key is gradient_of for slot in touched):
        return []
    leaves = [t for _, t in before.tensors() if t.requires_grad and is_leaf(t)]
    return list({id(t): t for t in leaves}.values())


def _with_ways(
    guarded: list[tuple[Slot, object]], stored: Sequence[Slot], before: StateWalk
) -> list[tuple[Slot, object]]:
    """Add the slots that lead to these slots: replacing a list replaces its items."""
    known = {slot.id for slot, _ in guarded}
    for slot in [*(slot for slot, _ in guarded), *stored]:
        via = slot.via
        while via is not None and via.id not in known and via.id in before.held:
            known.add(via.id)
            guarded.append((via, before.held[via.id][1]))
            via = via.via
    return guarded


_SMALL = 64
"""The most items of a container whose plain values are compared one by one."""


def _matters(slot: Slot, value: object, before: StateWalk, use: Use | None, changed: bool) -> bool:
    """Return whether another value in this slot could change what the callable does."""
    if isinstance(value, nn.Module):
        return True
    _, _, count = before.containers.get(id(slot.holder), (None, "", 0))
    if count > _SMALL and not isinstance(slot.holder, set):
        return before.is_item_read(slot)
    # An object that the callable replaces at each call would differ at the next.
    return use is Use.READ and (not changed or is_state(value) or callable(value))
