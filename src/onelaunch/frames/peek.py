"""Attributes and items of objects, without running user code: no property, no `__getattr__`."""

from __future__ import annotations

import builtins
import collections.abc
import contextvars
import enum
import functools
import gc
import operator
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.frames.reads import StandIn
from onelaunch.frames.stack import Use
from onelaunch.identity import id

MOST = 1000
"""The most items of an object that are followed."""
FORMATS = ("format", "format_map")
"""Methods of texts that read attributes."""

LEAVES = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    )
)
_SEALED = frozenset({torch.Stream, torch.Event})
"""Types whose attributes are not followed. A freed CUDA stream or event leaves weak references to
nothing behind (pytorch#183403)."""

METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
"""Types of functions that are bound to an object, in Python or C."""
VIEWS = (*map(type, ({}.keys(), {}.values(), {}.items())), collections.abc.MappingView)
"""Types of views of a mapping's present items."""

_WITHOUT_CONTENTS = LEAVES | _SEALED


class Kind(NamedTuple):
    """Facts about a class."""

    plain: bool
    """True if `__dict__`, `held` and the class are all there is to its objects' attributes."""
    usual: bool
    """True if its objects have nothing but a dict in `__dict__`."""
    held: tuple[str, ...]
    """The dicts in `__dict__` that hold attributes, too."""
    module: str | None
    """The module's name, if it alone tells whether calls of the objects are inert; see `is_inert`.
    Empty for plain values, which are not called. None if other facts matter."""
    contents: bool
    """True if its objects may have attributes or items that code reads."""
    attributes: bool
    """True if reads of its objects' attributes are noted."""
    tensor: bool
    getters: Mapping[str, operator.attrgetter[Any]]
    """property -> its getter in C, which reads attributes that no code names."""
    elements: Callable[[Any], Iterable[object]]
    """See `elements`."""


_kinds: dict[type, Kind] = {}


def facts_of_type(value: object) -> Kind:
    kind = type(value)  # `isinstance` would ask the value for its class
    return _kinds.get(kind) or _learn(kind)


def _learn(kind: type) -> Kind:
    mro = kind.__mro__
    sealed = not _SEALED.isdisjoint(mro)
    tensor = issubclass(kind, Tensor)
    # Inner tensors are state by themselves. Nothing refers to a tensor that is made of them weakly:
    # `torch.utils.swap_tensors` would refuse it.
    of_parts = tensor and hasattr(kind, "__tensor_flatten__")
    by_name = class_member(kind, "__getattr__")
    dicts = types.GetSetDescriptorType | types.MemberDescriptorType  # the latter for modules
    usual = (
        bool(kind.__dictoffset__)
        and isinstance(class_member(kind, "__dict__"), dicts)
        and not issubclass(kind, (type, threading.local))
    )
    module = class_member(kind, "__module__")
    alone = (
        class_member(kind, "__getattribute__") is object.__getattribute__
        and (by_name is None or by_name is nn.Module.__getattr__)
        and class_member(kind, "__objclass__") is None
        and not issubclass(kind, _CALLEES)
        and isinstance(module, str)
    )
    getters: dict[str, Any] = {
        name: member.fget
        for parent in reversed(mro)
        for name, member in parent.__dict__.items()
        if type(member) is property and type(member.fget) is operator.attrgetter
    }
    if len(_kinds) > _MOST_KINDS:  # it keeps classes alive
        _kinds.clear()
    facts = _kinds[kind] = Kind(
        usual=usual,
        plain=usual and not (tensor or sealed or getters or issubclass(kind, (*METHODS, *LEAVES))),
        held=("_parameters", "_buffers", "_modules") if issubclass(kind, nn.Module) else (),
        module="" if kind in _PLAIN else cast(str, module) if alone else None,
        contents=not of_parts and _WITHOUT_CONTENTS.isdisjoint(mro),
        attributes=not (kind in LEAVES or sealed or of_parts)
        and (issubclass(kind, type) or id(kind) not in BUILTIN),
        tensor=tensor,
        getters=getters,
        elements=_alone
        if tensor
        else next((way for base, way in _WAYS if issubclass(kind, base)), _alone),
    )
    return facts


class _OfOne(NamedTuple):
    item: object


_NAMED_TUPLE_ITEM = type(vars(_OfOne)["item"])
"""The descriptor of a named tuple's item, which is C."""
_MOST_KINDS = 4096
_PLAIN = LEAVES | {dict, list, tuple, set, frozenset}
_CALLEES = (
    *(type, functools.partial, operator.attrgetter, StandIn, *METHODS),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, _NAMED_TUPLE_ITEM, property, staticmethod, classmethod),
)
"""Types of callees that are told one by one, and of members of classes that give something else."""


