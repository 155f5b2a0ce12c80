"""The classes of the objects among a call's arguments: taken apart, or kept whole."""

from __future__ import annotations

import dataclasses

from onelaunch.call.containers import BY_ATTRIBUTES, Names, is_ordinary
from onelaunch.call.tree import Constant, Container, Flat, Leaf, Tree


def kinds_in(tree: Tree) -> dict[type, bool]:
    """Return the classes of a tree's objects, as `flatten` takes them: True for those that are
    flattened, without the classes inside them, and False for those that are kept whole though they
    are dataclasses or registered."""
    if isinstance(tree, Constant):
        kind: type = type(tree.value)
        known = dataclasses.is_dataclass(kind) or kind in BY_ATTRIBUTES
        return {kind: False} if tree.by_identity and known else {}
    if not isinstance(tree, Container):
        return {}
    if isinstance(tree.keys, Names):
        return {tree.kind: True}
    return {kind: apart for child in tree.children for kind, apart in kinds_in(child).items()}


def changed_kinds(before: Flat, after: Flat) -> dict[type, bool]:
    """Return the classes of the arguments that a call changed, in the form of `kinds_in`: objects
    that are flattened, and dataclasses of which only plain values changed.

    Args:
        before: the arguments.
        after: the same, after the call.
    """
    found: dict[type, bool] = {}

    def same(old: Tree, new: Tree) -> bool:
        if isinstance(old, Leaf) and isinstance(new, Leaf):
            return before.tensors[old.index] is after.tensors[new.index]
        if not (isinstance(old, Container) and isinstance(new, Container)):
            return old == new
        alike = (old.kind, old.keys) == (new.kind, new.keys)
        alike = alike and len(old.children) == len(new.children)
        pairs = list(zip(old.children, new.children, strict=True)) if alike else []
        moved = [pair for pair in pairs if not same(*pair)]
        if alike and not moved:
            return True
        if isinstance(old.keys, Names):
            found[old.kind] = True
        elif (
            dataclasses.is_dataclass(old.kind)
            and is_ordinary(old.kind)
            and all(isinstance(t, Constant) for pair in moved for t in pair)
        ):
            found[old.kind] = False
        return False

    same(before.tree, after.tree)
    return found
