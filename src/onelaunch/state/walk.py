"""The state that a callable reaches: parameters, attributes, closures, globals.

A graph reads memory by address and repeats the branches that Python took, so everything that led
there must be unchanged. `walk` finds the slots that the callable was seen to touch, and their
contents; `guard.StateGuard` checks the slots that matter.
"""

from __future__ import annotations

import enum
import itertools
import operator
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.call.tree import Constant, is_plain
from onelaunch.call.wrappers import is_memory
from onelaunch.frames.members import names_read
from onelaunch.frames.origins import is_installed
from onelaunch.frames.peek import attributes_of, finds_by_key
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.gc_pause import no_collection
from onelaunch.state.contents import (
    MODULE_DICTS,
    Contents,
    Untouched,
    dicts_of,
    is_library_class,
    members_of,
)
from onelaunch.state.hooks import read_hooks, read_last_hooks
from onelaunch.state.slots import (
    MISSING,
    Slot,
    class_of,
    code_of,
    gradient_of,
    has_gradient,
    is_leaf,
    is_same_method,
    new_slot,
    thread_in,
)


class _Weak(weakref.ref[Tensor]):
    """A weak reference to a tensor, in the place of the tensor."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class StateWalk:
    """The slots that a callable touches, with their contents at the time of the walk."""

    contents: Contents
    held: dict[tuple[int, object], tuple[Slot, object]] = field(default_factory=dict)
    uses: dict[tuple[int, object], Use] = field(default_factory=dict)
    """id of a touched slot -> the use of its content."""
    by_key: set[int] = field(default_factory=set)
    """ids of dicts that were read by known keys alone."""
    owners: list[object] = field(default_factory=list)
    """Modules, and objects with attributes."""
    classes: list[type] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    kinds: list[type] = field(default_factory=list)
    """The classes of the owners."""
    sizes: list[tuple[Any, int]] = field(default_factory=list)
    """(dict of attributes, its length) of owners, classes and functions."""
    leaves: list[tuple[Tensor, bool]] = field(default_factory=list)
    """(leaf, whether it has a gradient)."""
    facts: list[tuple[Callable[[Any], object], object, object]] = field(default_factory=list)
    """(reader, object, value) for further facts that the course of the walk depends on."""
    unset: list[Slot] = field(default_factory=list)
    """Names in `__slots__` that no code was seen to touch and that have no value."""
    strays: bool = False
    """True if the walk visited a user's object that no slot leads to: it may be gone soon."""
    _of_tensors: dict[tuple[int, object], None] = field(default_factory=dict)
    """ids of the slots that hold tensors, in order."""
    _on_tensors: list[tuple[int, object]] = field(default_factory=list)
    """ids of the slots that are attributes of tensors."""
    _tensors: list[tuple[Slot, Tensor]] | None = None
    """See `tensors`, which a capture asks a dozen times."""
    _by_class: dict[type, list[int]] | None = None
    """class -> numbers of the slots that hold its instances."""

    def is_current(self) -> bool:
        """Return whether a new walk would find the same, in a tenth of its time. False for a
        callable that runs a backward, whose hooks may have changed."""
        if torch.is_grad_enabled() and self.runs_backward():
            return False
        return (
            all(map(operator.is_, map(type, self.owners), self.kinds))
            and all(len(inside) == count for inside, count in self.sizes)
            and all(len(inside) == count for inside, _, count in self.containers.values())
            and all(has_gradient(t) is had for t, had in self.leaves)
            and all(read(value) == then for read, value, then in self.facts)
            and not any(u.changed() for u in self.contents.untouched.values())
            and _are_unchanged(self.held.values())
        )

    def let_go(self) -> bool:
        """Hold tensors weakly until `hold`, and gradients not at all. Return False, and do nothing,
        if that is impossible: a tensor is made of others, or has an attribute that is an object."""
        held = self.held
        on_tensors = [(key, held[key]) for key in self._on_tensors if key in held]
        plain = all(value is MISSING or type(value) in _LEAVES for _, (_, value) in on_tensors)
        if not plain or any(isinstance(o, Tensor) and not is_memory(o) for o in self.owners):
            return False
        for key, (slot, value) in on_tensors:
            held[key] = slot._replace(owner=_Weak(slot.owner)), value
        for key in list(self._of_tensors):
            slot, value = held[key]
            if slot.key is gradient_of:
                del held[key], self._of_tensors[key]
            else:
                held[key] = slot, _Weak(value)
        self.owners[:] = [_Weak(o) if isinstance(o, Tensor) else o for o in self.owners]
        self.leaves.clear()
        self._tensors = None
        return True

    def hold(self) -> bool:
        """Hold the tensors again, and their gradients now. Return False if a tensor is gone."""
        held, count = self.held, len(self.held)
        self.owners[:] = [o() if type(o) is _Weak else o for o in self.owners]
        for key in self._on_tensors:
            slot, value = held[key]
            held[key] = slot._replace(owner=slot.owner()), value
        for key in list(self._of_tensors):
            slot, reference = held[key]
            t = cast(Any, reference)()
            if t is None:
                return False
            held[key] = slot, t
            _add_gradient(self, slot, t)
        if len(held) > count:  # each gradient comes before the slot of its leaf
            order = (((id(v), gradient_of), key) for key, (_, v) in held.items())
            self.held = {key: held[key] for pair in order for key in pair if key in held}
            self._of_tensors = dict.fromkeys(key for key in self.held if key in self._of_tensors)
            self._by_class = None
        return not any(owner is None for owner in self.owners)

    @property
    def reads(self) -> Reads | None:
        """Reads of the callable, or None before it has run."""
        return self.contents.reads

    @property
    def containers(self) -> dict[int, tuple[Any, str, int]]:
        """id -> (container, name, length)."""
        return self.contents.containers

    def use(self, slot: Slot) -> Use | None:
        """Return the use of a slot's content; None for a slot that was not touched."""
        if slot.id in self.held or slot.owner is None or self.reads is None:
            return self.uses.get(slot.id)
        # An attribute that the object did not have, and its class had, is in no slot of the walk.
        seen = self.reads.expected(slot.owner) if slot.kind == "item" else None
        return None if seen is None else seen.names.get(cast(str, slot.key))

    def is_read(self, slot: Slot) -> bool:
        """Return whether the callable reads the slot, beyond a store or a count."""
        return self.use(slot) is Use.READ

    def is_item_read(self, slot: Slot) -> bool:
        """Return whether a container's slot was read by its key."""
        found = self.reads.items if self.reads is not None else {}
        return found.get(slot.id) is Use.READ

    def runs_backward(self) -> bool:
        """Return whether the callable ran a backward; before it has run, whether its code may."""
        if self.reads is not None:
            return self.reads.backward
        named = [names_read(fn.__code__) for fn in self.functions]
        return any("backward" in name or name == "autograd" for names in named for name in names)

    def asks(self, name: str) -> bool:
        """Return whether code that ran names an attribute; tensors' reads are not noted singly."""
        codes = self.reads.codes if self.reads is not None else ()
        named = any(name in code.co_names or name in code.co_consts for code in codes)
        return self.reads is None or named

    def sized(
        self, replaced: Collection[tuple[int, object]] = ()
    ) -> Iterator[tuple[Any, frozenset[str] | None]]:
        """Return containers that must not grow or shrink, each with None, and dicts of attributes,
        each with the names that must not come or go.

        Args:
            replaced: slots in which each call puts another object.
        """
        for owner in self.owners:
            seen = self.reads.expected(owner) if self.reads is not None else None
            names = frozenset(seen.names) if seen is not None else frozenset[str]()
            for attributes in () if isinstance(owner, threading.local) else dicts_of(owner):
                own = not isinstance(owner, nn.Module) or attributes is owner.__dict__
                if own and seen is not None and (seen.opaque or seen.asked):  # `f(**vars(owner))`
                    yield attributes, None
                elif names or not own:
                    yield attributes, names if own else None
        for kind in self.classes:
            if self.contents.is_open(kind):
                yield members_of(kind), None
            names = self.contents.names_of(kind)
            if names and not is_library_class(kind):  # it may get an attribute that a base had
                yield members_of(kind), frozenset({*names, "__getattr__", "__getattribute__"})
        for key, (slot, value) in self.held.items():
            if id(value) not in self.containers or self.uses.get(key) is not Use.READ:
                continue
            if key not in replaced and not is_replaced(slot, replaced):
                yield value, None

    def paths(self, owners: Iterable[object]) -> Iterator[tuple[Slot, object]]:
        """Return the slots that lead to the attributes of `owners`: their dicts, classes, and code.

        Other tools replace these: `module._modules = ...`, or a notebook that reloads a function
        in place.
        """
        for owner in owners:
            if isinstance(owner, type):
                continue
            name = type(owner).__qualname__
            yield class_of(owner)
            attributes = attributes_of(owner)
            if attributes is None or isinstance(owner, threading.local):  # a dict for each thread
                continue
            yield Slot("of", owner, vars, f"`__dict__` of a `{name}`", owner), attributes
            for kind in MODULE_DICTS if isinstance(owner, nn.Module) else ():
                entries = attributes.get(kind)
                if entries:
                    yield Slot("item", attributes, kind, f"`{kind}` of a `{name}`", owner), entries
        ran = self.reads.codes if self.reads is not None else ()
        for fn in self.functions:
            if fn.__code__ in ran and not is_installed(fn.__code__.co_filename):
                yield Slot("of", fn, code_of, f"the code of `{fn.__qualname__}`", None), fn.__code__

    def touched(self) -> Iterator[object]:
        """Return the objects whose attributes were read."""
        if self.reads is not None:
            for owner in self.owners:
                seen = self.reads.of(owner)
                if seen is not None and seen.names and not isinstance(owner, types.ModuleType):
                    yield owner

    def tensors(self) -> Sequence[tuple[Slot, Tensor]]:
        """Return the slots that hold tensors, once the walk is complete."""
        if self._tensors is None:
            self._tensors = _tensors_in(self)
        return self._tensors

    def holding(self, fits: Callable[[type], bool]) -> list[tuple[Slot, object]]:
        """Return the slots with contents of the classes that fit, in order."""
        if self._by_class is None:
            self._by_class = {}
            for number, (_, value) in enumerate(self.held.values()):
                self._by_class.setdefault(type(value), []).append(number)
        found = [numbers for kind, numbers in self._by_class.items() if fits(kind)]
        every = list(self.held.values()) if found else []
        return [every[number] for number in sorted(itertools.chain.from_iterable(found))]


