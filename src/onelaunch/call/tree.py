"""Arguments and results as trees: tensors at the leaves, constants and containers in between.

Two calls with equal trees differ only in their tensors.
"""

from __future__ import annotations

import enum
import functools
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
    has_context,
    has_members,
    is_ordinary,
    made_of,
    parts_of,
    steps_to,
)
from onelaunch.identity import id

_PLAIN = frozenset({tuple, list, dict})  # kinds of nearly all containers, which have no attributes
_EMPTY: tuple[object, ...] = ()  # Python's only empty tuple
_BY_NAME = (type, types.BuiltinFunctionType, types.FunctionType)  # as pickle writes them
_CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.ModuleType, type, torch.Generator),
)


class Leaf(NamedTuple):
    """The place of tensor number `index`."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]


class Constant:
    """A value that must be the same in every call: plain by type and bits, else by identity. So 2,
    2.0 and True differ, -0.0 and 0.0 differ, a NaN equals a NaN of the same bits. A NumPy number, a
    `Decimal` or a date is plain too: see `_is_value_kind`."""

    __slots__ = ("_key", "by_identity", "value")
    _key: tuple[object, ...]
    value: object
    by_identity: bool

    def __init__(self, value: object, in_context: bool = False) -> None:
        """Make a constant. `in_context`: True in a context of torch's pytree, which is compared by
        `==` there. A value with an `==` of its own is then compared by bits here."""
        self.value = value
        bits = _bits(value)
        if bits is None and in_context and compares(type(value)):
            bits = _written_bits(value)
        self.by_identity = bits is None
        self._key = ("is", id(value)) if bits is None else bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>" if self.by_identity else repr(self.value)

    @property
    def is_plain(self) -> bool:
        """True if it is compared by value."""
        return not self.by_identity or isinstance(self.value, enum.Enum)

    def matches(self, value: object) -> bool:
        if self.by_identity:
            return value is self.value
        return value is self.value or _bits(value) == self._key


class AnyNumber(Constant):
    """The place of a number that may differ from call to call."""

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
    if kind is range:  # equal if it gives the same numbers
        span = cast(range, value)
        return (kind, span.start, span.stop, span.step)
    if kind in BY_VALUE or pytree.is_constant_class(kind):  # has an `==` of its own
        return (kind, value)
    if kind is frozenset:
        # Order is not kept, so the parts' keys are compared as a set too.
        keys = [_bits(part) for part in cast(frozenset[object], value)]
        return None if None in keys else (kind, frozenset(keys))
    return _written_bits(value) if _is_value_kind(kind) else None


@functools.lru_cache(maxsize=1024)
def _is_value_kind(kind: type) -> bool:
    """Return whether the objects of a class are values that can never change: NumPy's numbers,
    `Decimal`, dates. It has `==` and a hash, and no attribute, slot or item that can be set. A
    `__setattr__` that refuses does not count, as `object.__setattr__` sets all the same."""
    return compares(kind) and not (hasattr(kind, "__setitem__") or has_members(kind))


@functools.lru_cache(maxsize=1024)
def compares(kind: type) -> bool:
    """Return whether a class has no attributes, and an `==` and a hash of its own."""
    return (
        kind.__dictoffset__ == 0
        and kind.__eq__ is not object.__eq__
        and kind.__hash__ not in (None, object.__hash__)
        and not issubclass(kind, type | tuple | types.BuiltinFunctionType | types.MethodType)
    )


def _written_bits(value: Any) -> tuple[object, ...] | None:
    """Return a key of pickle's text for a value; None if there is none, or if it contains an object
    that is no value. Costs a microsecond. `==` is weaker: `Decimal("2") == Decimal("2.0")`."""
    dtype: Any = getattr(value, "dtype", None)
    if hasattr(dtype, "hasobject") and hasattr(value, "tobytes"):  # NumPy's: a tenth of the time
        return None if dtype.hasobject else (type(value), dtype, value.tobytes())
    try:
        written = value.__reduce_ex__(4)
    except TypeError:
        return None  # it refuses to be written
    return _key(written)


def _key(part: Any) -> tuple[object, ...] | None:
    kind = type(part)
    if kind in (tuple, list, dict):
        parts = [*part, *part.values()] if kind is dict else part
        keys = [_key(inside) for inside in parts]
        return None if None in keys else (kind, *keys)
    return ("is", part) if isinstance(part, _BY_NAME) else _bits(part)


class Container(NamedTuple):
    """A container: its `kind`, the keys of its children, and the children."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Tree, ...]

    def steps(self) -> list[str]:
        """Return the steps to the children, for messages."""
        return steps_to(self.kind, self.keys, len(self.children))


