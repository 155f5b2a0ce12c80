"""The state that each replay writes, gradients among it."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn

from onelaunch.call.containers import parts_of
from onelaunch.call.spec import lies_on
from onelaunch.call.tree import (
    Constant,
    Same,
    Tree,
    compares,
    constants,
    flatten,
    is_plain,
    is_unchanging,
    unique,
)
from onelaunch.call.wrappers import is_compound
from onelaunch.capture.checks import is_fixed
from onelaunch.capture.io_plan import Outputs
from onelaunch.capture.recording import Growing, StateOutput
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError, describe_type
from onelaunch.frames.peek import attributes_of
from onelaunch.frames.stack import Use
from onelaunch.identity import id
from onelaunch.source import Place, changed_at, is_users, line_of, loaded_at
from onelaunch.state.dependencies import ordered
from onelaunch.state.parts import is_written, parts_of_slot, whole_of
from onelaunch.state.slots import MISSING, Slot, gradient_of, same_gradients
from onelaunch.state.walk import Change, StateWalk, is_replaced
from onelaunch.watch.observer import Observer


def recurrent_state(
    driver: Driver,
    device: torch.device,
    changes: Sequence[Change],
    hidden: Sequence[Slot],
    observer: Observer,
    results: Sequence[Tensor],
) -> list[Slot]:
    """Return the slots of recurrent state. The slot holds a new tensor now, or a new container of
    tensors. The callable read or returned the old tensors, or moved them to another slot."""
    hidden_ids = {whole_of(slot).id for slot in hidden}
    passed = [*results, *(t for change in changes for t in flatten(change.after).tensors)]
    used = {driver.storage(t) for t in passed if lies_on(t, device)}
    used |= observer.memory.external.keys()
    slots: list[Slot] = []
    written = {id(change.slot.holder) for change in changes}
    for slot, before, after in changes:
        old = [] if slot.id in hidden_ids or before is MISSING else flatten(before).tensors
        if not all(lies_on(t, device) for t in old) or used.isdisjoint(map(driver.storage, old)):
            continue
        if isinstance(before, Tensor):
            slots.append(slot)
        elif flatten(after).tensors and (parts := parts_of_slot(slot, before)):
            slots += [] if is_written(before, written) else parts
    return slots


def rebinds(
    changes: Sequence[Change], before: StateWalk, observer: Observer, codes: Collection[CodeType]
) -> Iterator[tuple[Slot, object]]:
    """Yield each slot that replays write, with the value from the capture. Refuse a tensor in a
    place that no replay can write (OL105), and objects that change places (OL118)."""
    if not changes:
        return
    held = (value for _, value in before.all_slots.values() if value is not MISSING)
    objects = {id(v) for v in held if not (is_plain(v) or isinstance(v, Tensor))}
    holders = {id(slot.holder) for slot, _ in before.all_slots.values()}
    holders |= set(before.containers)
    leaves = {id(t) for _, t in before.tensors()}
    for slot, old, new in changes:
        if slot.key is gradient_of and id(slot.holder) in leaves:
            yield slot, new
            continue
        if id(slot.holder) not in holders:
            continue  # a new container: rebuilt as a whole in its slot
        tensors = flatten(new).tensors if new is not MISSING else []
        compound = next(filter(is_compound, tensors), None)
        if compound is not None:
            what = f"the callable puts {describe_type(compound)}, made of several tensors, into "
            where = changed_at(codes, slot.word, slot.is_item)
            raise CaptureError("OL105", f"{what}`{slot.name}`", where=where, fix=_PLAIN)
        if id(old) in objects and id(new) in objects and before.is_read(slot):
            kind = "module" if isinstance(new, nn.Module) else f"`{type(new).__name__}`"
            what = f"the callable puts another {kind} that it has into `{slot.name}`"
            where = changed_at(codes, slot.word, slot.is_item)
            raise CaptureError("OL118", what, where=where, fix=_BY_NUMBER)
        if not tensors and not isinstance(old, Tensor):
            continue  # a Python effect, which is not repeated
        grown = old is MISSING and not isinstance(slot.holder, dict)
        if new is MISSING or grown or isinstance(slot.holder, tuple):
            name = slot.name.rpartition("[")[0] if slot.name.endswith("]") else slot.name
            what = f"`{name}` {'lost' if new is MISSING else 'got'} a tensor in the call"
            fix = f"return the tensor, and append it after the call: `{name}.append(fast(x))`"
            held = slot.via if slot.is_item else slot
            place = None if held is None else changed_at(codes, held.word, held.is_item)
            where = place or (observer.memory.made_at(tensors[0]) if tensors else None)
            raise CaptureError("OL105", what, where=where, fix=fix if grown else None)
        yield slot, new


_PLAIN = "keep a plain tensor, `t.dequantize()` say, or write into the tensors of the one there"
_BY_NUMBER = (
    "leave them where they are and choose one by a number, `self.layers[self.turn]`: each value "
    "has a recording"
)


def counted_numbers(
    changes: Sequence[Change],
    before: StateWalk,
    whole: Mapping[int, Same],
    number: Callable[[object], int],
    stores: Iterable[Slot],
) -> list[StateOutput]:
    """Return the numbers, flags and other values without tensors that each replay stores. A replay
    counts from the number that it finds, if the callable only counts up. Other values are stored as
    in the capture, for `dependencies` guards them: functions, objects in `whole`, and objects made
    anew as results are (see `flatten`). `stores`: places of followed numbers that the run has
    stored to, perhaps what was there."""
    changed = {change.slot.id: change for change in changes}
    # The call made this object to replace another. Its slots are new with it, and no replay makes
    # the object, so nothing is stored into it.
    added = {c.slot.id for c in changes if c.before is MISSING and is_replaced(c.slot, changed)}
    places = {c.slot.id: c.slot for c in changes if c.slot.id not in added}
    places |= {slot.id: slot for slot in stores}
    stored = {key for key, use in before.used.items() if use is Use.NONE}
    places |= {key: before.slots[key][0] for key in stored if key in before.slots}
    outputs: list[StateOutput] = []
    for key, slot in places.items():
        change = changed.get(key)
        value = slot.read() if change is None else change.after
        use = before.use(slot)
        if use is None or isinstance(slot.holder, tuple) or value is MISSING:
            continue
        if use is Use.NONE:
            flat = flatten(value, slot.name, objects="made", whole=whole, number=number)
            if not flat.tensors and _lasts(flat.tree, whole):
                outputs.append(StateOutput(slot, flat.tree, ()))
            elif change is not None and _is_copied(value):
                kept = functools.partial(copy.copy, copy.copy(value))
                outputs.append(StateOutput(slot, Constant(value), (), fresh=kept))
            continue
        if not is_unchanging(value):
            continue
        if change is not None and not (change.before is MISSING or is_unchanging(change.before)):
            continue
        step = None
        if use is Use.GROWS and change is not None and change.before is not MISSING:
            step = cast(int, value) - cast(int, change.before)
        outputs.append(StateOutput(slot, Constant(value), (), step))
    return outputs


def _is_copied(value: object) -> bool:
    """Return whether a value is data that a replay can copy, as the callable makes it."""
    kind = type(value)
    if kind is set or kind is Counter:
        return all(map(is_unchanging, cast(Iterable[object], value)))
    if kind is bytearray or kind is array:
        return True
    of_numpy = (kind.__module__, kind.__name__) == ("numpy", "ndarray")  # no view of other memory
    return of_numpy and cast(Any, value).base is None and not cast(Any, value).dtype.hasobject


def _lasts(tree: Tree, before: Collection[int]) -> bool:
    """Return whether each replay can store the constants of a tree: the call made none of them."""
    values = [constant.value for _, constant in constants(tree) if not constant.is_plain]
    return all(id(value) in before or is_fixed(value, before) for value in values)


def growing_containers(
    changes: Sequence[Change], before: StateWalk, codes: Collection[CodeType]
) -> Growing:
    """Return the containers that the callable only adds to. No replay does. Refuse (OL118) one that
    it also reads, and that grows or shrinks at each call."""
    if not changes:
        return Growing()
    names: dict[str, None] = {}
    place: Place | None = None
    ways = {id(value): slot for slot, value in before.all_slots.values()}
    replaced = {change.slot.id for change in changes}
    for change in changes:
        container = before.containers.get(id(change.slot.holder))
        came_or_went = change.before is MISSING or change.after is MISSING
        if container is None or not came_or_went or flatten(change.after).tensors:
            continue
        way = ways.get(id(container[0]))
        if way is not None and (way.id in replaced or is_replaced(way, replaced)):
            continue  # a new one takes its place
        if way is None or before.is_read(way):
            what = f"the callable changes the length of `{container[1]}`, which it reads"
            where = None if way is None else _place_of(way, codes)
            hook = None if way is None or where is not None else _hook_of(way, before)
            fix = _GROWS if hook is None else _OUTSIDE
            raise CaptureError("OL118", what, where=where or hook, fix=fix)
        names[container[1]] = None
        place = place or _place_of(way, codes)
    return Growing(tuple(names), place)


_GROWS = (
    "read it and change it outside of the callable, and pass what is read, `y = fast(x, "
    "len(seen)); seen.append(1)`; or count in a tensor on the device, and compute with it"
)
_OUTSIDE = (
    "put a hook that counts its backwards, as of `register_multi_grad_hook(..., "
    'mode="any")`, on a graphed forward, `fast = ol.graph(model)`'
)


def _place_of(way: Slot, codes: Collection[CodeType]) -> Place | None:
    """Return the line that changes the container in a slot, or else takes it from there."""
    return changed_at(codes, way.word, way.is_item) or loaded_at(codes, way.word, way.is_item)


def _hook_of(way: Slot, before: StateWalk) -> Place | None:
    """Return the line of the user's hook whose wrapper, of a library, has this slot as a variable.
    Torch's `register_multi_grad_hook` has such a wrapper."""
    for fn in before.functions:
        if any(way.holder is cell for cell in fn.__closure__ or ()):
            return None if is_users(fn.__code__.co_filename) else line_of(inspect.unwrap(fn))
    return None


