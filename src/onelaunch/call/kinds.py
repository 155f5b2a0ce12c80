"""The classes of the objects among a call's arguments: taken apart, or kept whole."""

from __future__ import annotations

import dataclasses
import types

from onelaunch.call.containers import BY_ATTRIBUTES, Names, is_ordinary
from onelaunch.call.tree import Constant, Container, Flat, Leaf, Tree, leaf_numbers


def kinds_in(tree: Tree, within: bool = False) -> dict[type, bool]:
    """Return the `objects` that `flatten` was given for a tree: True for flattened classes, False
    for dataclasses, namespaces and registered classes that are kept whole. Objects with tensors
    inside of flattened objects are left out, as they are flattened in any case. `within`: True for
    a part of a flattened object."""
    kinds: dict[type, bool] = {}
    if isinstance(tree, Constant) and not within:
        kind: type = type(tree.value)
        by_fields = dataclasses.is_dataclass(kind) or kind in BY_ATTRIBUTES
        if tree.by_identity and (by_fields or kind is types.SimpleNamespace):
            kinds[kind] = False
    elif isinstance(tree, Container):
        is_object = isinstance(tree.keys, Names)
        if is_object and not (within and any(True for _ in leaf_numbers(tree))):
            kinds[tree.kind] = True
        for child in tree.children:
            kinds |= kinds_in(child, within or is_object)
    return kinds


def changed_kinds(before: Flat, after: Flat) -> dict[type, bool]:
    """Return the classes of the arguments that a call changed, as `kinds_in` does: True for
    flattened objects, False for dataclasses where only plain values changed."""
    changed: dict[type, bool] = {}
    _same(before, before.tree, after, after.tree, changed)
    return changed


# A closure that calls itself would keep the arguments until the next collection.
def _same(before: Flat, old: Tree, after: Flat, new: Tree, kinds: dict[type, bool]) -> bool:
    """Return whether a part of the arguments is the same; else add its classes to `kinds`."""
    if isinstance(old, Leaf) and isinstance(new, Leaf):
        return before.tensors[old.index] is after.tensors[new.index]
    if not (isinstance(old, Container) and isinstance(new, Container)):
        return old == new
    alike = (old.kind, old.keys) == (new.kind, new.keys)
    alike = alike and len(old.children) == len(new.children)
    pairs = list(zip(old.children, new.children, strict=True)) if alike else []
    moved = [(a, b) for a, b in pairs if not _same(before, a, after, b, kinds)]
    if alike and not moved:
        return True
    if isinstance(old.keys, Names):
        kinds[old.kind] = True
    elif (
        dataclasses.is_dataclass(old.kind)
        and is_ordinary(old.kind)
        and all(isinstance(t, Constant) for pair in moved for t in pair)
    ):
        kinds[old.kind] = False
    return False