def _tensors_in(found: StateWalk) -> list[tuple[Slot, Tensor]]:
    pairs = map(found.held.__getitem__, found._of_tensors)
    return [(slot, value) for slot, value in pairs if is_memory(value)]


def _are_unchanged(held: Iterable[tuple[Slot, object]]) -> bool:
    for slot, value in held:
        holder = slot.holder
        if type(holder) is dict and slot.kind == "item":
            now = holder.get(slot.key, MISSING)
        elif type(holder) is tuple:
            continue
        else:
            now = slot.read()
        if now is not value and not is_same(value, now):
            return False
    return True


SMALL = 64
"""The most items of a container whose plain values are compared singly."""
_LEAVES = frozenset({bool, int, float, str, type(None)})
"""Types of most values that a walk meets. They have no slots."""
_OF_THREADS = frozenset({"current_thread", "get_ident", "get_native_id"})
_MOST_UNREAD = 10_000
"""The most unread slots that a capture looks at: 50 ms."""
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
    found = StateWalk(Contents(reads))
    # Breadth first, so that names are short, and without recursion, so that chains may be long.
    queue: Queue = deque((n, value, None) for n, value in roots)
    seen: set[int] = set()
    _visit_all(found, queue, seen)
    if reads is not None:
        for namespace, names in reads.globals.values():
            for slot, use in found.contents.of_globals(namespace, names):
                _add_slot(found, slot, use, queue)
        _visit_all(found, queue, seen)
        if reads.names(_OF_THREADS):
            slot = Slot("contents", threading, thread_in, "the thread", None)
            found.held[slot.id], found.uses[slot.id] = (slot, slot.read()), Use.READ
        for value in (known or reads).alive():
            # A tensor that no slot leads to is the call's or the caller's, and must not be kept.
            if id(value) not in seen and not isinstance(value, Tensor):
                name = value.__qualname__ if isinstance(value, type) else _named(value)
                queue.append((name, value, None))
                _visit_all(found, queue, seen)
                found.strays |= not (isinstance(value, type) or is_library_class(type(value)))
    if torch.is_grad_enabled() and found.runs_backward():
        while _queue_hooks(found, queue, seen):
            _visit_all(found, queue, seen)
    return found