def refuse_renewed(
    changes: Sequence[Change],
    before: StateWalk,
    written: Collection[object],
    codes: Collection[CodeType],
) -> None:
    """Refuse (OL118) to replace an object that the callable reads by an object with other data. No
    replay makes the new object, so each would find the data of the capture. `written`: the ids of
    the slots that each replay writes."""
    replaced = {c.slot.id for c in changes if c.slot.id not in written and before.is_read(c.slot)}
    if not replaced:
        return
    old = {
        slot.name: value for slot, value in before.all_slots.values() if is_replaced(slot, replaced)
    }
    for slot, was, value in changes:
        if slot.id in replaced and _is_other_data(was, value):
            via = slot
            what = f"the callable replaces `{slot.name}`, which it reads: it was {was!r:.60}, "
            what += f"and is {value!r:.60} now"
        elif was is MISSING and is_unchanging(value) and is_replaced(slot, replaced):
            via, was = slot.via, old.get(slot.name, MISSING)
            if not is_unchanging(was) or Constant(was) == Constant(value):
                continue
            what = f"the callable replaces what holds `{slot.name}`, which it reads: it was "
            what += f"{was!r}, and is {value!r} in the new one"
        else:
            continue
        fix = "keep the object, and move the number on in it, `state.n += 1`; or a tensor in it"
        where = None if via is None else changed_at(codes, via.word, via.is_item)
        raise CaptureError("OL118", what, where=where, fix=fix)