class Above(NamedTuple):
    """A reference from inside an object to an object around it, `up` levels above."""

    up: int
    weak: bool


class Same(NamedTuple):
    """An object that existed before the call, and that a result contains as it is. `steps`: for an
    argument, the path to it from ``(args, kwargs)``: items, and `Attribute`. None for an object
    that is the same in every call."""

    value: object  # the object; None for an argument
    steps: tuple[object, ...] | None


class Shared(NamedTuple):
    """A container in several places of results and stored values. Each call makes it once.
    `number`: the number of the container, in all trees of a call."""

    number: int
    tree: Container


class Attribute(NamedTuple):
    """A step to an attribute."""

    name: str


Tree = Leaf | Constant | Container | Above | Same | Shared


class Flat(NamedTuple):
    """A tree with its tensors, and their paths: ``["x"][0]``."""

    tree: Tree
    tensors: list[Tensor]
    paths: list[str]
    taken_apart: Sequence[object] = ()  # objects and containers in it, but no plain ones


def flatten(
    value: object,
    root: str = "",
    *,
    objects: bool | Literal["made"] | Mapping[type, bool] = False,
    whole: Mapping[int, Same | Constant] = types.MappingProxyType({}),
    number: Callable[[object], int] | None = None,
) -> Flat:
    """Flatten a value into a tree and its tensors.

    Tuples, lists, dicts, named tuples, dataclasses, namespaces that hold tensors, and classes
    registered with torch's pytree (a Hugging Face `ModelOutput`) are containers; every other object
    is a constant.

    Args:
        root: the beginning of paths.
        objects: True to flatten objects of ordinary Python classes that hold tensors (a Hugging
            Face `Cache`) into their attributes. ``"made"`` to flatten objects without tensors too;
            `whole` has the objects that the call did not make. Or class -> True to flatten its
            instances, with the objects inside that hold tensors, False to keep its instances whole.
        whole: id -> object that is not flattened.
        number: returns the number of a container, which is marked as `Shared` with it; see
            `Identities`.
    """
    flattening = _Flattening(objects, whole, number)
    tree = flattening.tree_of(value, root)
    return Flat(tree, flattening.tensors, flattening.paths, flattening.taken_apart)


def flatten_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    objects: Mapping[type, bool] = types.MappingProxyType({}),
) -> Flat:
    """Flatten the arguments of a call, ``(args, kwargs)``; paths are as in ``args[0]["x"]``."""
    flattening = _Flattening(objects, types.MappingProxyType({}))
    children = flattening.tree_of(args, "args"), flattening.tree_of(kwargs, "kwargs")
    tree = Container(tuple, (2,), children)
    return Flat(tree, flattening.tensors, flattening.paths, flattening.taken_apart)