def has_contents(value: object) -> bool:
    """Return whether a value may have attributes or items that code reads."""
    kind = type(value)
    facts = _kinds.get(kind) or _learn(kind)
    return facts.contents and not (facts.tensor and not attributes_of(value))


@functools.lru_cache(maxsize=1024)
def is_of_tensors(kind: type, name: str) -> bool:
    """Return whether an attribute of a class of tensors is torch's own, as `shape`."""
    packages = ((k, k.__module__.partition(".")[0]) for k in kind.__mro__)
    return any(name in vars(k) for k, of in packages if of in ("torch", "builtins"))


def own_uses(value: object, uses: Mapping[str, Use]) -> Mapping[str, Use]:
    """Return the uses without torch's own attributes of tensors, which are watched otherwise."""
    kind = type(value)
    if not issubclass(kind, Tensor):
        return uses
    return {name: use for name, use in uses.items() if not is_of_tensors(kind, name)}


def is_key(value: object) -> bool:
    """Return whether another call may look a value up in a dict, without running user code."""
    if type(value) is tuple:
        return all(map(is_key, cast(tuple[object, ...], value)))
    return type(value) in LEAVES or isinstance(value, type) or type(value).__hash__ is _HASH_OF_ENUM


_HASH_OF_ENUM = enum.Enum.__hash__

BUILTIN = frozenset(
    id(kind)
    for kind in (
        *(kind for kind in vars(builtins).values() if isinstance(kind, type)),
        *(types.MethodType, types.BuiltinFunctionType, types.CodeType, types.FrameType, deque),
        *(types.MethodWrapperType, types.MappingProxyType, types.GeneratorType, types.CellType),
    )
)


def has_attributes(value: object) -> bool:
    """Return whether reads of a value's attributes are noted."""
    kind = type(value)
    facts = _kinds.get(kind) or _learn(kind)
    return facts.attributes and not (issubclass(kind, type) and id(value) in BUILTIN)


def peek(value: Any, name: str) -> tuple[object, ...]:
    """Return the value of an attribute, if it can be found without running user code; 0.5 us."""
    kind: type = type(value)
    facts = _kinds.get(kind) or _learn(kind)
    if facts.plain and name != "__class__":
        attributes = _get_attribute(value, "__dict__")
        if name in attributes:
            return (attributes[name],)
        for holder in facts.held:
            entries = attributes.get(holder)
            if isinstance(entries, dict) and name in entries:
                return (cast(dict[str, object], entries)[name],)
        return _of_instance(kind, value, name)
    if facts.tensor and name != "__class__" and is_of_tensors(kind, name):
        return ()
    if kind in LEAVES or not _SEALED.isdisjoint(kind.__mro__):
        return (getattr(str, name),) if kind is str and name in FORMATS else ()
    if name == "__class__":
        return (kind,)
    if kind in METHODS:
        return (getattr(value, name, None),) if name in ("__self__", "__func__") else ()
    if issubclass(kind, type):
        return _of_class(cast(type, value), name)
    attributes = attributes_of(value) or {}
    return (attributes[name],) if name in attributes else _of_instance(kind, value, name)


def _of_instance(kind: type, value: object, name: str) -> tuple[object, ...]:
    if name == "__class__":
        return (kind,)
    member = class_member(kind, name)
    if type(member) is types.FunctionType:
        return (member,)
    if isinstance(member, (types.MemberDescriptorType, _NAMED_TUPLE_ITEM)):
        try:
            return (member.__get__(value),)
        except AttributeError:
            return ()
    if member is None or isinstance(member, (property, types.GetSetDescriptorType)):
        return ()
    return (_unbound(member),)


def _of_class(kind: type, name: str) -> tuple[object, ...]:
    if isinstance(kind, enum.EnumMeta) and name in (members := vars(kind)["_member_map_"]):
        return (members[name],)
    for of in (kind, type(kind)):
        member = class_member(of, name)
        if member is not None and not isinstance(member, property):
            return (_unbound(member),)
    return ()


def _unbound(member: object) -> object:
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def class_member(kind: type, name: str) -> Any:
    for parent in kind.__mro__:
        members = parent.__dict__
        if name in members:
            return members[name]
    return None


def is_view(value: object) -> bool:
    """Return whether a value is a view of a mapping. If its class does not keep the mapping, it is
    an object like any other."""
    kind = type(value)
    return not _VIEWS.isdisjoint(kind.__mro__) and (
        (slot := class_member(kind, "_mapping")) is None or _is_set(value, slot)
    )


