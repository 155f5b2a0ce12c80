"""What a callable can reach behind its arguments: parameters, attributes, closures, globals.

A graph reads memory by address and repeats the branches that Python took, so everything that led it
there is part of what must be unchanged. `walk` finds the places (slots) and what they hold;
`guard.StateGuard` watches those that mattered.
"""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.tree import Constant, is_plain

Kind = Literal["item", "cell", "of"]
"""How a slot is read: ``holder[key]``, ``holder.cell_contents`` or ``key(holder)``."""

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_UNWALKED = ("torch._", "torch.cuda", "torch.utils", "threading", "logging", "onelaunch")
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen")


class Slot(NamedTuple):
    """One place that holds a value: a dict entry, a list item, or a closure cell."""

    kind: Kind
    holder: Any
    key: Any
    name: str
    owner: Any
    """The object whose attribute the slot is, or None."""
    via: Slot | None = None
    """The slot that led here: its content is, or holds, this slot's holder."""

    @property
    def id(self) -> tuple[int, object]:
        return (id(self.holder), self.key)

    def read(self) -> object:
        """What the slot holds, or `MISSING`."""
        try:
            if self.kind == "cell":
                return self.holder.cell_contents
            if self.kind == "of":
                return self.key(self.holder)
            return self.holder[self.key]
        except (KeyError, IndexError, ValueError, TypeError):
            return MISSING

    def write(self, value: object) -> None:
        """Put `value` in, as the callable did."""
        if self.kind == "cell":
            self.holder.cell_contents = value
        elif value is MISSING:
            del self.holder[self.key]
        else:
            self.holder[self.key] = value


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


@dataclass(slots=True)
class Walk:
    """Every slot that a callable reaches, with what it held."""

    held: dict[tuple[int, object], tuple[Slot, object]] = field(
        default_factory=lambda: cast(Any, {})
    )
    containers: dict[int, tuple[Any, str, int]] = field(default_factory=lambda: cast(Any, {}))
    """id -> (container, name, length), of lists, dicts, sets and deques."""
    names: set[str] = field(default_factory=lambda: cast(set[str], set()))
    """The attributes and globals that the code of the callable names."""
    owned: list[tuple[dict[str, Any], object]] = field(default_factory=lambda: cast(Any, []))
    """(dict, owner): where objects and modules keep their attributes."""
    hooks: list[dict[int, Any]] = field(default_factory=lambda: cast(Any, []))
    """The dicts of hooks of every submodule; those of the graphed module itself run outside."""
    functions: list[types.FunctionType] = field(default_factory=lambda: cast(Any, []))
    """The functions whose code was read."""

    def is_read(self, slot: Slot) -> bool:
        """Whether the callable's code names what the slot holds, or holds what holds it."""
        if slot.owner is not None:
            return slot.key in self.names or slot.key in attributes_read(type(slot.owner))
        if id(slot.holder) in self.containers:
            return slot.via is None or self.is_read(slot.via)
        return True

    def sized(self) -> Iterator[tuple[Any, frozenset[str] | None]]:
        """What must not grow or shrink: containers, and dicts of attributes, for which only the
        names given matter."""
        for attributes, owner in self.owned:
            outer = not isinstance(owner, nn.Module) or attributes is owner.__dict__
            names = self.names | attributes_read(type(owner))
            yield attributes, frozenset(names) if outer else None
        for slot, value in self.held.values():
            if id(value) in self.containers and self.is_read(slot):
                yield value, None
        for hooks in self.hooks:
            yield hooks, None

    def ways(self, owners: Iterable[object]) -> Iterator[tuple[Slot, object]]:
        """What leads to the attributes of `owners`: their dicts, their classes, and code.

        Other tools replace these: `module._modules = ...`, a patched method of a class, a notebook
        that reloads a function in place.
        """
        hooks = {id(entries) for entries in self.hooks}
        classes: dict[type, None] = {}
        for owner in owners:
            name, attributes = type(owner).__qualname__, vars(owner)
            yield Slot("of", owner, type, f"the class of a `{name}`", owner), type(owner)
            yield Slot("of", owner, vars, f"`__dict__` of a `{name}`", owner), attributes
            classes.update(dict.fromkeys(type(owner).__mro__))
            for kind in _MODULE_DICTS + _HOOKS if isinstance(owner, nn.Module) else ():
                entries = attributes.get(kind)
                if entries and (kind in _MODULE_DICTS or id(entries) in hooks):
                    yield Slot("item", attributes, kind, f"`{kind}` of a `{name}`", owner), entries
        for kind in classes:
            yield from _methods(kind)
        for fn in self.functions:
            yield Slot("of", fn, code_of, f"the code of `{fn.__qualname__}`", None), fn.__code__

    def tensors(self) -> Iterator[tuple[Slot, Tensor]]:
        """The slots that hold tensors."""
        for slot, value in self.held.values():
            if isinstance(value, Tensor):
                yield slot, value


