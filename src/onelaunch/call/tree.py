"""Arguments and results as trees: tensors at the leaves, constants and containers in between.

Two calls with equal trees differ only in their tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onelaunch.call.containers import (
    BY_ATTRIBUTES,
    BY_VALUE,
    Names,
    is_ordinary,
    made_of,
    parts_of,
    steps_to,
)

_EMPTY: tuple[object, ...] = ()
"""The one empty tuple that Python has."""


class Leaf(NamedTuple):
    """The place of the tensor number `index`."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]


class Constant:
    """A value that must be the same in every call, by type and bits; any other object by identity.

    2, 2.0 and True differ, -0.0 and 0.0 differ, a NaN equals a NaN of the same bits.
    """

    __slots__ = ("_key", "by_identity", "value")
    _key: tuple[object, ...]
    value: object
    by_identity: bool

    def __init__(self, value: object) -> None:
        self.value = value
        bits = _bits(value)
        self.by_identity = bits is None
        self._key = ("is", id(value)) if bits is None else bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>" if self.by_identity else repr(self.value)

    def matches(self, value: object) -> bool:
        """Return whether `value` is this constant."""
        if self.by_identity:
            return value is self.value
        return value is self.value or _bits(value) == self._key


class AnyNumber(Constant):
    """The place of a number that each call brings, in the tree of calls with any such number."""

    __slots__ = ()

    def __init__(self, kind: type) -> None:
        self.value = kind
        self.by_identity = False
        self._key = ("any", kind)

    def __repr__(self) -> str:
        return f"any {self.value.__name__}"  # pyright: ignore


def _bits(value: object) -> tuple[object, ...] | None:
    """Return a key by type and bits, or None for an object that is compared by identity."""
    kind = type(value)
    if kind is float:
        return (kind, struct.pack("d", cast(float, value)))
    if kind is complex:
        number = cast(complex, value)
        return (kind, struct.pack("dd", number.real, number.imag))
    if kind in BY_VALUE or pytree.is_constant_class(kind):  # which has an `==` of its own
        return (kind, value)
    if kind is frozenset:
        # Order is not kept, so the parts' keys are compared as a set too.
        keys = [_bits(part) for part in cast(frozenset[object], value)]
        return None if None in keys else (kind, frozenset(keys))
    return None


