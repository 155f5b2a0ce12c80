"""The state that each replay writes, gradients among it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.call.spec import lies_on
from onelaunch.call.tree import Constant, flatten, is_plain
from onelaunch.call.wrappers import is_compound
from onelaunch.capture.recording import StateOutput
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError, kind_of
from onelaunch.frames.stack import Use
from onelaunch.source import loaded_at
from onelaunch.state.dependencies import ordered
from onelaunch.state.slots import (
    MISSING,
    Slot,
    gradient_of,
    read_gradient,
)
from onelaunch.state.walk import Change, StateWalk, is_replaced
from onelaunch.watch.observer import Observer


def recurrent(
    driver: Driver,
    device: torch.device,
    found: Sequence[Change],
    hidden: Sequence[Slot],
    observer: Observer,
    results: Sequence[Tensor],
) -> list[Slot]:
    """Return the slots of recurrent state: the old tensor was read, returned or moved to another
    slot, and the slot holds a new one now."""
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
    before: StateWalk,
    observer: Observer,
    codes: Collection[CodeType],
) -> Iterator[tuple[Slot, object]]:
    """Yield the slots that each replay has to write, with the value that the capture put there.

    Args:
        codes: the code that the callable runs.

    Raises:
        CaptureError: OL105, a tensor in a place that no replay can write; OL118, modules change
            places.
    """
    modules = {id(value) for _, value in before.held.values() if isinstance(value, nn.Module)}
    holders = {id(slot.holder) for slot, _ in before.held.values()}
    holders |= set(before.containers)
    leaves = {id(t) for _, t in before.tensors()}
    for slot, old, new in found:
        if slot.key is gradient_of and id(slot.holder) in leaves:
            yield slot, new
            continue
        if id(slot.holder) not in holders:
            continue  # a new container: rebuilt as a whole in its slot
        tensors = flatten(new).tensors if new is not MISSING else []
        compound = next(filter(is_compound, tensors), None)
        if compound is not None:
            what = f"the callable puts {kind_of(compound)}, made of several tensors, into "
            raise CaptureError("OL105", f"{what}`{slot.name}`", fix=_PLAIN)
        if id(old) in modules and id(new) in modules and before.is_read(slot):
            what = f"the callable puts another module that it has into `{slot.name}`"
            raise CaptureError("OL118", what, fix=_BY_NUMBER)
        if not tensors and not isinstance(old, Tensor):
            continue  # a Python effect, which is not repeated
        grown = old is MISSING and not isinstance(slot.holder, dict)
        if new is MISSING or grown or isinstance(slot.holder, tuple):
            name = slot.name.rpartition("[")[0] if slot.name.endswith("]") else slot.name
            what = f"`{name}` {'lost' if new is MISSING else 'got'} a tensor in the call"
            fix = f"return the tensor, and append it after the call: `{name}.append(fast(x))`"
            place = loaded_at(codes, name.rpartition(".")[2]) if grown else None
            made = observer.made_at(tensors[0]) if tensors else None
            where = made if place is None else str(place)
            raise CaptureError("OL105", what, where=where, fix=fix if grown else None)
        yield slot, new


_PLAIN = "keep a plain tensor, `t.dequantize()` say, or write into the tensors of the one there"
_BY_NUMBER = (
    "leave modules where they are and choose one by a number, `self.layers[self.turn]`: each value "
    "has a recording"
)


def moved_on(found: Sequence[Change], before: StateWalk) -> list[StateOutput]:
    """Return the numbers, flags and other plain values that each replay stores.

    A number that the callable only counts up is counted up from its value at the replay. The
    recording serves calls that find the other values as it did (`dependencies`), and stores the
    same.
    """
    changed = {change.slot.id: change for change in found}
    places = {change.slot.id: change.slot for change in found}
    places |= {slot.id: slot for slot, _ in before.held.values() if before.use(slot) is Use.NONE}
    outputs: list[StateOutput] = []
    for key, slot in places.items():
        change = changed.get(key)
        value = slot.read() if change is None else change.after
        use = before.use(slot)
        if use is None or not is_unchanging(value) or isinstance(slot.holder, tuple):
            continue
        if change is not None and not (change.before is MISSING or is_unchanging(change.before)):
            continue
        step = None
        if use is Use.GROWS and change is not None and change.before is not MISSING:
            if type(change.before) is not int or type(value) is not int:
                continue
            step = value - change.before
        outputs.append(StateOutput(slot, Constant(value), (), step))
    return outputs


def is_unchanging(value: object) -> bool:
    """Return whether a value can never change: a number, a string, a tuple of such values."""
    if type(value) is tuple:
        return all(map(is_unchanging, value))
    return is_plain(value)


def grown(found: Sequence[Change], before: StateWalk) -> tuple[str, ...]:
    """Return the names of containers that the callable only adds to, which no replay does.

    Raises:
        CaptureError: OL118, it also reads a container that grows or shrinks at each call.
    """
    names: dict[str, None] = {}
    ways = {id(value): slot for slot, value in before.held.values()}
    replaced = {change.slot.id for change in found}
    for change in found:
        container = before.containers.get(id(change.slot.holder))
        came_or_went = change.before is MISSING or change.after is MISSING
        if container is None or not came_or_went or flatten(change.after).tensors:
            continue
        way = ways.get(id(container[0]))
        if way is not None and (way.id in replaced or is_replaced(way, replaced)):
            continue  # a new one takes its place
        if way is None or before.is_read(way):
            what = f"the callable changes the length of `{container[1]}`, which it reads"
            raise CaptureError("OL118", what, fix="keep what grows outside of the callable")
        names[container[1]] = None
    return tuple(names)


def refuse_reordered(found: Sequence[Change], before: StateWalk) -> None:
    """Refuse a new order of a dict that the callable reads as a whole, which no replay makes.

    Raises:
        CaptureError: OL118.
    """
    replaced = {change.slot.id for change in found}
    dicts = {id(value): (slot, value) for slot, value in ordered(before, replaced)}
    places: dict[int, dict[object, int]] = {at: {} for at in dicts}
    for slot, _ in before.held.values():
        if id(slot.holder) in places:
            keys = places[id(slot.holder)]
            keys[slot.key] = len(keys)
    for at, (slot, value) in dicts.items():
        order = [places[at][key] for key in value if key in places[at]]
        if order != sorted(order):
            what = f"the callable changes the order of `{slot.name}`, which it reads"
            raise CaptureError("OL118", what, fix="let what takes turns do so outside of it")


def lasting_gradients(
    driver: Driver,
    rebound: Sequence[tuple[Slot, object]],
    results: Sequence[Tensor],
    hidden: Sequence[Slot],
    device: torch.device,
) -> set[int]:
    """Return the ids of gradients that may stay in the recording's memory.

    They are not copied at each replay: a ResNet-50 has 161. Excluded are gradients that the
    callable also returns or stores elsewhere, since these must outlast the next call; and gradients
    in one of the `hidden` slots, since the next call gets them as inputs, and may write them.
    """
    read = {slot.id for slot in hidden}
    gradients: list[Tensor] = []
    others: list[Tensor] = []
    for slot, value in rebound:
        lasts = slot.key is gradient_of and slot.id not in read
        (gradients if lasts else others).extend(flatten(value).tensors)
    taken = {driver.storage(t) for t in (*results, *others) if lies_on(t, device)}
    return {id(t) for t in gradients if lies_on(t, device) and driver.storage(t) not in taken}


def keeper(gradients: Sequence[tuple[Any, Tensor | None]]) -> Callable[[], None]:
    """Return a function that gives each leaf its gradient: 0.05 us each if it has it already."""
    leaves = [leaf for leaf, _ in gradients]
    expected = [gradient for _, gradient in gradients]

    def keep() -> None:
        if all(map(operator.is_, map(read_gradient, leaves), expected)):
            return
        for leaf, gradient in zip(leaves, expected, strict=True):
            if leaf.grad is not gradient:
                leaf.grad = gradient

    return keep