def walk(roots: Iterable[tuple[str, object]]) -> Walk:
    """Find all that the roots reach. Costs a few microseconds for each object visited.

    Code of installed libraries is not read for the globals it names: a tensor that only such code
    reaches is held and watched by its address.

    Args:
        roots: (name, object) pairs: the callable, and arguments compared by identity.
    """
    found = Walk()
    roots = list(roots)
    tops = {id(value) for _, value in roots}
    seen: set[int] = set()
    # Breadth first, so that names are short, and without recursion, so that chains may be long.
    queue: deque[tuple[str, object, Slot | None]] = deque((n, value, None) for n, value in roots)
    while queue:
        name, value, via = queue.popleft()
        if id(value) in seen or is_plain(value):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and id(value) not in tops:
            found.hooks += [value._forward_hooks, value._forward_pre_hooks]
        elif isinstance(value, types.FunctionType):
            found.names |= names_read(value.__code__)
            found.functions.append(value)
        found.owned += [(attributes, value) for attributes in _dicts(value)]
        for slot in _slots(name, value, found):
            content = slot.read()
            if content is MISSING:
                continue
            slot = slot._replace(via=via)
            found.held[slot.id] = (slot, content)
            if not isinstance(content, Tensor):
                queue.append((slot.name, content, slot))
        queue.extend((*inside, via) for inside in _inside(name, value))
    return found


def code_of(fn: types.FunctionType) -> types.CodeType:
    """The code of a function, which can be replaced in place."""
    return fn.__code__


def defaults_of(fn: types.FunctionType) -> tuple[Any, ...] | None:
    return fn.__defaults__


def keyword_defaults_of(fn: types.FunctionType) -> dict[str, Any] | None:
    return fn.__kwdefaults__


def _methods(kind: type) -> Iterator[tuple[Slot, object]]:
    """The methods of a class; of an installed one, which has hundreds, the forward alone."""
    if kind in (nn.Module, object):
        return
    # A class shows its dict by a proxy; the dict itself can tell that it changes.
    members = cast(dict[str, object], gc.get_referents(vars(kind))[0])
    module = sys.modules.get(kind.__module__)
    library = module is None or _is_library_module(module)
    for key in ("forward",) if library else list(members):
        member = members.get(key)
        if isinstance(member, types.FunctionType | property | staticmethod | classmethod):
            yield Slot("item", members, key, f"`{kind.__qualname__}.{key}`", kind), member


def _dicts(value: object) -> list[dict[str, Any]]:
    """The dicts that hold the attributes of an object or module."""
    if isinstance(value, nn.Module):
        inner = [value.__dict__.get(kind) for kind in _MODULE_DICTS]
        return [value.__dict__, *(entries for entries in inner if isinstance(entries, dict))]
    plain = isinstance(value, dict | list | deque | tuple | functools.partial)
    return [vars(value)] if _is_object(value) and not plain else []


def _slots(name: str, value: object, found: Walk) -> Iterator[Slot]:
    """The slots of one object."""
    if isinstance(value, nn.Module):
        yield from _module_slots(name, value)
    elif isinstance(value, dict):
        mapping = cast(dict[Any, object], value)
        found.containers[id(mapping)] = (mapping, name, len(mapping))
        for key in list(mapping):
            yield Slot("item", mapping, key, f"{name}[{_short(key)}]", None)
    elif isinstance(value, list | deque):
        items = cast(list[object], value)
        found.containers[id(items)] = (items, name, len(items))
        for index in range(len(items)):
            yield Slot("item", items, index, f"{name}[{index}]", None)
    elif isinstance(value, types.FunctionType):
        yield from _function_slots(name, value)
    elif isinstance(value, functools.partial):
        bound = cast(functools.partial[object], value)
        for index in range(len(bound.args)):
            yield Slot("item", bound.args, index, f"{name}.args[{index}]", None)
        for key in bound.keywords:
            yield Slot("item", bound.keywords, key, f"{name}.keywords[{key!r}]", None)
    elif isinstance(value, tuple):
        for index in range(len(cast(tuple[object, ...], value))):
            yield Slot("item", value, index, f"{name}[{index}]", None)
    elif _is_object(value):
        for key in list(vars(value)):
            yield Slot("item", vars(value), key, f"{name}.{key}", value)