def _is_set(value: object, slot: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


_VIEWS = frozenset(VIEWS)


def object_of(method: Any) -> object:
    """Return the object that a method is bound to, or the mapping of a view, which never changes.
    None for a function of C, whose `__self__` is its module or a library's data."""
    if is_view(method):
        mapping = class_member(type(method), "_mapping")  # of a mapping in Python
        return mapping.__get__(method) if mapping else gc.get_referents(method)[0]  # type: ignore
    of = method.__self__
    bound = type(method) is types.MethodType or class_member(type(of), method.__name__) is not None
    return of if bound else None


@functools.lru_cache(maxsize=1024)
def finds_by_key(kind: type) -> bool:
    """Return whether `d[key]` of a class of dicts is the item of that key, and no override takes
    another (`super().__getitem__(key.lower())`)."""
    members = [class_member(kind, name) for name in ("__getitem__", "__missing__", "__contains__")]
    overrides = [m for m in members if getattr(m, "__code__", None) is not None]
    return all(m.__module__ == "collections" for m in overrides)  # `Counter.__missing__` is 0


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, or None, without calling its `__getattr__`."""
    kind = type(value)
    if (_kinds.get(kind) or _learn(kind)).usual:
        return _get_attribute(value, "__dict__")
    if issubclass(kind, threading.local):
        return vars(value)  # this thread's
    if not kind.__dictoffset__:
        return None
    try:
        attributes: dict[str, Any] | None = _get_attribute(value, "__dict__")
    except AttributeError:  # a class of the interpreter, which hides it
        return None
    return attributes if isinstance(attributes, dict) else None


def attribute_values(value: object) -> Iterable[object]:
    return list((attributes_of(value) or {}).values()) if has_attributes(value) else ()


_get_attribute: Any = object.__getattribute__


def items(value: Any, keys: Iterable[object]) -> Iterable[object]:
    """Return the items of a builtin container under keys; all items where no key is known."""
    kind = type(value)  # `isinstance` would ask the value for its class
    plain: list[Any] = [key for key in keys if isinstance(key, _PLAIN_KEYS)]
    if not plain or not issubclass(kind, _KEYED):
        return elements(value)
    if issubclass(kind, (dict, types.MappingProxyType)):
        return [value[key] for key in plain if key in value]
    of = tuple if issubclass(kind, tuple) else list
    count = of.__len__(value)
    places = [key for key in plain if isinstance(key, int) and -count <= key < count]
    return [of.__getitem__(value, key) for key in places]


_PLAIN_KEYS = (int, str, float)
_KEYED = (dict, list, tuple, types.MappingProxyType)


def elements(value: Any) -> Iterable[object]:
    """Return the elements of a container, without running user code; or the value itself."""
    return facts_of_type(value).elements(value)


def _alone(value: object) -> tuple[object, ...]:
    return (value,) if has_contents(value) else ()


def _of_dict(value: dict[Any, object]) -> list[object]:
    keys = [key for key in list(dict.keys(value))[:MOST] if has_contents(key)]
    return [*list(dict.values(value))[:MOST], *keys]


_WAYS: tuple[tuple[Any, Callable[[Any], Iterable[object]]], ...] = (
    (torch.Size, tuple.__iter__),
    (tuple(LEAVES), _alone),
    (dict, _of_dict),
    (list, list.__iter__),
    (tuple, tuple.__iter__),
    (types.MappingProxyType, lambda value: list(value.values())[:MOST]),
    (contextvars.ContextVar, lambda value: _alone(value.get(None))),
    (VIEWS, lambda value: elements(object_of(value)) if is_view(value) else _alone(value)),
    ((deque, set, frozenset), lambda value: list(value)[:MOST]),
    ((nn.ModuleList, nn.ModuleDict, nn.Sequential), lambda value: value._modules.values()),
    (enum.EnumMeta, lambda value: value.__members__.values()),
)
"""(classes, function that returns the elements of their instances)."""


def iterated_container(iterator: object) -> object:
    """Return the container of a builtin iterator; or the value itself."""
    while isinstance(iterator, Iterator) and type(iterator).__module__ == "builtins":
        if isinstance(iterator, types.GeneratorType):
            break
        referents = [v for v in gc.get_referents(iterator) if has_contents(v)]
        if len(referents) != 1:
            break
        (iterator,) = referents
    return iterator


def namespaces(values: Iterable[object]) -> list[object]:
    spaces = [attributes_of(v) for v in values if not isinstance(v, type)]
    return [namespace for namespace in spaces if namespace is not None]
