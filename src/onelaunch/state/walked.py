"""The state that a walk found."""

from __future__ import annotations

import itertools
import operator
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from onelaunch.call.tree import Constant, is_plain
from onelaunch.call.wrappers import is_memory
from onelaunch.frames.codes import MODULE_DICTS, names_read
from onelaunch.frames.origins import is_installed
from onelaunch.frames.peek import attributes_of
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.identity import id
from onelaunch.state.attributes import Attributes
from onelaunch.state.contents import (
    LEAVES,
    Contents,
    dicts_of,
    is_library_class,
    members_of,
)
from onelaunch.state.slots import (
    MISSING,
    Slot,
    class_of,
    code_of,
    gradient_of,
    is_leaf,
    is_same_method,
    new_slot,
    read_gradient,
)


class _Weak(weakref.ref[Tensor]):
    """A weak reference to a tensor, in the place of the tensor."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class StateWalk:
    """The slots that a callable touches, with their contents at the time of the walk."""

    contents: Contents
    slots: dict[tuple[int, object], tuple[Slot, object]] = field(default_factory=dict)
    """id -> (slot, content), without those of `leaf_attributes`."""
    used: dict[tuple[int, object], Use] = field(default_factory=dict)
    """id of a touched slot -> the use of its content, without those of `leaf_attributes`."""
    by_key: set[int] = field(default_factory=set)
    """ids of dicts that were read by known keys alone."""
    owners: list[object] = field(default_factory=list)
    """Modules, and objects with attributes."""
    classes: list[type] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    kinds: list[type] = field(default_factory=list)
    """The classes of the owners."""
    dicts: list[list[dict[str, Any]]] = field(default_factory=list)
    """The dicts of the owners' attributes; see `dicts_of`."""
    sizes: list[tuple[Any, int]] = field(default_factory=list)
    """(dict of attributes, its length) of owners, classes and functions."""
    leaves: list[tuple[Tensor, bool]] = field(default_factory=list)
    """(leaf, whether it has a gradient)."""
    facts: list[tuple[Callable[[Any], object], object, object]] = field(default_factory=list)
    """(reader, object, value) for further facts that the course of the walk depends on."""
    unset: list[Slot] = field(default_factory=list)
    """Names in `__slots__` that no code was seen to touch and that have no value."""
    empty: list[Any] = field(default_factory=list)
    """Empty containers of the interpreter's classes that no slot of the walk has."""
    hooks: list[Any] = field(default_factory=list)
    """The empty dicts of hooks among the leaf attributes."""
    strays: bool = False
    """True if the walk visited a user's object that no slot leads to: it may be gone soon."""
    tensor_slots: dict[tuple[int, object], None] = field(default_factory=dict)
    """ids of the slots that hold tensors, in order."""
    tensor_attributes: list[tuple[int, object]] = field(default_factory=list)
    """ids of the slots that are attributes of tensors."""
    _tensors: list[tuple[Slot, Tensor]] | None = None
    """See `tensors`, which a capture asks a dozen times."""
    _by_class: dict[type, list[int]] | None = None
    """class -> numbers of the slots that hold its instances."""
    noted: Mapping[object, object] | None = None
    """id of a slot -> its content, for a `Ledger`; without leaf attributes."""
    _entries: tuple[list[dict[str, object]], list[str], list[object]] | None = None
    """(dicts, keys, contents) of attributes without slots, and of the dicts of modules."""
    weak: dict[tuple[int, object], tuple[Slot, _Weak]] | None = None
    """id of a slot -> its tensor, without gradients, once `let_go` succeeded."""

    @property
    def leaf_attributes(self) -> dict[int, Attributes]:
        """id of a module's `__dict__` -> its attributes that are read and lead nowhere."""
        return self.contents.leaf_attributes

    @property
    def all_slots(self) -> dict[tuple[int, object], tuple[Slot, object]]:
        """id -> (slot, content) of all slots. `slots` is all that most code has to look at."""
        self.expand()
        return self.slots

    @property
    def uses(self) -> dict[tuple[int, object], Use]:
        """id of a touched slot -> the use of its content."""
        self.expand()
        return self.used

    def expand(self) -> None:
        """Make the slots of leaf attributes, as where a run has changed one."""
        slots, used, containers = self.slots, self.used, self.contents.containers
        for attributes in self.leaf_attributes.values():
            for slot, value in attributes.slots():
                slots[slot.id], used[slot.id] = (slot, value), Use.READ
                if type(value) is OrderedDict:
                    containers.setdefault(id(value), (value, slot.name, 0))
                for index, item in enumerate(value) if type(value) is tuple else ():  # pyright: ignore
                    part = Slot("item", value, index, f"{slot.name}[{index}]", None, slot)
                    slots.setdefault(part.id, (part, item))
                    used.setdefault(part.id, Use.READ)
        if self.leaf_attributes:
            self.leaf_attributes.clear()
            self.hooks.clear()
            self._by_class = self.noted = None
        self._entries = None  # they refer to what a run may have dropped

    def is_leaf_attribute(self, key: tuple[int, object]) -> bool:
        """Return whether the slot with this id is one of a leaf attribute."""
        attributes = self.leaf_attributes.get(key[0])
        return attributes is not None and key[1] in attributes.values

    def ids(self) -> set[int]:
        """Return the ids of the contents of all slots, except plain values of modules."""
        held = {id(content) for _, content in self.slots.values()}
        values = (v for a in self.leaf_attributes.values() for v in a.values.values())
        return held.union([id(v) for v in values if type(v) not in LEAVES])

    def is_current(self) -> bool:
        """Return whether a new walk would find the same, in a tenth of its time. False for a
        callable that runs a backward, whose hooks may have changed."""
        if torch.is_grad_enabled() and self.runs_backward():
            return False
        leaves = self.leaves
        return (
            all(map(operator.is_, map(type, self.owners), self.kinds))
            and not any(self.hooks)
            and [len(inside) for inside, _ in self.sizes] == [count for _, count in self.sizes]
            and all(len(inside) == count for inside, _, count in self.contents.containers.values())
            and [read_gradient(t) is not None for t, _ in leaves] == [had for _, had in leaves]
            and all(read(value) == then for read, value, then in self.facts)
            and all(map(_has_dicts, self.owners, self.dicts))
            and self._has_entries()
            and _are_unchanged(self.slots.values())
        )

    def _has_entries(self) -> bool:
        """Return whether attributes without slots, and the dicts of modules, are as they were."""
        if self._entries is None:
            entries = [*self.leaf_attributes.values(), *self.contents.untouched.values()]
            pairs: list[tuple[dict[str, Any], Any]] = [(a.holder, a.values) for a in entries]
            modules = (d for o, d in zip(self.owners, self.dicts, strict=True) if _is_whole(o, d))
            pairs += [(own, dict(zip(MODULE_DICTS, d, strict=True))) for own, *d in modules]
            each = itertools.chain.from_iterable
            inside = [values for _, values in pairs]
            self._entries = (
                list(each(map(itertools.repeat, (own for own, _ in pairs), map(len, inside)))),
                list(each(inside)),
                list(each(map(dict[str, Any].values, inside))),
            )
        holders, keys, contents = self._entries
        now = list(map(dict.get, holders, keys, itertools.repeat(MISSING)))
        return all(map(operator.is_, contents, now)) or all(map(is_same, contents, now))

    def let_go(self) -> bool:
        """Hold tensors weakly until `hold`, and gradients not at all. Return False, and do nothing,
        if that is impossible: a tensor is made of others, or has an attribute that is an object."""
        held = self.slots
        on_tensors = [(key, held[key]) for key in self.tensor_attributes if key in held]
        plain = all(value is MISSING or type(value) in LEAVES for _, (_, value) in on_tensors)
        if not plain or any(isinstance(o, Tensor) and not is_memory(o) for o in self.owners):
            return False
        for key, (slot, value) in on_tensors:
            held[key] = slot._replace(owner=_Weak(slot.owner)), value
        if self.weak is None:
            pairs = {key: held[key] for key in self.tensor_slots}
            kept = {key: (s, t) for key, (s, t) in pairs.items() if s.key is not gradient_of}
            self.weak = {key: (slot, _Weak(cast(Tensor, t))) for key, (slot, t) in kept.items()}
        for key in self.tensor_slots.keys() - self.weak.keys():
            del held[key], self.tensor_slots[key]
            self._by_class = self.noted = None
        held.update(self.weak)
        self.owners[:] = [_Weak(o) if isinstance(o, Tensor) else o for o in self.owners]
        self.leaves.clear()
        self._tensors = None
        return True

    def hold(self) -> bool:
        """Hold the tensors again, and their gradients now. Return False if a tensor is gone."""
        held, count = self.slots, len(self.slots)
        self.owners[:] = [o() if type(o) is _Weak else o for o in self.owners]
        for key in self.tensor_attributes:
            slot, value = held[key]
            held[key] = slot._replace(owner=slot.owner()), value
        assert self.weak is not None
        for key, (slot, reference) in self.weak.items():
            t = reference()
            if t is None:
                return False
            held[key] = slot, t
            self.add_leaf(slot, t)
        if len(held) > count:  # each gradient comes before the slot of its leaf
            order = (((id(v), gradient_of), key) for key, (_, v) in held.items())
            self.slots = {key: held[key] for pair in order for key in pair if key in held}
            self.tensor_slots = dict.fromkeys(key for key in self.slots if key in self.tensor_slots)
            self._by_class = self.noted = None
        self._tensors = None
        return not any(owner is None for owner in self.owners)

    def add_leaf(self, slot: Slot, t: Tensor) -> tuple[Slot, Tensor] | None:
        """Note a tensor in a slot, if it is a leaf. Note its gradient, too, and return it."""
        if not is_leaf(t):
            return None
        grad = read_gradient(t)
        self.leaves.append((t, grad is not None))
        if grad is None:
            return None
        gradient = Slot("contents", t, gradient_of, f"{slot.name}.grad", None, slot)
        self.slots[gradient.id] = (gradient, grad)
        self.tensor_slots[gradient.id] = None
        return gradient, grad

    @property
    def reads(self) -> Reads | None:
        """Reads of the callable, or None before it has run."""
        return self.contents.reads

    @property
    def containers(self) -> dict[int, tuple[Any, str, int]]:
        """id -> (container, name, length)."""
        self.expand()
        return self.contents.containers

    def filled_sets(self) -> dict[int, str]:
        """Return id -> name of the sets that were not empty."""
        containers = self.contents.containers.items()
        return {key: name for key, (c, name, count) in containers if count and isinstance(c, set)}

    def use(self, slot: Slot) -> Use | None:
        """Return the use of a slot's content; None for a slot that was not touched."""
        key = slot.id
        used = self.used.get(key)
        if used is None and self.leaf_attributes:
            used = self.uses.get(key)
        if used is not None or key in self.slots or slot.owner is None or self.reads is None:
            return used
        # An attribute that the object did not have, and its class had, is in no slot of the walk.
        seen = self.reads.expected(slot.owner) if slot.kind == "item" else None
        use = None if seen is None else seen.names.get(cast(str, slot.key))
        return Use.READ if use is Use.MIXED else use

    def is_read(self, slot: Slot) -> bool:
        """Return whether the callable reads the slot, beyond a store or a count."""
        return self.use(slot) is Use.READ

    def runs_backward(self) -> bool:
        """Return whether the callable ran a backward; before it has run, whether its code may."""
        if self.reads is not None:
            return self.reads.backward
        named = set[str]().union(*(names_read(fn.__code__) for fn in self.functions))
        named.discard("save_for_backward")  # a custom function's forward
        return any("backward" in name or name == "autograd" for name in named)

    def asks(self, name: str) -> bool:
        """Return whether code that ran names an attribute; tensors' reads are not noted singly."""
        codes = self.reads.codes if self.reads is not None else ()
        named = any(name in code.co_names or name in code.co_consts for code in codes)
        return self.reads is None or named

    def sized(
        self, replaced: Collection[tuple[int, object]] = ()
    ) -> Iterator[tuple[Any, frozenset[str] | None]]:
        """Return containers that must not grow or shrink, each with None, and dicts of attributes,
        each with the names that must not come or go; no dicts of `hooks`.

        Args:
            replaced: slots in which each call puts another object.
        """
        for owner, dicts in zip(self.owners, self.dicts, strict=True):
            seen = self.reads.expected(owner) if self.reads is not None else None
            names = frozenset(seen.names) if seen is not None else frozenset[str]()
            if self.contents.loose and not is_library_class(type(owner)):
                names |= self.contents.loose
            for attributes in () if isinstance(owner, threading.local) else dicts:
                own = not isinstance(owner, nn.Module) or attributes is owner.__dict__
                if own and seen is not None and (seen.opaque or seen.asked):  # `f(**vars(owner))`
                    yield attributes, None
                elif names or not own:
                    yield attributes, names if own else None
        for kind in self.classes:
            if self.contents.is_open(kind):
                yield members_of(kind), None
            names = {*self.contents.names_of(kind), *self.contents.loose}
            if names and not is_library_class(kind):  # it may get an attribute that a base had
                yield members_of(kind), frozenset({*names, "__getattr__", "__getattribute__"})
        containers, used, read = self.contents.containers, self.used, Use.READ
        others = (Tensor, nn.Module)
        for slot, value in self.holding(lambda k: k not in LEAVES and not issubclass(k, others)):
            key = slot.id
            if id(value) not in containers or used.get(key) is not read:
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
            yield (
                new_slot(("of", owner, vars, f"`__dict__` of a `{name}`", owner, None)),
                attributes,
            )
            for kind in MODULE_DICTS if isinstance(owner, nn.Module) else ():
                entries = attributes.get(kind)
                if entries:
                    of = f"`{kind}` of a `{name}`"
                    yield new_slot(("item", attributes, kind, of, owner, None)), entries
        ran = self.reads.codes if self.reads is not None else ()
        for fn in self.functions:
            if fn.__code__ in ran and not is_installed(fn.__code__.co_filename):
                yield Slot("of", fn, code_of, f"the code of `{fn.__qualname__}`", None), fn.__code__

    def touched(self) -> Iterator[object]:
        if self.reads is not None:
            for owner in self.owners:
                seen = self.reads.of(owner)
                if seen is not None and seen.names and not isinstance(owner, types.ModuleType):
                    yield owner

    def tensors(self) -> Sequence[tuple[Slot, Tensor]]:
        """Return the slots that hold tensors, once the walk is complete; no lazy ones."""
        if self._tensors is None:
            self._tensors = self.tensors_so_far()
        return self._tensors

    def tensors_so_far(self) -> list[tuple[Slot, Tensor]]:
        pairs = map(self.slots.__getitem__, self.tensor_slots)
        return [(slot, t) for slot, t in pairs if is_memory(t) and not is_lazy(t)]

    def holding(self, fits: Callable[[type], bool]) -> list[tuple[Slot, object]]:
        """Return the slots with contents of the classes that fit, in order; no leaf attributes."""
        if self._by_class is None:
            self._by_class = {}
            for number, (_, value) in enumerate(self.slots.values()):
                self._by_class.setdefault(type(value), []).append(number)
        groups = [numbers for kind, numbers in self._by_class.items() if fits(kind)]
        every = list(self.slots.values()) if groups else []
        return [every[number] for number in sorted(itertools.chain.from_iterable(groups))]


def _is_whole(owner: object, dicts: Sequence[dict[str, Any]]) -> bool:
    """Return whether an object is a module with all dicts."""
    return isinstance(owner, nn.Module) and len(dicts) > len(MODULE_DICTS)


def _has_dicts(owner: object, dicts: Sequence[dict[str, Any]]) -> bool:
    """Return whether an object has these dicts; of a whole module, the first alone."""
    if _is_whole(owner, dicts):
        return vars(owner) is dicts[0]
    now = dicts_of(owner)
    return len(now) == len(dicts) and all(map(operator.is_, now, dicts))


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


def is_same(old: object, value: object) -> bool:
    """Return whether a slot's content is the same. Plain values are compared, as an array's content
    is a new `bytes` at each read."""
    if old is value:
        return True
    return (is_plain(old) and Constant(old).matches(value)) or is_same_method(old, value)


def is_replaced(slot: Slot, replaced: Collection[tuple[int, object]]) -> bool:
    """Return whether each call replaces a content on the path to this slot."""
    leading = slot.via if replaced else None
    while leading is not None:
        if leading.id in replaced:
            return True
        leading = leading.via
    return False
