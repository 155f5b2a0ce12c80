"""The state that a callable reaches: parameters, attributes, closures, globals.

A graph reads memory by address and repeats the branches that Python took, so everything that led
there must be unchanged. `walk` finds the slots that the callable was seen to touch, and their
contents; `guard.StateGuard` checks the slots that matter.
"""

from __future__ import annotations

import enum
import operator
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from onelaunch.beside import make_way
from onelaunch.call.tree import is_plain
from onelaunch.call.wrappers import is_memory
from onelaunch.frames.peek import finds_by_key
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.gc_pause import no_collection
from onelaunch.identity import id
from onelaunch.state.attributes import Attributes, is_bare
from onelaunch.state.contents import (
    LEAVES,
    Contents,
    dicts_of,
    is_library_class,
    members_of,
)
from onelaunch.state.hooks import read_hooks, read_last_hooks
from onelaunch.state.slots import (
    MISSING,
    Slot,
    code_of,
    new_slot,
    thread_in,
)
from onelaunch.state.walked import StateWalk, is_replaced, is_same

SMALL = 64
"""The most items of a container whose plain values are compared singly."""
_THREAD_FUNCTIONS = frozenset({"current_thread", "get_ident", "get_native_id"})
_UNWALKED_TYPES = (Tensor, BackwardCFunction)
_MOST_UNREAD = 10_000
"""The most unread slots that a capture looks at: 50 ms."""
_BUILTIN = frozenset({OrderedDict, dict, list, set})
Queue = deque[tuple[str, object, Slot | None]]


@no_collection()
def walk(
    roots: Iterable[tuple[str, object]], reads: Reads | None = None, known: Reads | None = None
) -> StateWalk:
    """Find the slots that a callable touches. Costs a few microseconds for each object visited.

    Args:
        roots: (name, object) pairs: the callable, and arguments compared by identity.
        reads: the reads of the callable. Without them, before it has run, everything that the roots
            lead to is found.
        known: reads of objects to visit, whether or not a slot leads there; default `reads`.
    """
    walked = StateWalk(Contents(reads))
    # Breadth first, so that names are short, and without recursion, so that chains may be long.
    queue: Queue = deque((n, value, None) for n, value in roots)
    seen: set[int] = set()
    _visit_all(walked, queue, seen)
    if reads is not None:
        for namespace, names in reads.globals.values():
            for slot, use in walked.contents.of_globals(namespace, names):
                _add_slot(walked, slot, slot.read(), use, queue)
        _visit_all(walked, queue, seen)
        if reads.names(_THREAD_FUNCTIONS):
            slot = Slot("contents", threading, thread_in, "the thread", None)
            walked.slots[slot.id], walked.used[slot.id] = (slot, slot.read()), _READ
        for value in (known or reads).alive():
            # A tensor that no slot leads to is the call's or the caller's, and must not be kept.
            # The node of a custom function would keep its graph.
            if id(value) not in seen and not isinstance(value, _UNWALKED_TYPES):
                is_class = isinstance(value, type)
                name = value.__qualname__ if is_class else f"a `{type(value).__name__}`"
                queue.append((name, value, None))
                _visit_all(walked, queue, seen)
                walked.strays |= not (isinstance(value, type) or is_library_class(type(value)))
    if torch.is_grad_enabled() and walked.runs_backward():
        while _queue_hooks(walked, queue, seen):
            _visit_all(walked, queue, seen)
    return walked


@no_collection()
def walk_unread(walked: StateWalk) -> StateWalk:
    """Find the state that code may read and change when it runs for the first time.

    It is reached by the names in functions that have not run, and behind slots that no run has
    read. Only the nearest `_MOST_UNREAD` slots are found.
    """
    unread = StateWalk(Contents(None))
    ran = walked.reads.codes if walked.reads is not None else ()
    new: list[tuple[str, object, Slot | None]]
    new = [(fn.__qualname__, fn, None) for fn in walked.functions if fn.__code__ not in ran]
    new += [
        (kind.__qualname__, kind, None) for kind in walked.classes if not is_library_class(kind)
    ]
    queue, uses = deque(new), walked.used
    for key, (slot, value) in walked.slots.items():
        if key not in uses and not _leads_nowhere(value):
            queue.append((slot.name, value, None))
    empty: list[object] = []
    for attributes in walked.contents.untouched.values():
        for key, value in attributes.values.items():
            if type(value) in _BUILTIN and not value:
                empty.append(value)
            elif not _leads_nowhere(value):
                queue.append((f"{attributes.name}{key}", value, None))
    if is_bare(*empty):
        unread.empty += empty
    else:
        queue.extend(("", value, None) for value in empty)
    seen = {*map(id, (*walked.owners, *walked.classes, *walked.functions))}
    seen |= walked.contents.containers.keys()
    _visit_all(unread, queue, seen.difference(id(value) for _, value, _ in new), _MOST_UNREAD)
    return unread