def _is_other_data(was: object, value: object) -> bool:
    """Return whether a value is data, other than that before it, and no replay stores it."""
    if type(was) is not type(value) or is_unchanging(value):
        return False
    if parts_of(was) is None:  # a `Fraction`, or a path
        return (
            type(was).__module__.partition(".")[0] in sys.stdlib_module_names
            and compares(type(was))
            and was != value
        )
    if isinstance(was, dict) and not all(map(is_plain, [*was, *cast(dict[Any, Any], value)])):
        return False  # a table of objects, such as streams
    flat, now = flatten(was), flatten(value)
    every = [constant for tree in (flat.tree, now.tree) for _, constant in constants(tree)]
    return all(c.is_plain for c in every) and not flat.tensors and flat.tree != now.tree


def refuse_reordered(
    changes: Sequence[Change], before: StateWalk, orders: Mapping[int, Sequence[object]]
) -> None:
    """Refuse (OL118) a new order of a dict that the callable reads as a whole, which no replay
    makes. `orders`: id of a dict -> its keys before the run."""
    replaced = {change.slot.id for change in changes}
    for slot, value in ordered(before, replaced):
        places = {key: place for place, key in enumerate(orders.get(id(value), ()))}
        order = [places[key] for key in value if key in places]
        if order != sorted(order):
            what = f"the callable changes the order of `{slot.name}`, which it reads"
            raise CaptureError("OL118", what, fix="let what takes turns do so outside of it")