def _module_slots(name: str, module: nn.Module) -> Iterator[Slot]:
    attributes = module.__dict__
    prefix = f"{name}." if name else ""
    for kind in _MODULE_DICTS:
        entries = attributes.get(kind)
        if isinstance(entries, dict):
            for key in cast(dict[str, object], entries):
                yield Slot("item", entries, key, f"{prefix}{key}", module)
    for key in list(attributes):
        if key not in _MODULE_DICTS and not key.startswith(("_forward_", "_backward_", "_state_")):
            yield Slot("item", attributes, key, f"{prefix}{key}", module)


def _function_slots(name: str, fn: types.FunctionType) -> Iterator[Slot]:
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        yield Slot("cell", cell, None, variable, None)
    if fn.__defaults__:
        yield Slot("of", fn, defaults_of, f"{name}.__defaults__", None)
    if fn.__kwdefaults__:
        yield Slot("of", fn, keyword_defaults_of, f"{name}.__kwdefaults__", None)
    if _is_library(fn.__code__):
        return
    names = set(names_read(fn.__code__))
    for variable in names:
        if variable in fn.__globals__ and not variable.startswith("__"):
            value = fn.__globals__[variable]
            if isinstance(value, types.ModuleType):
                if not _is_library_module(value):
                    for key in names & vars(value).keys():
                        yield Slot("item", vars(value), key, f"{variable}.{key}", None)
            elif not isinstance(value, type):
                yield Slot("item", fn.__globals__, variable, variable, None)


def _inside(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What else an object leads to: the code that its class runs."""
    wrapped = getattr(value, "__wrapped__", None) if not isinstance(value, nn.Module) else None
    if wrapped is not None:
        yield name, wrapped
    if isinstance(value, types.MethodType):
        # A method of a plain object reads its attributes as the class's code does.
        yield "self" if not isinstance(value.__self__, nn.Module) else "", value.__self__
        yield name, value.__func__
    elif isinstance(value, nn.Module) or _is_object(value):
        for kind in type(value).__mro__:
            if not kind.__module__.startswith(("torch", "builtins", "onelaunch")):
                for key, member in vars(kind).items():
                    function = isinstance(member, types.FunctionType)
                    # The object is made: its `__init__` names all attributes and reads none.
                    if function and key != "__init__" and not _is_library(member.__code__):
                        yield member.__qualname__, member


def _is_object(value: object) -> bool:
    """Whether to read the attributes: an instance of somebody's class, with a `__dict__`."""
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | Tensor):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(_UNWALKED)


@functools.lru_cache(maxsize=4096)
def names_read(code: types.CodeType) -> frozenset[str]:
    """The global and attribute names in a function's code, nested functions included.

    Strings that could be names count too, for `getattr` and `hasattr`.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        if isinstance(constant, types.CodeType):
            names |= names_read(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def attributes_read(kind: type) -> frozenset[str]:
    """The names that methods of a class, `__init__` apart, could read of an instance."""
    names: set[str] = {"training", "forward"}
    for parent in kind.__mro__:
        if parent in (nn.Module, object):
            continue
        for key, member in vars(parent).items():
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if key != "__init__" and isinstance(function, types.FunctionType):
                names |= names_read(function.__code__)
    return frozenset(names)


def _is_library(code: types.CodeType) -> bool:
    return _is_installed(code.co_filename)


def _is_library_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or _is_installed(file)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STANDARD)


def _short(key: object) -> str:
    text = repr(key) if not isinstance(key, Tensor) else f"tensor {tuple(key.shape)}"
    return text if len(text) < 40 else text[:37] + "..."


class Change(NamedTuple):
    """A slot whose content the callable replaced."""

    slot: Slot
    before: object
    after: object


def changes(before: Walk, after: Walk) -> list[Change]:
    """What differs between two walks of the same roots."""
    found: list[Change] = []
    for key, (slot, value) in after.held.items():
        old = before.held.get(key, (slot, MISSING))[1]
        if old is not value and not (is_plain(old) and Constant(old).matches(value)):
            found.append(Change(slot, old, value))
    for key, (slot, value) in before.held.items():
        if key not in after.held and slot.read() is MISSING:
            found.append(Change(slot, value, MISSING))
    return found


def restore(found: Iterable[Change]) -> None:
    """Undo changes, as after a capture that failed."""
    for change in found:
        if change.slot.read() is change.after:
            change.slot.write(change.before)


def is_state(value: object) -> bool:
    """Whether a change of this value could change what the callable computes."""
    return isinstance(value, Tensor | nn.Module | torch.Generator) or is_plain(value)