@no_collection()
def walk_unread(found: StateWalk) -> StateWalk:
    """Find the state that code may read and change when it runs for the first time.

    It is reached by the names in functions that have not run, and behind slots that no run has
    read. Only the nearest `_MOST_UNREAD` slots are found.
    """
    unread = StateWalk(Contents(None))
    ran = found.reads.codes if found.reads is not None else ()
    new = [(fn.__qualname__, fn) for fn in found.functions if fn.__code__ not in ran]
    new += [(kind.__qualname__, kind) for kind in found.classes if not is_library_class(kind)]
    held, uses = found.held.items(), found.uses
    slots = [(s.name, v) for key, (s, v) in held if type(v) not in _LEAVES and key not in uses]
    for attributes in found.contents.untouched.values():
        slots += [(f"{attributes.name}{key}", v) for key, v in attributes.values.items()]
    seen = {*map(id, (*found.owners, *found.classes, *found.functions)), *found.containers}
    queue: Queue = deque((name, value, None) for name, value in (*new, *slots))
    _visit_all(unread, queue, seen.difference(id(value) for _, value in new), _MOST_UNREAD)
    return unread


def _visit_all(found: StateWalk, queue: Queue, seen: set[int], most: int | None = None) -> None:
    while queue and (most is None or len(found.held) < most):
        name, value, via = queue.popleft()
        if id(value) in seen or type(value) in _LEAVES:
            continue
        if type(value) is OrderedDict and not value and _is_bare(found, value):  # hooks, mostly
            seen.add(id(value))
            found.contents.containers[id(value)] = (value, name, 0)
            continue
        plain = is_plain(value) and not isinstance(value, enum.Enum)  # a member may have attributes
        # Imports grow `sys.modules`; the modules that were read are known by themselves.
        if not plain and value is not sys.modules:
            seen.add(id(value))
            _visit(found, queue, name, value, via)


