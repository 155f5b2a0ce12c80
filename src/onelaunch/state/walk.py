"""What a callable reaches behind its arguments: parameters, attributes, closures, globals.

A graph reads memory by address and repeats the branches that Python took, so everything that led it
there is part of what must be unchanged. `walk` finds the places (slots) that the callable was seen
to touch, and what they hold; `guard.StateGuard` watches those that mattered.
"""

from __future__ import annotations

import enum
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.call.tree import Constant, is_plain
from onelaunch.frames.members import names_read
from onelaunch.frames.origins import is_installed
from onelaunch.frames.peek import attributes_of
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
from onelaunch.state.slots import (
    MISSING,
    Slot,
    code_of,
    gradient_of,
    has_gradient,
    is_same_method,
    read_hooks,
    read_last_hooks,
)


@dataclass(slots=True)
class StateWalk:
    """Every slot that a callable touches, with what it held."""

    contents: Contents
    held: dict[tuple[int, object], tuple[Slot, object]] = field(
        default_factory=dict[tuple[int, object], tuple[Slot, object]]
    )
    uses: dict[tuple[int, object], Use] = field(default_factory=dict[tuple[int, object], Use])
    """What becomes of what a slot holds, of those that were touched."""
    by_key: set[int] = field(default_factory=set[int])
    """ids of dicts of which only known items were touched."""
    owners: list[object] = field(default_factory=list[object])
    """Modules, and objects with attributes."""
    classes: list[type] = field(default_factory=list[type])
    functions: list[types.FunctionType] = field(default_factory=list[types.FunctionType])
    facts: list[tuple[Callable[[Any], object], object, object]] = field(
        default_factory=list[tuple[Callable[[Any], object], object, object]]
    )
    """What decided where the walk went beside what slots hold: how it is asked, of what, and what
    it was."""

    def stands(self) -> bool:
        """Whether the same walk would find the same now, in a tenth of its time. Of a callable that
        runs a backward it is not told: its hooks may be any."""
        if torch.is_grad_enabled() and self.runs_backward():
            return False
        return (
            all(_is_same(value, slot.read()) for slot, value in self.held.values())
            and all(ask(of) == told for ask, of, told in self.facts)
            and all(len(inside) == count for inside, _, count in self.containers.values())
            and not any(u.changed() for u in self.contents.untouched.values())
        )

    @property
    def reads(self) -> Reads | None:
        """What the callable was seen to read, or None before it has run."""
        return self.contents.reads

    @property
    def containers(self) -> dict[int, tuple[Any, str, int]]:
        """id -> (container, name, length)."""
        return self.contents.containers

    def use(self, slot: Slot) -> Use | None:
        """What becomes of what a slot holds; None for one that was not touched."""
        return self.uses.get(slot.id)

    def is_read(self, slot: Slot) -> bool:
        """Whether the callable was seen to read the slot for more than to count it."""
        return self.use(slot) is Use.READ

    def is_item_read(self, slot: Slot) -> bool:
        """Whether the key of a container's slot was seen in a read."""
        found = self.reads.items if self.reads is not None else {}
        return found.get(slot.id) is Use.READ

    def runs_backward(self) -> bool:
        """Whether the callable runs a backward: as was seen, or before, as its code may."""
        if self.reads is not None:
            return self.reads.backward
        named = [names_read(fn.__code__) for fn in self.functions]
        return any("backward" in name or name == "autograd" for names in named for name in names)

    def asks(self, name: str) -> bool:
        """Whether code that ran has this name, by which it may ask tensors something. Of which
        tensors it asks is not noted."""
        codes = self.reads.codes if self.reads is not None else ()
        named = any(name in code.co_names or name in code.co_consts for code in codes)
        return self.reads is None or named

    def sized(
        self, replaced: Collection[tuple[int, object]] = ()
    ) -> Iterator[tuple[Any, frozenset[str] | None]]:
        """What must not grow or shrink: containers, and dicts of attributes, for which only the
        names given matter.

        Args:
            replaced: slots in which each call puts another object.
        """
        for owner in self.owners:
            seen = self.reads.expected(owner) if self.reads is not None else None
            names = frozenset(seen.names) if seen is not None else frozenset[str]()
            for attributes in dicts_of(owner):
                own = not isinstance(owner, nn.Module) or attributes is owner.__dict__
                if own and seen is not None and seen.opaque:  # `f(**vars(owner))`
                    yield attributes, None
                elif names or not own:
                    yield attributes, names if own else None
        for kind in self.classes:
            names = self.contents.names_of(kind)
            if names and not is_library_class(kind):  # which may get what it had of another
                yield members_of(kind), frozenset(names)
        for slot, value in self.held.values():
            stays = slot.id not in replaced and not is_replaced(slot, replaced)
            if id(value) in self.containers and self.is_read(slot) and stays:
                yield value, None

    def ways(self, owners: Iterable[object]) -> Iterator[tuple[Slot, object]]:
        """What leads to the attributes of `owners`: their dicts, their classes, and code.

        Other tools replace these: `module._modules = ...`, or a notebook that reloads a function
        in place.
        """
        for owner in owners:
            if isinstance(owner, type):
                continue
            name = type(owner).__qualname__
            yield Slot("of", owner, type, f"the class of a `{name}`", owner), type(owner)
            attributes = attributes_of(owner)
            if attributes is None:
                continue
            # A thread-local object has a dict for each thread.
            how = "of" if type(owner).__dictoffset__ else "contents"
            yield Slot(how, owner, vars, f"`__dict__` of a `{name}`", owner), attributes
            for kind in MODULE_DICTS if isinstance(owner, nn.Module) else ():
                entries = attributes.get(kind)
                if entries:
                    yield Slot("item", attributes, kind, f"`{kind}` of a `{name}`", owner), entries
        ran = self.reads.codes if self.reads is not None else ()
        for fn in self.functions:
            if fn.__code__ in ran and not is_installed(fn.__code__.co_filename):
                yield Slot("of", fn, code_of, f"the code of `{fn.__qualname__}`", None), fn.__code__

    def touched(self) -> Iterator[object]:
        """The objects of which something was read."""
        if self.reads is not None:
            for owner in self.owners:
                seen = self.reads.of(owner)
                if seen is not None and seen.names and not isinstance(owner, types.ModuleType):
                    yield owner

    def tensors(self) -> Iterator[tuple[Slot, Tensor]]:
        """The slots that hold tensors."""
        for slot, value in self.held.values():
            if isinstance(value, Tensor):
                yield slot, value


