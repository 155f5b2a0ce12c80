"""What a callable can reach behind its arguments: parameters, attributes, closures, globals.

A graph reads memory by address and repeats the branches that Python took, so everything that led it
there is part of what must be unchanged. `walk` finds the places (slots) and what they hold;
`guard.StateGuard` watches those that mattered.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.names import attributes_read, names_read
from onelaunch.slots import (
    MISSING,
    Slot,
    code_of,
    defaults_of,
    gradient_of,
    keyword_defaults_of,
)
from onelaunch.tree import Constant, is_plain

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_LISTED_ANEW = ("modules_buffers", "named_module_buffers")
"""Which DDP makes at each forward, of buffers that are reached without them."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FORWARD_HOOKS = _HOOKS[:2]
_MODULES: Any = nn.modules.module
_UNWALKED = ("torch._", "torch.cuda", "torch.utils", "threading", "logging", "onelaunch")
_INSTALLED = (sysconfig.get_path("stdlib"), "<frozen", __file__.removesuffix("state.py"))
"""Where code is nobody's own: the standard library's, and onelaunch's in a checkout too."""


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
    """The dicts of hooks of every submodule, and those of all modules; those of the graphed module
    itself run outside. Without grad mode no backward runs, and those of backwards do not count."""
    functions: list[types.FunctionType] = field(default_factory=lambda: cast(Any, []))
    """The functions whose code was read."""

    def is_read(self, slot: Slot) -> bool:
        """Whether the callable's code names what the slot holds, or holds what holds it."""
        if slot.owner is not None:
            return slot.key in self.names or slot.key in unwalked_names(type(slot.owner))
        if id(slot.holder) in self.containers:
            return slot.via is None or self.is_read(slot.via)
        return True

    def sized(self) -> Iterator[tuple[Any, frozenset[str] | None]]:
        """What must not grow or shrink: containers, and dicts of attributes, for which only the
        names given matter."""
        for attributes, owner in self.owned:
            outer = not isinstance(owner, nn.Module) or attributes is owner.__dict__
            names = self.names | unwalked_names(type(owner))
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
            if isinstance(owner, type):
                classes[owner] = None
                continue
            name, attributes = type(owner).__qualname__, vars(owner)
            yield Slot("of", owner, type, f"the class of a `{name}`", owner), type(owner)
            # A thread-local object has a dict for each thread.
            how = "of" if type(owner).__dictoffset__ else "contents"
            yield Slot(how, owner, vars, f"`__dict__` of a `{name}`", owner), attributes
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


_LEAVES = frozenset({bool, int, float, str, type(None)})
"""Types of most values that a walk meets, which lead nowhere."""


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
    kinds: set[type] = set()
    hooked = _HOOKS if torch.is_grad_enabled() else _FORWARD_HOOKS
    # Breadth first, so that names are short, and without recursion, so that chains may be long.
    queue: deque[tuple[str, object, Slot | None]] = deque((n, value, None) for n, value in roots)
    methods: list[tuple[str, types.FunctionType, Slot | None]] = []
    while queue or _named(methods, found.names, queue):
        name, value, via = queue.popleft()
        if id(value) in seen or is_plain(value):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and id(value) not in tops:
            if not found.hooks:
                found.hooks += [getattr(_MODULES, f"_global{kind}") for kind in hooked]
            found.hooks += [value.__dict__[kind] for kind in hooked]
            hooks = [h for kind in hooked for h in value.__dict__[kind].values()]
            queue.extend((f"a hook of {name}", hook, None) for hook in hooks)
        elif isinstance(value, types.FunctionType):
            found.names |= names_read(value.__code__)
            found.functions.append(value)
        if isinstance(value, nn.Module) and type(value) not in kinds:
            kinds.add(type(value))  # it may be a library's, whose functions are not read
            found.names |= attributes_read(type(value))
        found.owned += [(attributes, value) for attributes in _dicts(value)]
        for slot in _slots(name, value, found, via):
            content = slot.read()
            if isinstance(content, Tensor) and content.is_leaf and content.grad is not None:
                gradient = Slot("contents", content, gradient_of, f"{slot.name}.grad", None, slot)
                found.held[gradient.id] = (gradient, content.grad)
            if content is MISSING:
                continue
            if via is not None and slot.via is None:
                slot = Slot(*slot[:5], via)  # `_replace` takes three times as long
            found.held[slot.id] = (slot, content)
            if not isinstance(content, Tensor) and type(content) not in _LEAVES:
                queue.append((slot.name, content, slot))
        for inside_name, inside in _inside(name, value):
            # Of a class only what the callable's code names: `fit` may read what `step` does not.
            waits = isinstance(value, type) and isinstance(inside, types.FunctionType)
            to = methods if waits else queue
            to.append((inside_name, cast(Any, inside), via))
    return found


