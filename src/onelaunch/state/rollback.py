"""The rollback of a run: every slot and container that it may change, as it was before.

`StateSnapshot.undo` runs it, and restores tensors; `CaptureSession._roll_back` runs the latter.
"""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from onelaunch.beside import is_beside
from onelaunch.frames.peek import attributes_of
from onelaunch.frames.reads import Reads
from onelaunch.identity import id
from onelaunch.state.contents import is_library_class
from onelaunch.state.slots import (
    MISSING,
    Kind,
    Slot,
    builtin_kind,
    defaults_of,
    gradient_of,
    is_attribute,
    keyword_defaults_of,
    new_slot,
    requires_grad,
)
from onelaunch.state.walk import StateWalk, is_same, walk, walk_unread

_DEPTH = 8
"""The depth to which nested objects are put back, where a run was the first to read them."""


class Rollback:
    """The contents of all slots and containers of a walk, to put them back.

    Costs a copy of the references in each container. No method of a user's class is called.

    Args:
        walked: the walk, of the state as it is now.
        each: True to keep each item of a dict, too. Then `restore` can put back only the items
            that its walk has found, as of a module's globals.
    """

    def __init__(self, walked: StateWalk, each: bool = False) -> None:
        if each:
            walked.expand()
        self._containers = {id(c): (c, _contents(c)) for c in _containers(walked)}
        self._empty = [*walked.empty, *walked.hooks]
        self._members = [(c, dict(vars(c))) for c in walked.classes if not is_library_class(c)]
        self._slots = list(self._others(walked, each))
        owners, tensors = list(walked.owners), [t for _, t in walked.tensors()]
        self._facts: list[tuple[Kind, Callable[[Any], object], list[Any], list[object]]] = [
            ("of", type, owners, list(walked.kinds)),
            ("of", attributes_of, owners, list(map(attributes_of, owners))),
            ("contents", requires_grad, tensors, list(map(requires_grad, tensors))),
        ]
        """(kind and reader of a slot, objects, contents)."""

    def _others(self, walked: StateWalk, each: bool) -> Iterator[tuple[Slot, object]]:
        """Return the slots outside of the kept containers and classes, with their contents. Those
        of leaf attributes are in kept dicts."""
        own = {id(kind) for kind, _ in self._members}
        containers = self._containers
        for (holder, _), (slot, value) in walked.slots.items():
            of_tuple, item = type(slot.holder) is tuple, slot.kind == "item"
            if item and (of_tuple or (not each and holder in containers)):
                continue  # nearly all
            fixed = isinstance(slot.holder, (tuple, types.MappingProxyType))
            alone = each and isinstance(slot.holder, dict)
            whole = fixed or (holder in containers and not alone)
            if not (item and whole) and id(slot.owner) not in own:
                yield slot, value
        yield from ((slot, slot.read()) for slot in walked.unset)
        for reader, holder, value in walked.facts:
            if is_attribute(reader):
                yield Slot("of", holder, reader, "", None), value
        for t, had in walked.leaves:
            if not had:
                yield new_slot(("contents", t, gradient_of, "", None, None)), MISSING
        for fn in walked.functions:
            yield Slot("of", fn, defaults_of, "", None), fn.__defaults__
            yield Slot("of", fn, keyword_defaults_of, "", None), fn.__kwdefaults__

    def holders(self) -> set[int]:
        """Return the ids of the objects that keep the contents here."""
        parts = [part for entry in self._containers.values() for part in (entry, *entry[1])]
        parts += (part for fact in self._facts for part in fact)
        return {id(o) for o in (*parts, *self._slots, *(m for _, m in self._members))}

    def restore(self, within: StateWalk | None = None) -> bool:
        """Put back changed contents. Return whether any had changed.

        Args:
            within: a walk; slots and containers that it did not find are left as they are.
        """
        own = None if within is None else _objects(within)
        changed = False
        for slot, value in self._slots:
            there = own is None or slot.id in own or id(slot.holder) in own
            if there and not is_same(value, slot.read()):
                slot.write(value)
                changed = True
        for slot_kind, reader, objects, values in self._facts:
            for o, then, now in zip(objects, values, map(reader, objects), strict=True):
                if then is not now and (own is None or id(o) in own):
                    Slot(slot_kind, o, reader, "", None).write(then)
                    changed = True
        for container in filter(None, self._empty):
            if own is None or id(container) in own:
                changed |= _restore(container, ([], type(container)()))
        for key, (container, contents) in self._containers.items():
            if own is None or key in own:
                changed |= _restore(container, contents)
        for kind, members in self._members:
            if own is None or id(kind) in own:
                changed |= _restore_members(kind, members)
        return changed