_LEAVES = frozenset({bool, int, float, str, type(None)})
"""Types of most values that a walk meets, which lead nowhere."""
Queue = deque[tuple[str, object, Slot | None]]


@no_collection()
def walk(
    roots: Iterable[tuple[str, object]], reads: Reads | None = None, known: Reads | None = None
) -> StateWalk:
    """Find what the callable touches. Costs a few microseconds for each object visited.

    Args:
        roots: (name, object) pairs: the callable, and arguments compared by identity.
        reads: what the callable was seen to read. Without it, before it has run, all that the roots
            lead to is found.
        known: which of these objects are looked at that nothing leads to, in place of all.
    """
    found = StateWalk(Contents(reads))
    # Breadth first, so that names are short, and without recursion, so that chains may be long.
    queue: Queue = deque((n, value, None) for n, value in roots)
    seen: set[int] = set()
    _visit_all(found, queue, seen)
    if reads is not None:
        for namespace, names in reads.globals.values():
            for slot, use in found.contents.of_globals(namespace, names):
                _hold(found, slot, use, queue)
        _visit_all(found, queue, seen)
        for value in (known or reads).living():
            if id(value) not in seen:
                name = value.__qualname__ if isinstance(value, type) else _named(value)
                queue.append((name, value, None))
                _visit_all(found, queue, seen)
    if torch.is_grad_enabled() and found.runs_backward():
        while _hooked(found, queue, seen):
            _visit_all(found, queue, seen)
    return found


def _visit_all(found: StateWalk, queue: Queue, seen: set[int]) -> None:
    while queue:
        name, value, via = queue.popleft()
        plain = is_plain(value) and not isinstance(value, enum.Enum)  # whose members may have more
        if id(value) not in seen and not plain:
            seen.add(id(value))
            _visit(found, queue, name, value, via)


def _visit(found: StateWalk, queue: Queue, name: str, value: object, via: Slot | None) -> None:
    """Hold what one object holds, and go on to what was read of it."""
    if type(value) is OrderedDict and not value and _is_bare(found, value):  # hooks, mostly
        found.contents.containers[id(value)] = (value, name, 0)
        return
    if isinstance(value, types.FunctionType):
        found.functions.append(value)
        found.facts += ((code_of, value, value.__code__), (len, vars(value), len(vars(value))))
    elif isinstance(value, type):
        found.classes.append(value)
        members = members_of(value)
        found.facts += ((len, members, len(members)), (type.mro, value, type.mro(value)))
    else:
        dicts = dicts_of(value)
        if dicts or (found.reads is not None and found.reads.of(value) is not None):
            found.owners.append(value)
            found.facts.append((type, value, type(value)))
            found.facts += ((len, attributes, len(attributes)) for attributes in dicts)
    led = Use.READ if via is None else found.uses.get(via.id, Use.READ)
    for slot, use in found.contents.of(name, value, via, led):
        if via is not None and slot.via is None:
            slot = Slot(*slot[:5], via)  # `_replace` takes three times as long
        _hold(found, slot, use, queue)
    queue.extend(
        (inner_name, inner, via) for inner_name, inner in found.contents.code_of(name, value)
    )


def _is_bare(found: StateWalk, container: object) -> bool:
    """Whether nothing but its items is known or read of a container."""
    read = found.reads is not None and found.reads.of(container) is not None
    return not (read or attributes_of(container))