def _named(
    methods: list[tuple[str, types.FunctionType, Slot | None]],
    names: set[str],
    queue: deque[tuple[str, object, Slot | None]],
) -> bool:
    """Move the methods that are named by code read so far, or are called by Python, to `queue`."""
    known = [m for m in methods if m[1].__name__ in names or m[1].__name__.startswith("__")]
    methods[:] = [m for m in methods if m not in known]
    queue.extend(known)
    return bool(known)


def _methods(kind: type) -> Iterator[tuple[Slot, object]]:
    """The methods of a class; of an installed one, which has hundreds, the forward alone."""
    if kind in (nn.Module, object):
        return
    members = _members(kind)
    for key in ("forward",) if is_library_class(kind) else list(members):
        member = members.get(key)
        if isinstance(member, types.FunctionType | property | staticmethod | classmethod):
            yield Slot("item", members, key, f"`{kind.__qualname__}.{key}`", kind), member


def _members(kind: type) -> dict[str, object]:
    """A class shows its dict by a proxy; the dict itself can tell that it changes."""
    return cast(dict[str, object], gc.get_referents(vars(kind))[0])


@functools.lru_cache(maxsize=1024)
def unwalked_names(kind: type) -> frozenset[str]:
    """The names that methods of a class could read of an instance, of those which `walk` does not
    read: the methods of modules, and of classes of installed packages."""
    if issubclass(kind, nn.Module):
        return attributes_read(kind)
    names: set[str] = set()
    for parent in kind.__mro__:
        if is_library_class(parent):
            names |= attributes_read(parent)
    return frozenset(names)


def is_library_class(kind: type) -> bool:
    """Whether a class comes from an installed package."""
    module = sys.modules.get(kind.__module__)
    return module is None or _is_library_module(module)


def _class_slots(kind: type) -> Iterator[Slot]:
    """The attributes of somebody's class that are values."""
    members = {} if is_library_class(kind) else _members(kind)
    for key, member in list(members.items()):
        if not key.startswith("__") and not hasattr(type(member), "__get__"):
            yield Slot("item", members, key, f"{kind.__qualname__}.{key}", kind)