class RunRollback:
    """The rollback of a run in which code may run, and read state, for the first time.

    Args:
        walked: the walk of the state that earlier runs read.
    """

    def __init__(self, walked: StateWalk) -> None:
        self._walked = walked
        self._read = Rollback(walked)
        self._unread = Rollback(walk_unread(walked), each=True)

    def holders(self) -> set[int]:
        return self._read.holders() | self._unread.holders()

    def restore(self, roots: Iterable[tuple[str, object]], reads: Reads | None) -> StateWalk | None:
        """Put back the state that the run has read, by its `reads`. Other state belongs to others:
        to a thread that fills a queue, for example. Beside calls all changes are others'. Return
        the walk of the state by these reads, where it was needed."""
        if is_beside():
            return None
        self._read.restore()
        before = self._walked.reads
        if reads is None or before is None or not reads.exceeds(before, self._walked.ids()):
            return None
        for _ in range(_DEPTH):  # a restored object may lead to more that was changed
            walked = walk(roots, reads)
            if not self._unread.restore(walked):
                return walked
        return None


def _objects(walked: StateWalk) -> set[object]:
    objects = (
        *walked.owners,
        *walked.classes,
        *walked.functions,
        *(t for _, t in walked.tensors()),
    )
    return {*walked.all_slots, *map(id, objects), *map(id, _containers(walked))}


def _containers(walked: StateWalk) -> Iterator[Any]:
    for container, _, _ in walked.contents.containers.values():
        if not isinstance(container, types.MappingProxyType):
            yield container
    for dicts in walked.dicts:
        yield from dicts
    yield from map(vars, walked.functions)


def _contents(container: Any) -> tuple[list[object], Any]:
    """Return the keys and the values of a dict, in order; no keys for another container."""
    if type(container) is dict:
        return (list(container), list(container.values())) if container else _EMPTY
    kind = builtin_kind(container)
    if kind is set:
        return [], set.copy(container)
    if issubclass(kind, dict):
        keys = list(kind.keys(container))
        return (keys, list(kind.values(container))) if keys else _EMPTY
    return [], list(kind.__iter__(container))


_EMPTY: tuple[list[object], list[object]] = [], []


def _restore(container: Any, contents: tuple[list[object], Any]) -> bool:
    """Put back the contents of a container. Return whether they had changed."""
    kind, (keys, items) = builtin_kind(container), contents
    if kind is set:
        if _are_same(list(set.__iter__(container)), list(set.__iter__(items))):
            return False
        set.clear(container)
        set.update(container, items)
    elif issubclass(kind, dict):
        now = list(kind.keys(container))
        if _are_same(keys, now) and _are_same(items, list(kind.values(container))):
            return False
        # Entries that keep their places are never removed, as other threads may read them.
        moved = (i for i, (a, b) in enumerate(zip(keys, now, strict=False)) if a is not b)
        for key in now[next(moved, min(len(keys), len(now))) :]:
            kind.__delitem__(container, key)
        for key, value in zip(keys, items, strict=True):
            if dict.get(container, key, MISSING) is not value:
                kind.__setitem__(container, key, value)
    elif _are_same(items, list(kind.__iter__(container))):
        return False
    elif kind is list:
        list.__setitem__(container, slice(None), items)
    else:
        deque.clear(container)
        deque.extend(container, items)
    return True


def _are_same(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _restore_members(kind: type, members: dict[str, object]) -> bool:
    """Put back the attributes of a class. Return whether they had changed."""
    changed = False
    for key, value in {**vars(kind), **members}.items():
        if key not in members:
            if not key.startswith("__"):  # Python itself may have put it there
                type.__delattr__(kind, key)
                changed = True
        elif vars(kind).get(key, MISSING) is not value:
            type.__setattr__(kind, key, value)
            changed = True
    return changed