def _hold(found: StateWalk, slot: Slot, use: Use | None, queue: Queue) -> None:
    content = slot.read()
    tensor = isinstance(content, Tensor)
    if tensor and content.is_leaf:
        if content.grad is not None:
            gradient = Slot("contents", content, gradient_of, f"{slot.name}.grad", None, slot)
            found.held[gradient.id] = (gradient, content.grad)
        found.facts.append((has_gradient, content, content.grad is not None))
    if content is MISSING and (use is None or found.reads is None):
        return
    key = slot.id
    found.held[key] = (slot, content)
    if use is Use.ITEMS and not isinstance(content, dict):
        use = Use.READ  # the last item of a list is another when it has grown
    if use is Use.ITEMS:
        found.by_key.add(id(content))
    elif use is Use.READ and id(content) in found.by_key:  # reached by another way too
        found.by_key.discard(id(content))
        items = [found.held.get((id(content), item)) for item in cast(dict[Any, Any], content)]
        for item, _ in filter(None, items):
            _hold(found, item, Use.READ, queue)
    if use is not None:
        found.uses[key] = max(use, found.uses.get(key, use))
        if not tensor and type(content) not in _LEAVES:
            queue.append((slot.name, content, slot))


def _hooked(found: StateWalk, queue: Queue, seen: set[int]) -> bool:
    """Move the hooks of leaves to `queue`, where a backward inside runs them."""
    for slot, t in found.tensors():
        for hooks in (read_hooks(t), read_last_hooks(t)) if t.requires_grad else ():
            new = [h for h in (hooks or {}).values() if id(h) not in seen]
            queue.extend((f"a hook of {slot.name}", hook, None) for hook in new)
    return bool(queue)


def _named(value: object) -> str:
    name = type(value).__name__
    return f"a `{name}`"


class Change(NamedTuple):
    """A slot whose content the callable replaced."""

    slot: Slot
    before: object
    after: object


def changes(before: StateWalk, after: StateWalk) -> list[Change]:
    """What differs between two walks of the same roots."""
    found: list[Change] = []
    for key, (slot, value) in after.held.items():
        old = before.held.get(key, (slot, MISSING))[1]
        if not _is_same(old, value):
            found.append(Change(slot, old, value))
    for key, (slot, value) in before.held.items():
        if key not in after.held and slot.read() is MISSING:
            found.append(Change(slot, value, MISSING))
    for key, attributes in after.contents.untouched.items():
        known = before.contents.untouched.get(key)
        found += _changed(attributes, {} if known is None else known.values)
    return found


def _changed(attributes: Untouched, old: dict[str, object]) -> Iterator[Change]:
    """Those that the callable has changed though nobody saw it touch them."""
    new = attributes.values
    if len(old) == len(new) and all(map(operator.is_, old.values(), new.values())):
        return  # in the same order
    for key in {**old, **new}:
        slot = attributes.slot(key)
        then, now = old.get(key, MISSING), slot.read()
        if not _is_same(then, now):
            yield Change(slot, then, now)


def _is_same(old: object, value: object) -> bool:
    """Whether a slot holds what it did: what an array holds is other bytes at each look."""
    if old is value:
        return True
    return (is_plain(old) and Constant(old).matches(value)) or is_same_method(old, value)


def reads_more(
    roots: Iterable[tuple[str, object]],
    reads: Reads | None,
    before: StateWalk,
    found: Iterable[Change],
) -> bool:
    """Whether a run read what no run before it did, of what it did not make itself.

    Args:
        reads: what is known after it.
        before: the state before it, as far as it was known to be read.
        found: what it changed of that.
    """
    if reads is None or reads is before.reads:
        return False
    containers = {id(content) for _, content in before.held.values()}
    if before.reads is not None and not reads.exceeds(before.reads, containers):
        return False
    now = walk(roots, reads, before.reads)
    replaced = {c.slot.id for c in found if c.before is not MISSING}  # what came new stays
    return any(
        use > before.uses.get(key, Use.NONE)
        and key not in replaced
        and not is_replaced(now.held[key][0], replaced)
        for key, use in now.uses.items()
    )


def restore(found: Iterable[Change]) -> None:
    """Undo changes, as after a capture that failed. What came in a tuple goes with it."""
    for change in found:
        inside = isinstance(change.slot.holder, tuple)
        if not inside and _is_same(change.after, change.slot.read()):
            change.slot.write(change.before)


def is_replaced(slot: Slot, replaced: Collection[tuple[int, object]]) -> bool:
    """Whether another object takes, at each call, the place of one that led to this slot."""
    way = slot.via
    while way is not None:
        if way.id in replaced:
            return True
        way = way.via
    return False


def is_state(value: object) -> bool:
    """Whether a change of this value could change what the callable computes."""
    return isinstance(value, Tensor | nn.Module | torch.Generator) or is_plain(value)