class _Flattening:
    def __init__(
        self,
        objects: bool | Literal["made"] | Mapping[type, bool],
        whole: Mapping[int, Same | Constant],
        number: Callable[[object], int] | None = None,
    ) -> None:
        self._made = objects == "made"
        self._all = objects is True or self._made
        self._kinds: Mapping[type, bool] = objects if isinstance(objects, Mapping) else {}
        self._whole = whole
        self._number = number
        self.tensors: list[Tensor] = []
        self.paths: list[str] = []
        self.taken_apart: list[object] = []

    def tree_of(
        self,
        value: object,
        path: str,
        above: frozenset[int] = frozenset(),
        within: tuple[int, ...] = (),
        in_context: bool = False,
    ) -> Tree:
        """Return the tree of a value.

        Args:
            above: ids of the containers and objects around the value.
            within: ids of the flattened objects around the value, outermost first.
            in_context: True in a context of torch's pytree.
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
        asked = requested or self._all or within or kind is types.SimpleNamespace
        asked = parts is None and not whole and asked
        takes = requested or self._made or (asked and _holds_tensors([value], above))
        if asked and is_ordinary(kind) and takes:
            parts = Names(vars(value)), list(vars(value).values())
            within = () if self._all else (*within, id(value))
        if parts is None or id(value) in above:
            return Constant(value, in_context)
        if id(value) in self._whole:
            return self._whole[id(value)]
        if kind not in _PLAIN:
            self.taken_apart.append(value)
        keys, children = parts
        inside = above | {id(value)}
        context = len(children) - 1 if has_context(keys) else None  # the last child
        flat = tuple(
            self.tree_of(child, path + step, inside, within, in_context or index == context)
            for index, (child, step) in enumerate(
                zip(children, steps_to(kind, keys, len(children)), strict=True)
            )
        )
        container = Container(kind, keys, flat)
        if self._number is None or kind is slice or value is _EMPTY:
            return container
        return Shared(self._number(value), container)


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
    """Rebuild a value: containers are new, constants the same objects. `shared`: number -> `Shared`
    container that was made already."""
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
        value = build(tree, [])
        for name, child in zip(tree.keys, tree.children, strict=True):
            vars(value)[name] = unflatten(child, leaves, (*within, value), shared)
        return value
    return build(tree, [unflatten(child, leaves, within, shared) for child in tree.children])


def build(tree: Container, children: list[Any]) -> Any:
    return made_of(tree.kind, tree.keys, children)


def mapped(tree: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """Return a tree with all but its containers changed."""
    if isinstance(tree, Shared):
        return Shared(tree.number, cast(Container, mapped(tree.tree, change)))
    if isinstance(tree, Container):
        return tree._replace(children=tuple(mapped(child, change) for child in tree.children))
    return change(tree)


def leaf_numbers(tree: Tree) -> Iterator[int]:
    if isinstance(tree, Leaf):
        yield tree.index
    elif isinstance(tree, Container | Shared):
        for child in tree.children if isinstance(tree, Container) else [tree.tree]:
            yield from leaf_numbers(child)


def constants(tree: Tree, path: str = "") -> Iterator[tuple[str, Constant]]:
    if isinstance(tree, Shared):
        tree = tree.tree
    if isinstance(tree, Constant):
        yield path, tree
    elif isinstance(tree, Container):
        for child, step in zip(tree.children, tree.steps(), strict=True):
            yield from constants(child, path + step)


def call_constants(tree: Tree) -> Iterator[tuple[str, Constant]]:
    """Return the constants of a call's tree, with paths as in ``args[0]``."""
    assert isinstance(tree, Container)
    for name, child in zip(("args", "kwargs"), tree.children, strict=True):
        yield from constants(child, name)


def is_plain(value: object) -> bool:
    """Return whether a value is compared by value, and not by identity."""
    return _bits(value) is not None or isinstance(value, enum.Enum)


def is_unchanging(value: object) -> bool:
    """Return whether a value can never change: a number, a string, a tuple of unchanging values."""
    if type(value) is tuple:
        return all(map(is_unchanging, cast(tuple[object, ...], value)))
    return is_plain(value)


def is_code(value: object) -> bool:
    return isinstance(value, _CODE)


def unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor object once, in the order of first appearance."""
    return list({id(t): t for t in tensors}.values())


def first_places(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return id of a tensor object -> its first place among `tensors`."""
    return {id(t): i for i, t in reversed([*enumerate(tensors)])}