def _contents(name: str, value: Any, found: Walk) -> Iterator[Slot]:
    """What is in a value that has neither items nor a dict: a set, an array, ``__slots__``."""
    if isinstance(value, set):
        held = cast(set[object], value)
        found.containers[id(held)] = (held, name, len(held))
        if is_plain(frozenset(held)):
            yield Slot("contents", held, frozenset, f"what `{name}` holds", None)
    elif isinstance(value, bytearray):
        yield Slot("contents", value, bytes, name, None)
    elif isinstance(value, contextvars.ContextVar):
        yield Slot("contents", value, contextvars.ContextVar.get, name, None)
    elif type(value).__module__ in ("numpy", "array") and len(memoryview(value).cast("B")) <= 1024:
        yield Slot("contents", value, type(value).tobytes, name, None)
    for kind in type(value).__mro__:
        for key, member in list(vars(kind).items()) if not is_library_class(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                yield Slot("contents", value, member.__get__, f"{name}.{key}", None)


def _dicts(value: object) -> list[dict[str, Any]]:
    """The dicts that hold the attributes of an object or module."""
    if isinstance(value, nn.Module):
        inner = [value.__dict__.get(kind) for kind in _MODULE_DICTS]
        return [value.__dict__, *(entries for entries in inner if isinstance(entries, dict))]
    plain = isinstance(value, dict | list | deque | tuple | functools.partial)
    return [vars(value)] if _is_object(value) and not plain else []


def _slots(name: str, value: object, found: Walk, via: Slot | None) -> Iterator[Slot]:
    """The slots of one object, to which `via` led; those of modules, which are most, say so."""
    if isinstance(value, nn.Module):
        yield from _module_slots(name, value, via)
    elif isinstance(value, dict | types.MappingProxyType):
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
    elif isinstance(value, type):
        yield from _class_slots(value)
    elif _is_object(value):
        for key in list(vars(value)):
            yield Slot("item", vars(value), key, f"{name}.{key}", value)
        yield from _contents(name, value, found)
    elif not isinstance(value, types.ModuleType | types.MethodType | Tensor):
        yield from _contents(name, value, found)


_NOT_READ = frozenset(
    key
    for key in vars(nn.Module())
    if key.startswith(("_forward_", "_backward_", "_state_", "_load_state_", "_non_persistent_"))
)
"""Of what `nn.Module` gives to each module: hooks, and what only saving and loading read."""


def _module_slots(name: str, module: nn.Module, via: Slot | None) -> Iterator[Slot]:
    attributes = module.__dict__
    prefix = f"{name}." if name else ""
    for kind in _MODULE_DICTS:
        entries = attributes.get(kind)
        if isinstance(entries, dict):
            for key in cast(dict[str, object], entries):
                yield Slot("item", entries, key, f"{prefix}{key}", module, via)
    derived = _LISTED_ANEW if isinstance(module, nn.parallel.DistributedDataParallel) else ()
    for key in list(attributes):
        if key not in _MODULE_DICTS and key not in derived and key not in _NOT_READ:
            yield Slot("item", attributes, key, f"{prefix}{key}", module, via)


def _function_slots(name: str, fn: types.FunctionType) -> Iterator[Slot]:
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        yield Slot("cell", cell, None, variable, None)
    if fn.__defaults__:
        yield Slot("of", fn, defaults_of, f"{name}.__defaults__", None)
    if fn.__kwdefaults__:
        yield Slot("of", fn, keyword_defaults_of, f"{name}.__kwdefaults__", None)
    if _is_library(fn.__code__):
        return
    for key in vars(fn).keys() - {"__wrapped__"}:
        yield Slot("item", vars(fn), key, f"{name}.{key}", None)
    names = set(names_read(fn.__code__))
    for variable in names:
        if variable in fn.__globals__ and not variable.startswith("__"):
            value = fn.__globals__[variable]
            if isinstance(value, types.ModuleType):
                if not _is_library_module(value):
                    for key in names & vars(value).keys():
                        yield Slot("item", vars(value), key, f"{variable}.{key}", None)
            else:
                yield Slot("item", fn.__globals__, variable, variable, None)


def _inside(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What else an object leads to: the code that its class runs."""
    if not isinstance(value, nn.Module | type):
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__") if _has_dict(value) else None
        if wrapped is not None:
            yield name, wrapped
    if isinstance(value, types.MethodType):
        # A method of a plain object reads its attributes as the class's code does.
        yield "self" if not isinstance(value.__self__, nn.Module) else "", value.__self__
        yield name, value.__func__
    elif isinstance(value, type):
        for kind in value.__mro__:
            # Of an installed dataclass the generated methods would name every attribute.
            if not kind.__module__.startswith("builtins") and not is_library_class(kind):
                yield kind.__qualname__, kind
                for key, member in vars(kind).items():
                    function = getattr(member, "fget", getattr(member, "__func__", member))
                    # The object is made: its `__init__` names all attributes and reads none.
                    made_of = isinstance(function, types.FunctionType) and key != "__init__"
                    if made_of and not _is_library(function.__code__):
                        yield function.__qualname__, function
    elif not isinstance(value, types.ModuleType | types.FunctionType | Tensor):
        yield type(value).__qualname__, type(value)


def _is_object(value: object) -> bool:
    """Whether to read the attributes: an instance of somebody's class, with a `__dict__`."""
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | Tensor):
        return False
    return _has_dict(value) and not type(value).__module__.startswith(_UNWALKED)


def _has_dict(value: object) -> bool:
    """Whether there is a `__dict__`, asked of the class: `__getattr__` may do anything."""
    kinds = type(value).__mro__
    return isinstance(value, threading.local) or any("__dict__" in vars(k) for k in kinds)


def _is_library(code: types.CodeType) -> bool:
    return is_installed(code.co_filename)


def _is_library_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__":  # a notebook's has no file
        return False
    return file is None or is_installed(file)


def is_installed(file: str) -> bool:
    """Whether code is of an installed package."""
    return "site-packages" in file or "dist-packages" in file or file.startswith(_INSTALLED)


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