def refuse_other_attributes(before: StateWalk, codes: Collection[CodeType]) -> None:
    """Refuse (OL118) a new `__dict__` of an object, which no replay makes."""
    if not any("__dict__" in code.co_names for code in codes):
        return
    for owner, dicts in zip(before.owners, before.dicts, strict=True):
        if dicts and not any(attributes_of(owner) is kept for kept in dicts):
            what = f"the callable replaces the `__dict__` of {describe_type(owner)}"
            where = changed_at(codes, "__dict__", False)
            fix = "set the attributes, `vars(o).update(...)`"
            raise CaptureError("OL118", what, where=where, fix=fix)


def lasting_gradients(
    driver: Driver,
    rebound: Sequence[tuple[Slot, object]],
    results: Sequence[Tensor],
    hidden: Sequence[Slot],
    device: torch.device,
) -> set[int]:
    """Return the ids of gradients that may stay in the recording's memory, which no replay copies.
    A gradient does not stay if the callable also returns or stores it: there it must outlast the
    next call. Nor does one in a `hidden` slot, which the next call gets as an input."""
    read = {slot.id for slot in hidden}
    gradients: list[Tensor] = []
    others: list[Tensor] = []
    for slot, value in rebound:
        lasts = slot.key is gradient_of and slot.id not in read
        (gradients if lasts else others).extend(flatten(value).tensors)
    taken = {driver.storage(t) for t in (*results, *others) if lies_on(t, device)}
    return {id(t) for t in gradients if lies_on(t, device) and driver.storage(t) not in taken}


def keep_results(
    outputs: Outputs, results: Sequence[Tensor], state: Sequence[StateOutput]
) -> list[Tensor]:
    """Let results stay in the recording's memory, and return the staying tensors. Memory of stored
    tensors does not stay: the next launch in the pool would overwrite it."""
    stored = {number for each in state for number in each.output_indices}
    for index, group in enumerate(outputs.groups):
        group.stays = not any(number in stored for number, _ in outputs.of_group(index))
    return [unique(results)[number] for number in outputs.staying()]


def keeper(gradients: Sequence[tuple[Any, Tensor | None]]) -> Callable[[], None]:
    """Return a function that gives each leaf its gradient: 0.05 us a leaf that has it already."""
    kept = same_gradients(gradients)

    def keep() -> None:
        for leaf, gradient in () if kept() else gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    return keep