def _visit_all(walked: StateWalk, queue: Queue, seen: set[int], most: int | None = None) -> None:
    owners = {} if walked.reads is None else walked.reads.owners
    containers = walked.contents.containers
    while queue and (most is None or len(walked.slots) < most):
        name, value, via = queue.popleft()
        kind = type(value)
        if kind in LEAVES:
            continue
        key = id(value)
        if key in seen:
            continue
        # Hooks, mostly. A `__dict__` is made when it is asked for, and is all that it refers to.
        if kind is OrderedDict and not (value or key in owners) and is_bare(value):
            seen.add(key)
            containers[key] = (value, name, 0)
            continue
        # Imports grow `sys.modules`; the modules that were read are known by themselves. A member
        # of an enumeration may have attributes.
        plain = not isinstance(value, (nn.Module, enum.Enum)) and is_plain(value)
        if not plain and value is not sys.modules:
            seen.add(key)
            make_way()
            _visit(walked, queue, name, value, via)


def _visit(walked: StateWalk, queue: Queue, name: str, value: object, via: Slot | None) -> None:
    kind = type(value)
    if isinstance(value, nn.Module):
        first = kind not in walked.contents.splits
        _visit_slots(walked, queue, name, value, _note_owner(walked, value), via)
        if first:
            queue.append((kind.__qualname__, kind, via))
        if not isinstance(value, torch.jit.ScriptModule):
            return
    elif isinstance(value, types.FunctionType):
        walked.functions.append(value)
        walked.facts.append((code_of, value, value.__code__))
        walked.sizes.append((vars(value), len(vars(value))))
    elif isinstance(value, type):
        walked.classes.append(value)
        members = members_of(value)
        walked.facts.append((type.mro, value, type.mro(value)))
        walked.sizes.append((members, len(members)))
    elif dicts_of(value) or (walked.reads is not None and walked.reads.of(value) is not None):
        _note_owner(walked, value)
    use_of_via = _READ if via is None else walked.used.get(via.id, _READ)
    for slot, use in walked.contents.of(name, value, use_of_via):
        if via is not None and slot.via is None:
            slot = new_slot((*slot[:5], via))
        _add_slot(walked, slot, slot.read(), use, queue)
        if isinstance(value, Tensor):
            walked.tensor_attributes.append(slot.id)
    queue.extend(
        (inner_name, inner, via) for inner_name, inner in walked.contents.code_of(name, value)
    )


def _note_owner(walked: StateWalk, owner: object) -> list[dict[str, Any]]:
    dicts = dicts_of(owner)
    walked.owners.append(owner)
    walked.kinds.append(type(owner))
    walked.dicts.append(dicts)
    walked.sizes.extend(zip(dicts, map(len, dicts), strict=True))
    return dicts


def _visit_slots(
    walked: StateWalk,
    queue: Queue,
    name: str,
    module: nn.Module,
    dicts: list[dict[str, Any]],
    via: Slot | None,
) -> None:
    """Find the slots of a module: half of all slots, nearly all with plain values."""
    contents, prefix = walked.contents, f"{name}." if name else ""
    for entries in filter(None, dicts[1:]):
        at = id(entries)
        for key in list(entries):
            slot = new_slot(("item", entries, key, f"{prefix}{key}", module, via))
            _add_slot(walked, slot, dict.get(entries, key, MISSING), _READ, queue, (at, key))
    attributes = dicts[0]
    values, at = dict(attributes), id(attributes)
    split = contents.split(module, values)
    plain = {key: values[key] for key in split.read}
    untouched = {key: values[key] for key in split.untouched}
    slots = dict(split.others)
    others = {key: value for key, value in plain.items() if type(value) not in LEAVES}
    hooks = [value for value in others.values() if type(value) is OrderedDict and not value]
    bare = not contents.reads_hooks and is_bare(*hooks)
    for key, value in others.items():
        if type(value) is OrderedDict and not value and (bare or contents.is_unread_hooks(value)):
            walked.hooks.append(value)
        elif not _leads_nowhere(value):
            del plain[key]
            slots[key] = _READ
    if not LEAVES.issuperset(map(type, untouched.values())):
        for key in split.untouched:
            if isinstance(untouched[key], Tensor):  # a kernel may read its memory
                del untouched[key]
                slots[key] = None
    for key in values if slots else ():
        if key in slots:
            slot = new_slot(("item", attributes, key, f"{prefix}{key}", module, via))
            _add_slot(walked, slot, values[key], slots[key], queue, (at, key))
    if untouched:
        contents.untouched[at] = Attributes(prefix, module, attributes, untouched, via)
    if plain:
        contents.leaf_attributes[at] = Attributes(prefix, module, attributes, plain, via)


