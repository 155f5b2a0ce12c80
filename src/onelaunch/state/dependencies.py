"""The state that a recording relies on: each call must find it as the capture did."""

from __future__ import annotations

import itertools
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from onelaunch.call.containers import parts_of
from onelaunch.call.spec import has_strides, lies_on
from onelaunch.call.tree import is_plain, unique
from onelaunch.call.wrappers import is_memory
from onelaunch.driver.protocol import Driver
from onelaunch.frames.stack import Use
from onelaunch.identity import id
from onelaunch.state.contents import MODULE_DICTS, is_library_class, is_library_module
from onelaunch.state.host_values import version_of
from onelaunch.state.parts import build_slot
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
from onelaunch.state.walk import SMALL, Change, StateWalk, is_replaced


def dependencies(
    before: StateWalk,
    changes: Sequence[Change],
    rebound: set[tuple[int, object]],
    inputs: set[tuple[int, object]],
    external: Collection[int],
    driver: Driver,
    device: torch.device,
    sure: Collection[tuple[int, object]] = (),
    passed_on: Iterable[Tensor] = (),
    replaced: Collection[tuple[int, object]] = (),
    gone: Set[int] = frozenset(),
) -> list[tuple[Slot, object]]:
    """Return the slots that a call must match, each with its content. Leaf attributes are guarded
    apart; those that the capture changed become slots like others.

    Args:
        before: the state that the callable reached before the capture.
        changes: the changes that the capture made.
        rebound: ids of the slots that each replay writes, or that are inputs.
        inputs: ids of the slots that are inputs, or whose containers' tensors are.
        external: the storages that the capture read or wrote by address.
        sure: ids of slots that the capture stored to for sure.
        passed_on: tensors from before that the capture returned or stored, itself or as a view.
        replaced: ids of the slots that are inputs because the caller replaces their contents.
        gone: ids of the caller's former objects in those slots, and of their `__dict__`s.
    """
    now = {change.slot.id: change.after for change in changes}
    again = _stored_again(before, now)
    reached = [*passed_on, *again.values()]
    fixed = {*external, *(driver.storage(t) for t in reached if lies_on(t, device))}

    def by_address(slot: Slot, t: Tensor) -> bool:
        return t.device.type == device.type and (_is_parameter(slot) or driver.storage(t) in fixed)

    guarded: list[tuple[Slot, object]] = []
    # Of a large `vars(module)` that code goes through, not all items are read.
    through = before.leaf_attributes.keys() & before.contents.containers.keys()
    if now or gone or through or any(map(before.is_leaf_attribute, (*rebound, *inputs, *replaced))):
        before.expand()
    uses = before.used
    for key, (slot, value) in before.slots.items():
        if key in replaced or key[0] in gone:
            continue
        use, changed = uses.get(key), key in now
        match isinstance(value, Tensor) and is_memory(value), key in rebound:
            case True, True:
                # It may be any tensor, but code that reads the slot may ask for its shape. The call
                # path checks inputs.
                if use is Use.READ and changed and key not in inputs:
                    description = description_slot(slot)
                    guarded.append((description, description.read()))
            case True, False:
                t = cast(Tensor, value)
                kept = key in again or (use is Use.READ and not changed)
                if is_replaced(slot, inputs):
                    continue  # the tensor is an input itself
                if kept or (has_strides(t) and by_address(slot, t)):
                    guarded.append((slot, t))
            case False, True:
                # A slot that is only stored to, and has not changed: this run may have left the
                # store out.
                perhaps_not = use is Use.NONE and not changed and key not in sure
                if key not in inputs and (use is Use.READ or perhaps_not):
                    guarded.append((slot, value))
            case _:
                # A replay repeats no change here: the content is as the call left it. It deletes
                # nothing, so that a recording of a deletion fits no call.
                if is_replaced(slot, now):
                    continue
                left = now.get(key, value)
                if changed and use is Use.READ and parts_of(left) is not None:
                    guarded.append((build_slot(slot, left), True))  # in place of the same container
                elif _matters(slot, value, before, use, changed) or (
                    left is MISSING and use is not None  # it may have been there, and deleted
                ):
                    guarded.append((slot, value if left is MISSING else left))
    guarded += _stored_once(before, changes, rebound)
    guarded += orders(before, now)
    guarded += _gradients(before, changes, guarded)
    guarded += _versions(before, guarded)
    guarded = _completed(before, changes, rebound, guarded)
    return [
        (slot, value)
        for slot, value in guarded
        if slot.id not in replaced and gone.isdisjoint((id(slot.holder), id(slot.owner)))
    ]