class Container(NamedTuple):
    """A container: its `kind`, the keys of its children, and the children."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Tree, ...]

    def step(self, index: int) -> str:
        """Return the way to a child, for a message."""
        return steps_to(self.kind, self.keys, len(self.children))[index]


@dataclasses.dataclass(frozen=True, slots=True)
class Above:
    """A reference from inside an object to it, or to an object around it, `up` levels above."""

    up: int
    weak: bool


class Same(NamedTuple):
    """An object that existed before the call, and that a result contains as it is.

    Attributes:
        value: the object; for an argument, the captured call's.
        steps: the path to it from ``(args, kwargs)``, if each call brings another: items, and
            names of attributes as `Attribute`. None if it is the same object in every call.
    """

    value: object
    steps: tuple[object, ...] | None


class Shared(NamedTuple):
    """A container that is in several places, of a result or of what is stored: one object in each
    call.

    Attributes:
        number: the number of the object, in all trees of a call.
        tree: the container.
    """

    number: int
    tree: Container


class Attribute(NamedTuple):
    """A step to an attribute."""

    name: str


Tree = Leaf | Constant | Container | Above | Same | Shared


class Flat(NamedTuple):
    """A tree with its tensors, and the path of each: ``["x"][0]``."""

    tree: Tree
    tensors: list[Tensor]
    paths: list[str]


def flatten(
    value: object,
    root: str = "",
    *,
    objects: bool | Literal["made"] | Mapping[type, bool] = False,
    known: Mapping[int, Same] = types.MappingProxyType({}),
    number: Callable[[object], int] | None = None,
) -> Flat:
    """Flatten a value into a tree and its tensors.

    Tuples, lists, dicts, named tuples, dataclasses and classes registered with torch's pytree (a
    Hugging Face `ModelOutput`) are containers; every other object is a constant.

    Args:
        value: anything.
        root: the beginning of paths.
        objects: True to flatten also instances of ordinary Python classes that hold tensors (a
            Hugging Face `Cache`) into their attributes; ``"made"`` for those that hold none too,
            where `known` has all that the call did not make; or class -> True to flatten its
            instances so, with the objects inside them that hold tensors, False to keep its
            instances whole.
        known: id -> objects that are not flattened.
        number: called with each container, which is marked as `Shared` with the result; see
            `Identities`.
    """
    flattening = _Flattening(objects, known, number)
    return Flat(flattening.tree_of(value, root), flattening.tensors, flattening.paths)


def flatten_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    objects: Mapping[type, bool] = types.MappingProxyType({}),
) -> Flat:
    """Flatten the arguments of a call, ``(args, kwargs)``; paths are as in ``args[0]["x"]``."""
    flattening = _Flattening(objects, types.MappingProxyType({}))
    children = flattening.tree_of(args, "args"), flattening.tree_of(kwargs, "kwargs")
    return Flat(Container(tuple, (2,), children), flattening.tensors, flattening.paths)


class _Flattening:
    """A flattening of one value; see `flatten`."""

    def __init__(
        self,
        objects: bool | Literal["made"] | Mapping[type, bool],
        known: Mapping[int, Same],
        number: Callable[[object], int] | None = None,
    ) -> None:
        self._made = objects == "made"
        self._all = objects is True or self._made
        self._kinds: Mapping[type, bool] = objects if isinstance(objects, Mapping) else {}
        self._known = known
        self._number = number
        self.tensors: list[Tensor] = []
        self.paths: list[str] = []

    def tree_of(
        self,
        value: object,
        path: str,
        above: frozenset[int] = frozenset(),
        within: tuple[int, ...] = (),
    ) -> Tree:
        """Return the tree of a value.

        Args:
            above: ids of the containers and objects around it.
            within: ids of the flattened objects among them, outermost first.
        """
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.paths.append(path)
            return Leaf(len(self.tensors) - 1)
        if within:
            weak = type(value) is weakref.ref
            object_ = cast(weakref.ref[Any], value)() if weak else value
            if id(object_) in within:
                return Above(len(within) - within.index(id(object_)), weak)
        kind = type(value)
        requested = self._kinds.get(kind, kind in BY_ATTRIBUTES or None)
        whole = requested is False and not within
        parts = None if whole else parts_of(value)
        asked = parts is None and not whole and (requested or self._all or within)
        apart = requested or self._made or (asked and _holds_tensors([value], above))
        if asked and is_ordinary(kind) and apart:
            parts = Names(vars(value)), list(vars(value).values())
            within = () if self._all else (*within, id(value))
        if parts is None or id(value) in above:
            return Constant(value)
        if id(value) in self._known:
            return self._known[id(value)]
        keys, children = parts
        inside = above | {id(value)}
        flat = tuple(
            self.tree_of(child, path + step, inside, within)
            for child, step in zip(children, steps_to(kind, keys, len(children)), strict=True)
        )
        made = Container(kind, keys, flat)
        if self._number is None or kind is slice or value is _EMPTY:
            return made
        return Shared(self._number(value), made)


def _holds_tensors(children: list[object], above: frozenset[int]) -> bool:
    for child in children:
        if isinstance(child, Tensor):
            return True
        parts = parts_of(child)
        if parts is None and is_ordinary(type(child)):
            parts = (), list(vars(child).values())
        if parts and id(child) not in above and _holds_tensors(parts[1], above | {id(child)}):
            return True
    return False


def unflatten(
    tree: Tree,
    leaves: list[Any],
    within: tuple[Any, ...] = (),
    shared: dict[int, Any] | None = None,
) -> Any:
    """Rebuild a value: containers are new, constants the same objects.

    Args:
        tree: the value's tree.
        leaves: its tensors.
        within: the objects around it.
        shared: the containers so far that are in several places, by number.
    """
    shared = {} if shared is None else shared
    if isinstance(tree, Leaf):
        return leaves[tree.index]
    if isinstance(tree, Constant | Same):
        return tree.value
    if isinstance(tree, Shared):
        if tree.number not in shared:
            shared[tree.number] = unflatten(tree.tree, leaves, within, shared)
        return shared[tree.number]
    if isinstance(tree, Above):
        return weakref.ref(within[-tree.up]) if tree.weak else within[-tree.up]
    if isinstance(tree.keys, Names):  # made before its attributes, which may refer to it
        made = build(tree, [])
        for name, child in zip(tree.keys, tree.children, strict=True):
            vars(made)[name] = unflatten(child, leaves, (*within, made), shared)
        return made
    return build(tree, [unflatten(child, leaves, within, shared) for child in tree.children])


def build(tree: Container, children: list[Any]) -> Any:
    """Return a new container like `tree` around `children`."""
    return made_of(tree.kind, tree.keys, children)


def constants(tree: Tree, path: str = "") -> Iterator[tuple[str, Constant]]:
    """Return every constant of a tree, with its path."""
    if isinstance(tree, Shared):
        tree = tree.tree
    if isinstance(tree, Constant):
        yield path, tree
    elif isinstance(tree, Container):
        for index, child in enumerate(tree.children):
            yield from constants(child, path + tree.step(index))


def call_constants(tree: Tree) -> Iterator[tuple[str, Constant]]:
    """Return the constants of a call's tree, with paths as in ``args[0]``."""
    assert isinstance(tree, Container)
    for name, child in zip(("args", "kwargs"), tree.children, strict=True):
        yield from constants(child, name)


def is_plain(value: object) -> bool:
    """Return whether a constant compares by value: its type and bits are its meaning."""
    return _bits(value) is not None or isinstance(value, enum.Enum)


def is_code(value: object) -> bool:
    """Return whether a constant is code: its identity is its meaning."""
    return isinstance(
        value,
        types.FunctionType
        | types.BuiltinFunctionType
        | types.MethodType
        | types.ModuleType
        | type
        | torch.Generator,
    )


def unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor object once, in the order of first appearance."""
    return list({id(t): t for t in tensors}.values())


def first_places(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return id of a tensor object -> its first place among `tensors`."""
    return {id(t): i for i, t in reversed([*enumerate(tensors)])}
