"""Containers and objects: their keys and children, and a new one of the same kind."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree as pytree

from onelaunch.errors import text_of

BY_VALUE = (
    *(bool, int, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


BY_ATTRIBUTES: set[type] = set()
"""The classes whose objects are taken apart from the first call on; see `register`."""


class Names(tuple[str, ...]):
    """The keys of a flattened object: the names of its attributes."""

    __slots__ = ()


class RecordKeys(NamedTuple):
    """The keys of a record; see `_is_record`."""

    attributes: tuple[str, ...]
    items: tuple[str, ...]


class ItemKeys(NamedTuple):
    """The keys of a dict that has attributes besides its items."""

    items: tuple[Any, ...]
    attributes: tuple[str, ...]


class TypedKeys(tuple[Any, ...]):
    """The keys of a dict that are not all strings. They are compared by type too: `1 == 1.0`."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, cast(Any, other)) is True and all(
            map(_is_same_key, self, cast(Any, other))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


def _is_same_key(a: object, b: object) -> bool:
    """Return whether two equal keys are of one type, and `0.0` and `-0.0` are told apart."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return all(map(_is_same_key, a, cast(Any, b)))
    return type(a) not in (float, complex) or repr(a) == repr(b)


def keys_of(mapping: dict[Any, object]) -> tuple[Any, ...]:
    """Return the keys of a dict, to be compared with those of another."""
    keys = tuple(dict.keys(mapping))
    return keys if all(type(key) is str for key in keys) else TypedKeys(keys)


def is_ordinary(kind: type) -> bool:
    """Return whether attributes make up the whole of a class's instances. Dataclasses are flattened
    always, other instances if their class is requested."""
    return kind is types.SimpleNamespace or (
        kind.__dictoffset__ != 0
        and kind.__basicsize__ == _Ordinary.__basicsize__
        and kind.__new__ is object.__new__
        and kind not in pytree.SUPPORTED_NODES
        and not hasattr(kind, "__del__")
        and not has_members(kind)
        and not issubclass(kind, type | types.ModuleType | types.FunctionType | torch.nn.Module)
    )


@functools.lru_cache(maxsize=1024)
def has_members(kind: type) -> bool:
    """Return whether the objects of a class have `__slots__`, or members that C stores."""
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return any(isinstance(member, types.MemberDescriptorType) for member in members)


class _Ordinary:
    """A class whose objects have only a `__dict__`: C classes and `__slots__` make them larger."""


def _is_record(value: object) -> bool:
    """Return whether a value is a dataclass and an ordered dict of its fields, as a Hugging Face
    `ModelOutput`. Its constructor takes 10 us, more than a launch."""
    if not isinstance(value, OrderedDict) or not dataclasses.is_dataclass(value):
        return False
    attributes = vars(value)
    items = cast(OrderedDict[Any, object], value).items()
    return all(attributes.get(key) is item for key, item in items)


def parts_of(value: object) -> tuple[tuple[Any, ...], list[object]] | None:
    """Return the keys and children of a container, or None for any other value."""
    kind = type(value)
    if kind in BY_VALUE:
        return None
    if kind is tuple or kind is list:
        items = list(cast(tuple[object, ...], value))
        return (len(items),), items
    if kind is dict:
        mapping = cast(dict[Any, object], value)
        return keys_of(mapping), list(mapping.values())
    if kind is OrderedDict:
        return _dict_parts(cast(OrderedDict[Any, object], value))
    if kind is slice:
        cut = cast(slice, value)
        return ("start", "stop", "step"), [cut.start, cut.stop, cut.step]
    if _is_record(value):
        attributes = vars(value)
        keys = RecordKeys(tuple(attributes), tuple(cast(dict[Any, Any], value)))
        return keys, list(attributes.values())
    if pytree.is_constant_class(kind):
        return None
    if kind in pytree.SUPPORTED_NODES:
        # The context is a child: a tree compares numbers by type and bits, and `2 == 2.0 == True`.
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return (pytree.SUPPORTED_NODES[kind],), [*children, context]
    if dataclasses.is_dataclass(value) and _is_made_by(object, kind):
        fields = [field.name for field in dataclasses.fields(value)]
        if all(hasattr(value, name) for name in fields):
            # In the order of `vars`, where `__post_init__` may have stored more; then slots.
            names = tuple(dict.fromkeys([*getattr(value, "__dict__", ()), *fields]))
            return names, [getattr(value, name) for name in names]
    if isinstance(value, tuple) and _is_made_by(tuple, kind):
        items = list(tuple.__iter__(cast(tuple[object, ...], value)))  # not its class's `__iter__`
        attributes = getattr(value, "__dict__", {})
        return (len(items), *attributes), [*items, *attributes.values()]
    if isinstance(value, dict) and _is_dict_kind(kind):
        return _dict_parts(cast(dict[Any, object], value))
    return None


def _dict_parts(mapping: dict[Any, object]) -> tuple[tuple[Any, ...], list[object]]:
    keys, children = keys_of(mapping), list(dict.values(mapping))
    attributes: dict[str, object] = getattr(mapping, "__dict__", {})
    if not attributes:
        return keys, children
    return ItemKeys(keys, tuple(attributes)), [*children, *attributes.values()]


@functools.lru_cache(maxsize=1024)
def _is_dict_kind(kind: type) -> bool:
    """Return whether items and attributes make up the whole of a class's dicts."""
    return kind.__init__ in (dict.__init__, OrderedDict.__init__) and not has_members(kind)