def _completed(
    before: StateWalk,
    changes: Sequence[Change],
    rebound: Collection[tuple[int, object]],
    guarded: list[tuple[Slot, object]],
) -> list[tuple[Slot, object]]:
    """Add the paths to slots and to places of stores, the classes of objects, and their bases."""
    now = {change.slot.id for change in changes}
    # A replay stores where the capture did.
    places = {key: before.slots[key][0] for key in rebound if key in before.slots}
    places |= {change.slot.id: change.slot for change in changes if change.slot.id in rebound}
    stored = [slot for slot in places.values() if not is_replaced(slot, now)]
    leaf_attributes = before.leaf_attributes.values()
    vias = [*(slot.via for slot in stored), *(attributes.via for attributes in leaf_attributes)]
    guarded = _with_paths(guarded, vias, before)
    touched = _unrepeated([*(slot.owner for slot, _ in guarded), *before.touched()])
    owners = {id(owner): owner for owner in (*touched, *(a.module for a in leaf_attributes))}
    guarded.extend(before.paths(owners.values()))
    values = classed(before, [value for _, value in guarded])
    guarded += [class_of(v) for v in values if id(v) not in owners or isinstance(v, type)]
    guarded += bases(before)
    return guarded


def _is_parameter(slot: Slot) -> bool:
    return isinstance(slot.owner, nn.Module) and any(
        slot.holder is slot.owner.__dict__.get(kind) for kind in ("_parameters", "_buffers")
    )


def _stored_again(
    before: StateWalk, now: Collection[tuple[int, object]]
) -> dict[tuple[int, object], Tensor]:
    """Return slot id -> tensor for slots that are only stored to, unchanged, with a tensor that
    another slot holds too: the callable may have stored the same tensor again."""
    tensors = {slot.id: value for slot, value in before.tensors()}
    places = Counter(map(id, tensors.values()))
    return {
        key: value
        for key, value in tensors.items()
        if before.used.get(key) is Use.NONE and key not in now and places[id(value)] > 1
    }


def _stored_once(
    before: StateWalk, changes: Sequence[Change], rebound: Collection[tuple[int, object]]
) -> list[tuple[Slot, object]]:
    """Return the slots that no replay can store, with the contents that the callable left there: a
    replay needs the same. A container that only grows is left out (`growing_containers`)."""
    now = {change.slot.id for change in changes}
    return [
        (change.slot, change.after)
        for change in changes
        if before.use(change.slot) is Use.NONE
        and change.slot.id not in rebound
        and not (is_replaced(change.slot, now) or isinstance(change.after, Tensor))
        and not (change.before is MISSING and id(change.slot.holder) in before.containers)
    ]


def classed(before: StateWalk, values: Iterable[object]) -> Iterable[object]:
    """Return the reached objects that can get another class, among `values` and others. Calls of
    special methods, `isinstance` and `type` depend on it, and load no attribute."""
    reached = [*before.owners, *before.classes, *values]
    for _, held in before.holding(lambda kind: issubclass(kind, (set, frozenset, dict))):
        if 0 < len(cast(Collection[object], held)) <= SMALL:
            reached.extend(cast(Iterable[object], held))
    changeable: dict[type, bool] = {}
    objects: dict[int, object] = {}
    for value in reached:
        kind = type(value)
        may = changeable.get(kind)
        if may is None:
            may = changeable[kind] = _may_change(kind)
        if may and not (kind is types.ModuleType and is_library_module(cast(Any, value))):
            objects[id(value)] = value
    return objects.values()


def bases(before: StateWalk) -> list[tuple[Slot, object]]:
    """Return the slots of the bases of reached classes."""
    return [bases_of(kind) for kind in before.classes if not is_library_class(kind)]


def _may_change(kind: type) -> bool:
    """Return whether instances can get another class. A tensor's class is part of its layout."""
    fixed = not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE
    return kind is types.ModuleType or not (fixed or issubclass(kind, (type(MISSING), Tensor)))


