"""The tensors in a container that is replaced: by each call, as in `self.state = cell(x,
self.state)`, or by the caller between two calls, as the context of a step.

No call finds the container of the capture, but one that is built alike. So its tensors are inputs
by their places in whatever the slot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

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


def apart(value: object, kept: Kept | None, root: str = "") -> Flat:
    """Flatten the content of a slot.

    Args:
        kept: None if containers alone are flattened. Else objects that hold tensors are, but for
            these, which each content has.
        root: the beginning of paths.
    """
    if kept is None:
        return flatten(value, root)
    return flatten(value, root, objects=True, known=kept)


class ContainerPart:
    """A reader, and writer, of one tensor in the container that a slot holds.

    Args:
        whole: the slot of the container.
        tree: the build that the container must have.
        index: the number of the tensor among those of the container.
        kept: see `apart`.
    """

    __slots__ = ("_flat", "_read", "index", "kept", "tree", "whole")

    def __init__(self, whole: Slot, tree: Tree, index: int, kept: Kept | None = None) -> None:
        self.whole, self.tree, self.index, self.kept = whole, tree, index, kept
        self._read: Callable[[], Any] = whole.reader
        flat = isinstance(tree, Container) and tree.kind in (tuple, list)
        leaves = tree.children if flat and isinstance(tree, Container) else ()
        self._flat = len(leaves) if leaves and all(type(c) is Leaf for c in leaves) else 0
        """Number of its items, if it is a tuple or list of tensors alone; else 0."""

    def __call__(self, holder: object = None) -> object:
        every = self.all()
        return MISSING if every is None else every[self.index]

    def all(self) -> Sequence[object] | None:
        """Return all tensors of the container; None if it is built otherwise."""
        value = self._read()
        if self._flat:
            assert isinstance(self.tree, Container)
            return value if type(value) is self.tree.kind and len(value) == self._flat else None
        flat = apart(value, self.kept)
        return flat.tensors if flat.tree == self.tree else None

    def write(self, holder: object, value: object) -> None:
        """Put a container into the slot that has another tensor here."""
        flat = apart(self._read(), self.kept)
        tensors = [value if i == self.index else t for i, t in enumerate(flat.tensors)]
        self.whole.write(unflatten(flat.tree, tensors))

    def at(self, place: Callable[[Slot], Slot]) -> ContainerPart:
        """Return the same of another slot."""
        return ContainerPart(place(self.whole), self.tree, self.index, self.kept)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContainerPart) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, int]:
        return self.whole.id, self.index


class ContainerBuild(NamedTuple):
    """A reader that tells whether the container in a slot has a build, with its plain values."""

    whole: Slot
    tree: Tree
    kept: Kept | None

    def __call__(self, holder: object) -> bool:
        return apart(self.whole.read(), self.kept).tree == self.tree

    def at(self, place: Callable[[Slot], Slot]) -> ContainerBuild:
        """Return the same of another slot."""
        return self._replace(whole=place(self.whole))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContainerBuild):
            return False
        # With the build: guards of recordings are compared.
        return (self.whole.id, self.tree) == (other.whole.id, other.tree)

    def __hash__(self) -> int:
        return hash(self.whole.id)


class DictItem(NamedTuple):
    """A reader, and writer, of an item of the dict that a slot holds."""

    whole: Slot
    key: object

    def __call__(self, holder: object) -> object:
        return cast(dict[object, object], self.whole.read()).get(self.key, MISSING)

    def write(self, holder: object, value: object) -> None:
        cast(dict[object, object], self.whole.read())[self.key] = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DictItem):
            return False
        return (self.whole.id, self.key) == (other.whole.id, other.key)

    def __hash__(self) -> int:
        return hash((self.whole.id, self.key))


def item_slot(whole: Slot, item: Slot) -> Slot:
    """Return the slot of an item of whatever dict a slot holds."""
    return Slot("contents", whole.holder, DictItem(whole, item.key), item.name, None)


def build_slot(slot: Slot, container: object, kept: Kept | None = None) -> Slot:
    """Return a slot that is true while a slot holds a container that is built like this one."""
    build = ContainerBuild(slot, apart(container, kept).tree, kept)
    return Slot("contents", slot.holder, build, f"the build of `{slot.name}`", None)


def parts_of_slot(slot: Slot, value: object, kept: Kept | None = None) -> list[Slot]:
    """Return a slot for each tensor in the container that a slot holds. There are none if it holds
    what no other call can have alike: an object, or a function; see `apart` for `kept`."""
    flat = apart(value, kept, slot.name)
    if kept is None and not all(constant.is_plain for _, constant in constants(flat.tree)):
        return []
    return [
        Slot("contents", slot.holder, ContainerPart(slot, flat.tree, i, kept), path, None, slot)
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