@functools.lru_cache(maxsize=1024)
def _is_made_by(base: Any, kind: type) -> bool:
    """Return whether instances of a class are a builtin class's with attributes, as those of
    classes in Python are, but not in C: `torch.return_types`, `os.stat_result`."""
    try:
        base.__new__(kind)
    except TypeError:
        return False
    return not issubclass(kind, torch.nn.Module)


def has_context(keys: tuple[Any, ...]) -> bool:
    """Return whether torch's pytree takes a container apart. Its last child is then its context."""
    return bool(keys) and isinstance(keys[0], pytree.NodeDef)


def steps_to(kind: type, keys: tuple[Any, ...], count: int) -> list[str]:
    """Return the steps from a container to its children, for messages. `keys`: of `parts_of`."""
    if isinstance(keys, Names):
        return [f".{key}" for key in keys]
    if isinstance(keys, RecordKeys):
        return [f".{key}" for key in keys.attributes]
    if isinstance(keys, ItemKeys):
        return [*(f"[{text_of(k)}]" for k in keys.items), *(f".{k}" for k in keys.attributes)]
    if has_context(keys):
        return [f"[{i}]" for i in range(count)]
    if issubclass(kind, Mapping):
        return [f"[{text_of(key)}]" for key in keys]
    if issubclass(kind, tuple | list):
        items, *attributes = keys
        return [*(f"[{i}]" for i in range(items)), *(f".{key}" for key in attributes)]
    return [f".{key}" for key in keys]


def made_of(kind: Any, keys: tuple[Any, ...], children: list[Any]) -> Any:
    if kind is tuple or kind is list:
        return kind(children)
    if kind is dict:
        return dict(zip(keys, children, strict=True))
    if kind is slice:
        return slice(*children)
    if isinstance(keys, Names):
        instance = kind.__new__(kind)
        vars(instance).update(zip(keys, children, strict=False))
        return instance
    if has_context(keys):
        return keys[0].unflatten_fn(children[:-1], children[-1])
    if isinstance(keys, RecordKeys):
        record: Any = OrderedDict.__new__(kind)
        attributes = record.__dict__
        attributes.update(zip(keys.attributes, children, strict=True))
        for key in keys.items:
            OrderedDict.__setitem__(record, key, attributes[key])
        return record
    if issubclass(kind, tuple):
        count, *names = keys
        instance = tuple.__new__(kind, children[:count])
        if names:
            vars(instance).update(zip(names, children[count:], strict=True))
        return instance
    if issubclass(kind, dict):
        items, attributes = keys if isinstance(keys, ItemKeys) else (keys, ())
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        instance = base.__new__(kind)
        for key, child in zip(items, children, strict=False):
            base.__setitem__(instance, key, child)  # not the override of its class
        if attributes:
            vars(instance).update(zip(attributes, children[len(items) :], strict=True))
        return instance
    # The `__init__` of a dataclass may take other arguments, or have effects.
    instance = object.__new__(kind)
    for name, child in zip(keys, children, strict=True):
        object.__setattr__(instance, name, child)
    return instance


def composites_in(values: Iterable[object]) -> list[object]:
    """Return the containers and ordinary objects among values, and inside them."""
    seen: dict[int, object] = {}  # kept alive: an id is not used again
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        parts = parts_of(value)
        if id(value) in seen or not (parts or is_ordinary(type(value))):
            continue
        seen[id(value)] = value
        waiting += parts[1] if parts else vars(value).values()
    return [*seen.values()]


def objects_in(values: Iterable[object]) -> list[object]:
    """Return the ordinary objects among values, and inside them; see `is_ordinary`."""
    composites = composites_in(values)
    return [v for v in composites if is_ordinary(type(v)) and hasattr(type(v), "__weakref__")]