def laid_out(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that must keep their memory and layout. Kernels read them on the device;
    Python asks for the shape or dtype of those on the host."""
    host = torch.device("cpu")
    return [t for t in tensors if lies_on(t, device) or (device != host and lies_on(t, host))]


_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Flags of classes, whose instances can change to another: https://docs.python.org/3/c-api/typeobj.html#c.Py_TPFLAGS_HEAPTYPE"""


def orders(
    before: StateWalk, now: Collection[tuple[int, object]] = ()
) -> list[tuple[Slot, object]]:
    """Return the keys of dicts that are read as a whole, in the order of iteration."""
    places: list[tuple[dict[Any, object], str, object, Slot | None]]
    places = [(value, f"`{slot.name}`", None, slot) for slot, value in ordered(before, now)]
    for owner, dicts in zip(before.owners, before.dicts, strict=True):
        seen = before.reads and before.reads.expected(owner)
        for attributes in dicts if seen else ():
            names = [key for key in MODULE_DICTS if dicts[0].get(key) is attributes]
            read = seen and (seen.opaque or not seen.names.keys().isdisjoint(names))
            if read and _has_order(attributes):
                places.append((attributes, f"a `{type(owner).__name__}`", owner, None))
    return [
        (Slot(_ORDERED.get(type(d), "contents"), d, tuple, f"the keys of {of}", at, via), tuple(d))
        for d, of, at, via in places
    ]


def ordered(
    before: StateWalk, replaced: Collection[tuple[int, object]]
) -> list[tuple[Slot, dict[object, object]]]:
    """Return the dicts that are read as a whole, and not replaced by the call, with their slots."""
    dicts = cast(list[tuple[Slot, dict[object, object]]], before.holding(_ORDERED.__contains__))
    return [
        (slot, value)
        for slot, value in dicts
        if _has_order(value)
        and (len(value) <= SMALL or before.contents.is_whole(value))
        and before.used.get(slot.id) is Use.READ
        and slot.id not in replaced
        and not is_replaced(slot, replaced)
    ]


def _has_order(value: dict[Any, object]) -> bool:
    """Return whether the keys of a dict may be in another order, or be other equal keys."""
    return len(value) > 1 or any(type(key) is not str for key in value)


def _gradients(
    before: StateWalk, changes: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[tuple[Slot, object]]:
    """Return the slots of gradients that must be absent, or present.

    A backward stores a gradient where there is none, and adds to an existing one; an optimizer
    skips leaves without a gradient. So an absent gradient matters to a callable that accumulates
    gradients or reads `.grad`; a present gradient to a callable that reads `.grad`, where no kernel
    reads it.
    """
    touched = [change.slot for change in changes] + [slot for slot, _ in guarded]
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
    ids = {slot.id for slot in touched}
    gradients: list[tuple[Slot, object]] = []
    for slot, t in leaves.values():
        name = f"{slot.name}.grad"
        if (id(t), gradient_of) not in before.slots:
            gradients.append((Slot("contents", t, gradient_of, name, None, slot), MISSING))
        elif asks and (id(t), gradient_of) not in ids:
            gradients.append((Slot("contents", t, has_gradient, name, None, slot), True))
    return gradients


def _versions(
    before: StateWalk, guarded: Sequence[tuple[Slot, object]]
) -> list[tuple[Slot, object]]:
    """Return the slots of the tensors' versions, if the user's code asks for them."""
    if before.reads is None or not before.reads.names({"_version"}):
        return []
    tensors = {id(t): (s, t) for s, t in guarded if is_memory(t) and not t.is_inference()}
    return [
        (Slot("contents", t, version_of, f"the version of {s.name}", None, s), t._version)
        for s, t in tensors.values()
    ]


_ORDERED: dict[type, Kind] = {
    **dict.fromkeys((dict, defaultdict, Counter), "of"),
    OrderedDict: "contents",  # the guard's C code does not see the order that it keeps
}


def hooked(
    before: StateWalk, changes: Sequence[Change], guarded: Sequence[tuple[Slot, object]]
) -> list[Tensor]:
    """Return the tensors whose hooks a backward in the call may run."""
    touched = [change.slot for change in changes] + [slot for slot, _ in guarded]
    may = torch.is_grad_enabled() or before.runs_backward()
    if not may and not any(slot.key is gradient_of for slot in touched):
        return []
    return unique([t for _, t in before.tensors() if t.requires_grad])


def _with_paths(
    guarded: list[tuple[Slot, object]], vias: Sequence[Slot | None], before: StateWalk
) -> list[tuple[Slot, object]]:
    """Add the slots on the paths to slots, and `vias`: replacing a list replaces its items."""
    ids, held = {slot.id for slot, _ in guarded}, before.slots
    ways = _unrepeated([*(slot.via for slot, _ in guarded), *vias])
    for via in ways:
        while via is not None and (key := via.id) not in ids and key in held:
            ids.add(key)
            guarded.append((via, held[key][1]))
            via = via.via
    return guarded


def _unrepeated(values: Sequence[Any]) -> list[Any]:
    """Return values without None, and each run of one value once."""
    others = itertools.chain((None,), values)
    return [v for v, other in zip(values, others, strict=False) if v is not other and v is not None]


def _matters(slot: Slot, value: object, before: StateWalk, use: Use | None, changed: bool) -> bool:
    """Return whether another value in this slot could change what the callable does."""
    if isinstance(value, nn.Module):
        return True
    container = before.contents.containers.get(id(slot.holder))
    if container is not None and container[2] > SMALL and not isinstance(slot.holder, set):
        items = before.reads.items if before.reads is not None else {}
        return items.get(slot.id) is Use.READ or before.contents.is_whole(slot.holder)
    # An object that the callable replaces at each call would differ at the next.
    lasting = (Tensor, nn.Module, torch.Generator)
    return use is Use.READ and (
        not changed or isinstance(value, lasting) or is_plain(value) or callable(value)
    )
