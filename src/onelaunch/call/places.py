"""The identity of containers and objects in results: those of the arguments, and those that are in
several places."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch.utils import _pytree as pytree

from onelaunch.call.containers import ItemKeys, Names, RecordKeys
from onelaunch.call.tree import (
    Attribute,
    Constant,
    Container,
    Same,
    Shared,
    Tree,
    is_code,
)


class Places:
    """The containers in the trees of one call, by identity, and which of them come again."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, int]] = {}  # kept alive: an id is not used again
        self._again: set[int] = set()

    def note(self, value: object) -> int:
        """Note one more place of a container, and return its number."""
        new = id(value) not in self._found
        number = self._found.setdefault(id(value), (value, len(self._found)))[1]
        if not new:
            self._again.add(number)
        return number

    def shared(self, tree: Tree) -> Tree:
        """Return a tree in which only containers in several places are marked as shared."""
        if isinstance(tree, Shared):
            inside = self.shared(tree.tree)
            assert isinstance(inside, Container)
            return Shared(tree.number, inside) if tree.number in self._again else inside
        if isinstance(tree, Container):
            return tree._replace(children=tuple(map(self.shared, tree.children)))
        return tree


def argument_objects(tree: Tree, value: object) -> dict[int, Same]:
    """Return the objects among the arguments of a call, by id.

    Args:
        tree: of ``(args, kwargs)``.
        value: both, as the callable gets them.
    """
    found: dict[int, Same] = {}
    _collect(tree, value, (), found)
    return found


def _collect(tree: Tree, value: Any, steps: tuple[object, ...], found: dict[int, Same]) -> None:
    if isinstance(tree, Constant):
        if tree.by_identity and not is_code(value):
            found[id(value)] = Same(value, None)
    elif isinstance(tree, Container) and tree.kind is not slice:
        if len(steps) > 1:  # `args` and `kwargs` themselves are made at each call
            found[id(value)] = Same(value, steps)
        for child, step in zip(tree.children, _child_steps(tree), strict=False):
            inside = getattr(value, step.name) if isinstance(step, Attribute) else value[step]
            _collect(child, inside, (*steps, step), found)


def _child_steps(tree: Container) -> Iterable[Any]:
    """Return the steps to the children of a container; none if they are not items or attributes."""
    kind, keys = tree.kind, tree.keys
    if kind is tuple or kind is list or hasattr(kind, "_fields"):
        return range(len(tree.children))
    if keys and isinstance(keys[0], pytree.NodeDef):
        return ()
    if isinstance(keys, ItemKeys):
        return [*keys.items, *map(Attribute, keys.attributes)] if kind is OrderedDict else ()
    if isinstance(keys, Names):
        return [Attribute(name) for name in keys] if all(map(str.isidentifier, keys)) else ()
    if dataclasses.is_dataclass(kind):
        names = keys.attributes if isinstance(keys, RecordKeys) else keys
        return [Attribute(name) for name in names]
    return keys if kind is dict or kind is OrderedDict else ()