def _leads_nowhere(value: object) -> bool:
    """Return whether a value is plain, or a tuple of plain values."""
    kind = type(value)
    return kind in LEAVES or (kind is tuple and LEAVES.issuperset(map(type, cast(Any, value))))


def _add_slot(
    walked: StateWalk,
    slot: Slot,
    content: object,
    use: Use | None,
    queue: Queue,
    key: tuple[int, object] | None = None,
) -> None:
    """Add a slot, and queue its content. `key` is the slot's id, if it is known."""
    tensor = isinstance(content, Tensor)
    if tensor:
        gradient = walked.add_leaf(slot, content)
        if gradient is not None and walked.contents.has_contents(gradient[1]):
            queue.append((gradient[0].name, gradient[1], gradient[0]))
    if content is MISSING and (use is None or walked.reads is None):
        walked.unset.append(slot)
        return
    key = key or slot.id
    walked.slots[key] = (slot, content)
    if tensor:
        walked.tensor_slots[key] = None
    if use is None:
        return
    if use is _MIXED:
        use = _READ if type(content) in LEAVES else Use.GROWS
    if use is _ITEMS and not (isinstance(content, dict) and finds_by_key(type(content))):
        use = _READ  # the last item of a list is another when it has grown
    if use is _ITEMS:
        walked.by_key.add(id(content))
    elif use is _READ and walked.by_key and id(content) in walked.by_key:  # by another slot too
        walked.by_key.discard(id(content))
        items = [walked.slots.get((id(content), item)) for item in cast(dict[Any, Any], content)]
        for item, _ in filter(None, items):
            _add_slot(walked, item, item.read(), _READ, queue)
    earlier = walked.used.get(key)
    if earlier is None or use > earlier:
        walked.used[key] = use
    bare = tensor and is_memory(content) and not walked.contents.has_contents(content)
    if type(content) not in LEAVES and not bare:
        queue.append((slot.name, content, slot))


_READ, _ITEMS, _MIXED = Use.READ, Use.ITEMS, Use.MIXED  # Python 3.11 calls a function for each


def _queue_hooks(walked: StateWalk, queue: Queue, seen: set[int]) -> bool:
    """Queue the hooks of leaves, which a backward inside runs. Return whether there are any."""
    for slot, t in walked.tensors_so_far():
        for hooks in (read_hooks(t), read_last_hooks(t)) if t.requires_grad else ():
            new = [h for h in (hooks or {}).values() if id(h) not in seen]
            queue.extend((f"a hook of {slot.name}", hook, None) for hook in new)
    return bool(queue)


MARKS_OF_DYNAMO = (
    *("_dynamo_static_input_type", "___needs_generation_tag_patch"),
    "___has_generation_tag_patch",  # the same in torch 2.15
)
"""The attributes that Dynamo gives to tensors of modules and to `nn.Module` when it compiles."""


class Change(NamedTuple):
    """A slot whose content the callable replaced."""

    slot: Slot
    before: object
    after: object


def changes(before: StateWalk, after: StateWalk) -> list[Change]:
    """Return the differences between two walks of the same roots, without marks of Dynamo's."""
    return [c for c in _changes(before, after) if not is_mark_of_dynamo(c.slot.key)]


def is_mark_of_dynamo(key: object) -> bool:
    """Return whether a slot's key is the name of an attribute that Dynamo gives."""
    return isinstance(key, str) and key in MARKS_OF_DYNAMO


def _changes(before: StateWalk, after: StateWalk) -> list[Change]:
    changed: list[Change] = []
    if not _are_alike(before.leaf_attributes, after.leaf_attributes):
        before.expand()
        after.expand()
    for key, (slot, value) in after.slots.items():
        old = before.slots.get(key, (slot, MISSING))[1]
        if old is not value and not is_same(old, value):
            changed.append(Change(slot, old, value))
    for key, (slot, value) in before.slots.items():
        if key not in after.slots and slot.read() is MISSING:
            changed.append(Change(slot, value, MISSING))
    for key, attributes in after.contents.untouched.items():
        earlier = before.contents.untouched.get(key)
        changed += _unseen_changes(attributes, {} if earlier is None else earlier.values)
    return changed


