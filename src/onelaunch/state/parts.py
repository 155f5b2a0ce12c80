"""The tensors in a container that is replaced: by each call, as in `self.state = cell(x,
self.state)`, or by the caller between two calls, as the context of a step.

No call finds the container of the capture, but one that is built alike. So its tensors are inputs
by their places in whatever the slot holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from onelaunch.call.containers import parts_of
from onelaunch.call.tree import (
    Constant,
    Container,
    Flat,
    Leaf,
    Tree,
    constants,
    flatten,
    unflatten,
)
from onelaunch.identity import id
from onelaunch.state.slots import MISSING, Slot

Kept = Mapping[int, Constant]
"""id of an object -> the object."""


def flat_content(value: object, kept: Kept | None, root: str = "") -> Flat:
    """Flatten the content of a slot.

    Args:
        kept: objects that stay whole, as each content has them. Other objects with tensors are
            flattened, too. None: only containers are flattened.
        root: the beginning of paths.
    """
    return flatten(value, root, objects=kept is not None, whole=kept or {})


class SlotPart:
    """A reader of something in whatever a slot holds.

    Args:
        whole: the slot.
        what: tells it from other readers of its class.
        kept: see `flat_content`.
    """

    __slots__ = ("_read", "kept", "what", "whole")

    def __init__(self, whole: Slot, what: Any, kept: Kept | None = None) -> None:
        self.whole, self.what, self.kept = whole, what, kept
        self._read: Callable[[], Any] = whole.reader

    def at(self, place: Callable[[Slot], Slot]) -> SlotPart:
        part = copy.copy(self)
        SlotPart.__init__(part, place(self.whole), self.what, self.kept)
        return part

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SlotPart) or type(other) is not type(self):
            return False
        return (self.whole.id, self.what) == (other.whole.id, other.what)

    def __hash__(self) -> int:
        return hash((self.whole.id, self.what))


class ContainerPart(SlotPart):
    """A reader, and writer, of one tensor in the container that a slot holds.

    Args:
        what: the number of the tensor among those of the container.
        tree: the build that the container must have.
    """

    __slots__ = ("_flat", "tree")

    def __init__(self, whole: Slot, what: int, kept: Kept | None, tree: Tree) -> None:
        super().__init__(whole, what, kept)
        self.tree = tree
        flat = isinstance(tree, Container) and tree.kind in (tuple, list)
        leaves = tree.children if flat and isinstance(tree, Container) else ()
        self._flat = len(leaves) if leaves and all(type(c) is Leaf for c in leaves) else 0
        """Number of its items, if it is a tuple or list of tensors alone; else 0."""

    def __call__(self, holder: object = None) -> object:
        every = self.all()
        return MISSING if every is None else every[self.what]

    def all(self) -> Sequence[object] | None:
        """Return all tensors of the container; None if it is built otherwise."""
        value = self._read()
        if self._flat:
            assert isinstance(self.tree, Container)
            return value if type(value) is self.tree.kind and len(value) == self._flat else None
        flat = flat_content(value, self.kept)
        return flat.tensors if flat.tree == self.tree else None

    def write(self, holder: object, value: object) -> None:
        """Put a container into the slot that has another tensor here."""
        flat = flat_content(self._read(), self.kept)
        tensors = [value if i == self.what else t for i, t in enumerate(flat.tensors)]
        self.whole.write(unflatten(flat.tree, tensors))


class ContainerBuild(SlotPart):
    """A reader that tells whether the container in a slot has a build, `what`: its tree, with its
    plain values."""

    __slots__ = ()

    def __call__(self, holder: object) -> bool:
        return flat_content(self._read(), self.kept).tree == self.what

    def __hash__(self) -> int:
        return hash(self.whole.id)  # a tree's takes long


class DictItem(SlotPart):
    """A reader, and writer, of an item of the dict that a slot holds. `what`: its key."""

    __slots__ = ()

    def __call__(self, holder: object) -> object:
        return self._read().get(self.what, MISSING)

    def write(self, holder: object, value: object) -> None:
        self._read()[self.what] = value


def item_slot(whole: Slot, item: Slot) -> Slot:
    """Return the slot of an item of whatever dict a slot holds."""
    return Slot("contents", whole.holder, DictItem(whole, item.key), item.name, None)


def build_slot(slot: Slot, container: object, kept: Kept | None = None) -> Slot:
    """Return a slot that is true while a slot holds a container that is built like this one."""
    build = ContainerBuild(slot, flat_content(container, kept).tree, kept)
    return Slot("contents", slot.holder, build, f"the build of `{slot.name}`", None)


def parts_of_slot(slot: Slot, value: object, kept: Kept | None = None) -> list[Slot]:
    """Return a slot for each tensor in the container that a slot holds. There are none if it holds
    what no other call can have alike: an object, or a function; see `flat_content` for `kept`."""
    flat = flat_content(value, kept, slot.name)
    if kept is None and not all(constant.is_plain for _, constant in constants(flat.tree)):
        return []
    return [
        Slot("contents", slot.holder, ContainerPart(slot, i, kept, flat.tree), path, None, slot)
        for i, path in enumerate(flat.paths)
    ]


def is_written(container: object, written: Collection[int]) -> bool:
    """Return whether the run stored to a container itself, or to one in it.

    Args:
        written: ids of the objects that the run stored to.
    """
    parts = parts_of(container)
    if parts is None:
        return False
    own = {id(container), id(getattr(container, "__dict__", None))}
    return not own.isdisjoint(written) or any(is_written(part, written) for part in parts[1])


def whole_of(slot: Slot) -> Slot:
    """Return the slot of the container that a slot is a part of; else the slot itself."""
    return slot.key.whole if isinstance(slot.key, ContainerPart) else slot