def _visit(found: StateWalk, queue: Queue, name: str, value: object, via: Slot | None) -> None:
    if isinstance(value, types.FunctionType):
        found.functions.append(value)
        found.facts.append((code_of, value, value.__code__))
        found.sizes.append((vars(value), len(vars(value))))
    elif isinstance(value, type):
        found.classes.append(value)
        members = members_of(value)
        found.facts.append((type.mro, value, type.mro(value)))
        found.sizes.append((members, len(members)))
    else:
        dicts = dicts_of(value)
        if dicts or (found.reads is not None and found.reads.of(value) is not None):
            found.owners.append(value)
            found.kinds.append(type(value))
            found.sizes += [(attributes, len(attributes)) for attributes in dicts]
    use_of_via = Use.READ if via is None else found.uses.get(via.id, Use.READ)
    for slot, use in found.contents.of(name, value, via, use_of_via):
        if via is not None and slot.via is None:
            slot = new_slot((*slot[:5], via))
        if isinstance(value, Tensor):
            found._on_tensors.append(slot.id)
        _add_slot(found, slot, use, queue)
    queue.extend(
        (inner_name, inner, via) for inner_name, inner in found.contents.code_of(name, value)
    )


def _is_bare(found: StateWalk, container: object) -> bool:
    """Return whether a container has no attributes, and none was read."""
    read = found.reads is not None and id(container) in found.reads.owners
    return not (read or attributes_of(container))


def _add_slot(found: StateWalk, slot: Slot, use: Use | None, queue: Queue) -> None:
    holder, place = slot.holder, slot.key
    of_dict = type(holder) is dict and slot.kind == "item"
    content = holder.get(place, MISSING) if of_dict else slot.read()
    key = (id(holder), place)
    if type(content) in _LEAVES:
        found.held[key] = (slot, content)
        if use is not None:
            _note_use(found, key, Use.READ if use is Use.ITEMS else use)
        return
    tensor = isinstance(content, Tensor)
    if tensor:
        _add_gradient(found, slot, content)
        gradient, grad = found.held.get((id(content), gradient_of), (slot, None))
        if isinstance(grad, Tensor) and found.contents.has_contents(grad):
            queue.append((gradient.name, grad, gradient))
    if content is MISSING and (use is None or found.reads is None):
        found.unset.append(slot)
        return
    found.held[key] = (slot, content)
    if tensor:
        found._of_tensors[key] = None
    if use is None:
        return
    if use is Use.ITEMS and not (isinstance(content, dict) and finds_by_key(type(content))):
        use = Use.READ  # the last item of a list is another when it has grown
    if use is Use.ITEMS:
        found.by_key.add(id(content))
    elif use is Use.READ and id(content) in found.by_key:  # reached through another slot too
        found.by_key.discard(id(content))
        items = [found.held.get((id(content), item)) for item in cast(dict[Any, Any], content)]
        for item, _ in filter(None, items):
            _add_slot(found, item, Use.READ, queue)
    _note_use(found, key, use)
    if not (tensor and is_memory(content) and not found.contents.has_contents(content)):
        queue.append((slot.name, content, slot))


