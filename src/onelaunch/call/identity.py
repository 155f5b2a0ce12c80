"""The identity of containers and objects in results: which are arguments, and which come twice."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from onelaunch.call.containers import ItemKeys, Names, RecordKeys, has_context
from onelaunch.call.tree import (
    Attribute,
    Constant,
    Container,
    Leaf,
    Same,
    Shared,
    Tree,
    build,
    is_code,
    leaf_numbers,
    unflatten,
)


class Identities:
    """The numbers of the containers in the trees of one call."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[object, int]] = {}  # kept alive: an id is not used again
        self._again: set[int] = set()

    def note(self, value: object) -> int:
        """Note a place of a container, and return the container's number."""
        new = id(value) not in self._numbers
        number = self._numbers.setdefault(id(value), (value, len(self._numbers)))[1]
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


def argument_objects(tree: Tree, value: Any, steps: tuple[object, ...] = ()) -> dict[int, Same]:
    """Return the objects among the arguments of a call, by id. `tree`: of ``(args, kwargs)``.
    `value`: both, as the callable gets them. `steps`: the path to a part."""
    if isinstance(tree, Constant):
        return {id(value): Same(value, None)} if tree.by_identity and not is_code(value) else {}
    objects: dict[int, Same] = {}
    if isinstance(tree, Container) and tree.kind is not slice:
        if len(steps) > 1:  # `args` and `kwargs` themselves are made at each call
            objects[id(value)] = Same(None, steps)  # its tensors are the capture's
        for child, step in zip(tree.children, _child_steps(tree), strict=False):
            objects |= argument_objects(child, _at(value, step), (*steps, step))
    return objects


def _at(value: Any, step: Any) -> Any:
    return getattr(value, step.name) if isinstance(step, Attribute) else value[step]


@contextmanager
def exchanged(
    tree: Tree, value: Any, leaves: Sequence[Any], changed: Collection[int]
) -> Generator[Any]:
    """Return a context with a value in which some leaves are exchanged. Its containers are the same
    and get their own leaves back at the end; containers of a registered class are copies.
    `changed`: the indices of the exchanged leaves."""
    undo: list[Callable[[], None]] = []
    try:
        yield _exchange(tree, value, leaves, changed, undo)
    finally:
        for put_back in undo:
            put_back()


def _exchange(
    tree: Tree,
    value: Any,
    leaves: Sequence[Any],
    changed: Collection[int],
    undo: list[Callable[[], None]],
) -> Any:
    tree = tree.tree if isinstance(tree, Shared) else tree
    if isinstance(tree, Leaf):
        return leaves[tree.index]
    if not isinstance(tree, Container) or not any(i in changed for i in leaf_numbers(tree)):
        return value
    steps = list(_child_steps(tree))
    if len(steps) < len(tree.children):
        return unflatten(tree, list(leaves))
    own = [_at(value, step) for step in steps]
    other = [
        _exchange(child, mine, leaves, changed, undo)
        for child, mine in zip(tree.children, own, strict=True)
    ]
    if isinstance(value, tuple):
        return build(tree, other)
    for step, mine, new in zip(steps, own, other, strict=True):
        if new is not mine:
            _put(value, step, new)
            undo.append(partial(_put_back, value, step, new, mine))
    return value


def _put(container: Any, step: Any, value: Any) -> None:
    if isinstance(step, Attribute):
        object.__setattr__(container, step.name, value)
    else:
        container[step] = value


def _put_back(container: Any, step: Any, value: Any, before: Any) -> None:
    """Put back `before`, unless `value` is gone by now."""
    try:
        part = _at(container, step)
    except (LookupError, AttributeError):
        return
    if part is value:
        _put(container, step, before)


def _child_steps(tree: Container) -> Iterable[Any]:
    """Return the steps to the children of a container; none if they are not items or attributes."""
    kind, keys = tree.kind, tree.keys
    if kind is tuple or kind is list or hasattr(kind, "_fields"):
        return range(len(tree.children))
    if has_context(keys):
        return ()
    if isinstance(keys, ItemKeys):
        return [*keys.items, *map(Attribute, keys.attributes)] if kind is OrderedDict else ()
    if isinstance(keys, Names):
        return [Attribute(name) for name in keys] if all(map(str.isidentifier, keys)) else ()
    if dataclasses.is_dataclass(kind):
        names = keys.attributes if isinstance(keys, RecordKeys) else keys
        return [Attribute(name) for name in names]
    return keys if kind is dict or kind is OrderedDict else ()
