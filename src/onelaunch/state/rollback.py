"""The rollback of a run: every slot and container that it may change, as it was before.

`StateSnapshot.undo` runs it, beside what it does to tensors; `CaptureSession._roll_back` runs that.
"""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from onelaunch.frames.peek import attributes_of
from onelaunch.frames.reads import Reads
from onelaunch.state.contents import dicts_of, is_library_class
from onelaunch.state.slots import (
    MISSING,
    Slot,
    builtin_kind,
    defaults_of,
    gradient_of,
    has_gradient,
    is_attribute,
    keyword_defaults_of,
    requires_grad,
)
from onelaunch.state.walk import StateWalk, is_same, walk, walk_unread


class Rollback:
    """The contents of all slots and containers of a walk, to put them back.

    Costs a copy of the references in each container. No method of a user's class is called.

    Args:
        found: the walk, of the state as it is now.
    """

    def __init__(self, found: StateWalk) -> None:
        self._containers = {id(c): (c, _contents(c)) for c in _containers(found)}
        self._members = [(c, dict(vars(c))) for c in found.classes if not is_library_class(c)]
        self._slots = list(self._others(found))

    def _others(self, found: StateWalk) -> Iterator[tuple[Slot, object]]:
        """Return the slots that are no item of a container or class, with their contents."""
        own = {id(kind) for kind, _ in self._members}
        for slot, value in found.held.values():
            fixed = isinstance(slot.holder, tuple | types.MappingProxyType)
            item = slot.kind == "item" and (fixed or id(slot.holder) in self._containers)
            if not item and id(slot.owner) not in own:
                yield slot, value
        yield from ((slot, slot.read()) for slot in found.unset)
        for reader, holder, value in found.facts:
            if is_attribute(reader):
                yield Slot("of", holder, reader, "", None), value
            elif reader is has_gradient and not value:
                yield Slot("contents", holder, gradient_of, "", None), MISSING
        for fn in found.functions:
            yield Slot("of", fn, defaults_of, "", None), fn.__defaults__
            yield Slot("of", fn, keyword_defaults_of, "", None), fn.__kwdefaults__
        for owner in found.owners:
            yield Slot("of", owner, attributes_of, "", None), attributes_of(owner)
        for t in {id(t): t for _, t in found.tensors()}.values():
            yield Slot("contents", t, requires_grad, "", None), t.requires_grad

    def holders(self) -> set[int]:
        """Return the ids of the objects that keep the contents here."""
        parts = [part for entry in self._containers.values() for part in (entry, *entry[1])]
        return {id(o) for o in (*parts, *self._slots, *(m for _, m in self._members))}

    def restore(self, within: StateWalk | None = None) -> None:
        """Put back whatever is not as it was.

        Args:
            within: a walk; what it did not find is left as it is.
        """
        containers = None if within is None else {id(c) for c in _containers(within)}
        for slot, value in self._slots:
            if (within is None or slot.id in within.held) and not is_same(value, slot.read()):
                slot.write(value)
        for key, (container, contents) in self._containers.items():
            if containers is None or key in containers:
                _restore(container, contents)
        for kind, members in self._members:
            if within is None or kind in within.classes:
                _restore_members(kind, members)


class RunRollback:
    """The rollback of a run in which code may run for the first time: what that reads, no run has
    read before.

    Args:
        found: the walk of what was read before.
    """

    def __init__(self, found: StateWalk) -> None:
        self._found = found
        self._read = Rollback(found)
        self._unread = Rollback(walk_unread(found))

    def holders(self) -> set[int]:
        """Return the ids of the objects that keep the contents here."""
        return self._read.holders() | self._unread.holders()

    def restore(self, roots: Iterable[tuple[str, object]], reads: Reads | None) -> None:
        """Put back what the run has read, as `reads` tell. All else belongs to others, as to a
        thread that fills a queue."""
        self._read.restore()
        before = self._found.reads
        contents = {id(content) for _, content in self._found.held.values()}
        if reads is not None and before is not None and reads.exceeds(before, contents):
            self._unread.restore(walk(roots, reads))


def _containers(found: StateWalk) -> Iterator[Any]:
    """Return the lists, dicts, sets and deques of a walk, and the dicts of attributes."""
    for container, _, _ in found.containers.values():
        if not isinstance(container, types.MappingProxyType):
            yield container
    for owner in found.owners:
        yield from dicts_of(owner)
    yield from map(vars, found.functions)


def _contents(container: Any) -> tuple[list[object], Any]:
    """Return the keys of a dict and its values, in order; of another container, its items."""
    kind = builtin_kind(container)
    if kind is set:
        return [], set.copy(container)
    if issubclass(kind, dict):
        return list(kind.keys(container)), list(kind.values(container))
    return [], list(kind.__iter__(container))


def _restore(container: Any, contents: tuple[list[object], Any]) -> None:
    """Put the contents of a container back, where they are others. An entry of a dict that stays
    in its place is there all the time, as other threads may read it."""
    kind, (keys, items) = builtin_kind(container), contents
    if kind is set:
        if not _are_same(list(set.__iter__(container)), list(set.__iter__(items))):
            set.clear(container)
            set.update(container, items)
    elif issubclass(kind, dict):
        now = list(kind.keys(container))
        moved = (i for i, (a, b) in enumerate(zip(keys, now, strict=False)) if a is not b)
        for key in now[next(moved, min(len(keys), len(now))) :]:
            kind.__delitem__(container, key)
        for key, value in zip(keys, items, strict=True):
            if dict.get(container, key, MISSING) is not value:
                kind.__setitem__(container, key, value)
    elif not _are_same(items, list(kind.__iter__(container))):
        if kind is list:
            list.__setitem__(container, slice(None), items)
        else:
            deque.clear(container)
            deque.extend(container, items)


def _are_same(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _restore_members(kind: type, members: dict[str, object]) -> None:
    """Put back the attributes of a class."""
    for key, value in {**vars(kind), **members}.items():
        if key not in members:
            if not key.startswith("__"):  # which Python itself keeps there, at times
                type.__delattr__(kind, key)
        elif vars(kind).get(key, MISSING) is not value:
            type.__setattr__(kind, key, value)