def _are_alike(some: dict[int, Attributes], others: dict[int, Attributes]) -> bool:
    """Return whether leaf attributes are the same."""
    return some.keys() == others.keys() and all(
        a.values.keys() == b.values.keys()
        and all(map(operator.is_, a.values.values(), map(b.values.get, a.values)))
        for a, b in zip(some.values(), map(others.__getitem__, some), strict=True)
    )


def note_uncounted(before: StateWalk, changes: Iterable[Change]) -> None:
    """Count the slots as read that grew by anything but an integer: no replay can add it."""
    for slot, *values in changes:
        if before.use(slot) is Use.GROWS and not all(type(value) is int for value in values):
            before.uses[slot.id] = Use.READ


def _unseen_changes(attributes: Attributes, old: dict[str, object]) -> Iterator[Change]:
    """Return the changes of attributes that the callable was not seen to read or store."""
    new = attributes.values
    if len(old) == len(new) and all(map(operator.is_, old.values(), new.values())):
        return  # in the same order
    for key in {**old, **new}:
        slot = attributes.slot(key)
        then, now = old.get(key, MISSING), slot.read()
        if not is_same(then, now):
            yield Change(slot, then, now)


def reads_more(
    roots: Iterable[tuple[str, object]],
    reads: Reads | None,
    before: StateWalk,
    changes: Iterable[Change],
) -> bool:
    """Return whether a run read more than the runs before it, of objects that it did not make.

    Args:
        reads: the reads after the run.
        before: the state before the run, as far as runs had read it.
        changes: the run's changes to that state.
    """
    if reads is None or reads is before.reads:
        return False
    held = before.ids()
    if before.reads is not None and not reads.exceeds(before.reads, held):
        return False
    items = before.reads.items if before.reads is not None else {}
    large = {key for key, (_, _, count) in before.containers.items() if count > SMALL}
    if any(place[0] in large and use > items.get(place, -1) for place, use in reads.items.items()):
        return True  # of a small container every item counts as read
    if not large.isdisjoint(reads.whole - (before.reads.whole if before.reads else set())):
        return True
    now = walk(roots, reads, before.reads)
    replaced = {c.slot.id for c in changes if c.before is not MISSING}  # new slots stay
    # A container that a recording needs empty has none of the keys that code looks for.
    sized = before.sized({c.slot.id for c in changes})
    empty = {id(c) for c, _ in sized if before.containers.get(id(c), (c, "", 1))[2] == 0}
    if more := _unheld(now) - _unheld(before):
        held = {
            id(v) for s, v in now.all_slots.values() if s.id in replaced or is_replaced(s, replaced)
        }
        if not held.issuperset(key for key, _ in more):
            return True
    return any(
        use > before.uses.get(key, Use.NONE)
        and key not in replaced
        and key[0] not in empty
        and not is_replaced(now.all_slots[key][0], replaced)
        for key, use in now.uses.items()
    )


def _unheld(walked: StateWalk) -> set[tuple[int, object]]:
    """Return what was read and has no slot: (id of an object, missing attribute or code)."""
    reads, contents = walked.reads, walked.contents
    if reads is None:
        return set()
    ran = [fn for fn in walked.functions if fn.__code__ in reads.codes]
    read: set[tuple[int, object]] = {(id(fn), fn.__code__) for fn in ran}
    for owner, dicts in zip(walked.owners, walked.dicts, strict=True):
        seen = reads.expected(owner)
        names = set[str]() if seen is None else set(seen.names)
        if not is_library_class(type(owner)):
            names |= contents.loose
        read |= {(id(owner), name) for name in names.difference(*dicts)}
    for kind in walked.classes:
        if not is_library_class(kind):
            missing = contents.names_of(kind).keys() - members_of(kind).keys()
            read |= {(id(kind), name) for name in missing}
    return read


def restore(changed: Iterable[Change]) -> None:
    """Undo the given changes alone. The items of a tuple are undone with the tuple; new items of a
    list are taken off its end, before removed items are put back there."""
    changes = list(changed)
    came = [change for change in changes if change.before is MISSING]
    rest = [change for change in changes if change.before is not MISSING]
    for change in (*reversed(came), *rest):
        inside = isinstance(change.slot.holder, tuple)
        if not inside and is_same(change.after, change.slot.read()):
            change.slot.write(change.before)