def _note_use(found: StateWalk, key: tuple[int, object], use: Use) -> None:
    known = found.uses.get(key)
    if known is None or use > known:
        found.uses[key] = use


def _add_gradient(found: StateWalk, slot: Slot, t: Tensor) -> None:
    if is_leaf(t):
        if t.grad is not None:
            gradient = Slot("contents", t, gradient_of, f"{slot.name}.grad", None, slot)
            found.held[gradient.id] = (gradient, t.grad)
            found._of_tensors[gradient.id] = None
        found.leaves.append((t, t.grad is not None))


def _queue_hooks(found: StateWalk, queue: Queue, seen: set[int]) -> bool:
    """Queue the hooks of leaves, which a backward inside runs. Return whether there are any."""
    for slot, t in _tensors_in(found):
        for hooks in (read_hooks(t), read_last_hooks(t)) if t.requires_grad else ():
            new = [h for h in (hooks or {}).values() if id(h) not in seen]
            queue.extend((f"a hook of {slot.name}", hook, None) for hook in new)
    return bool(queue)


def _named(value: object) -> str:
    return f"a `{type(value).__name__}`"


class Change(NamedTuple):
    """A slot whose content the callable replaced."""

    slot: Slot
    before: object
    after: object


def changes(before: StateWalk, after: StateWalk) -> list[Change]:
    """Return the differences between two walks of the same roots."""
    found: list[Change] = []
    for key, (slot, value) in after.held.items():
        old = before.held.get(key, (slot, MISSING))[1]
        if not is_same(old, value):
            found.append(Change(slot, old, value))
    for key, (slot, value) in before.held.items():
        if key not in after.held and slot.read() is MISSING:
            found.append(Change(slot, value, MISSING))
    for key, attributes in after.contents.untouched.items():
        known = before.contents.untouched.get(key)
        found += _unseen_changes(attributes, {} if known is None else known.values)
    return found


def _unseen_changes(attributes: Untouched, old: dict[str, object]) -> Iterator[Change]:
    """Return the changes of attributes that the callable was not seen to read or store."""
    new = attributes.values
    if len(old) == len(new) and all(map(operator.is_, old.values(), new.values())):
        return  # in the same order
    for key in {**old, **new}:
        slot = attributes.slot(key)
        then, now = old.get(key, MISSING), slot.read()
        if not is_same(then, now):
            yield Change(slot, then, now)


def is_same(old: object, value: object) -> bool:
    """Return whether a slot's content is the same. Plain values are compared, as an array's content
    is a new `bytes` at each read."""
    if old is value:
        return True
    return (is_plain(old) and Constant(old).matches(value)) or is_same_method(old, value)


def reads_more(
    roots: Iterable[tuple[str, object]],
    reads: Reads | None,
    before: StateWalk,
    found: Iterable[Change],
) -> bool:
    """Return whether a run read more than the runs before it, of objects that it did not make.

    Args:
        reads: the reads after the run.
        before: the state before the run, as far as runs had read it.
        found: the run's changes to that state.
    """
    if reads is None or reads is before.reads:
        return False
    held = {id(content) for _, content in before.held.values()}
    if before.reads is not None and not reads.exceeds(before.reads, held):
        return False
    known = before.reads.items if before.reads is not None else {}
    large = {key for key, (_, _, count) in before.containers.items() if count > SMALL}
    if any(place[0] in large and use > known.get(place, -1) for place, use in reads.items.items()):
        return True  # of a small container every item counts as read
    now = walk(roots, reads, before.reads)
    replaced = {c.slot.id for c in found if c.before is not MISSING}  # new slots stay
    return any(
        use > before.uses.get(key, Use.NONE)
        and key not in replaced
        and not is_replaced(now.held[key][0], replaced)
        for key, use in now.uses.items()
    )


def restore(found: Iterable[Change]) -> None:
    """Undo the given changes alone. The items of a tuple are undone with the tuple; new items of a
    list are taken off its end, before removed items are put back there."""
    changes = list(found)
    came = [change for change in changes if change.before is MISSING]
    rest = [change for change in changes if change.before is not MISSING]
    for change in (*reversed(came), *rest):
        inside = isinstance(change.slot.holder, tuple)
        if not inside and is_same(change.after, change.slot.read()):
            change.slot.write(change.before)


def is_replaced(slot: Slot, replaced: Collection[tuple[int, object]]) -> bool:
    """Return whether each call replaces a content on the path to this slot."""
    leading = slot.via if replaced else None
    while leading is not None:
        if leading.id in replaced:
            return True
        leading = leading.via
    return False
