"""What one object holds that a callable may read, and the code that it leads to."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onelaunch.names import functions_in, imports, names_read
from onelaunch.slots import Slot, defaults_of, keyword_defaults_of
from onelaunch.tree import is_plain

MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_LISTED_ANEW = ("modules_buffers", "named_module_buffers")
"""Which DDP makes at each forward, of buffers that are reached without them."""
_UNWALKED = ("torch._", "torch.cuda", "torch.utils", "threading", "logging", "onelaunch")
_INSTALLED = (sysconfig.get_path("stdlib"), "<frozen", __file__.removesuffix("objects.py"))
"""Where code is nobody's own: the standard library's, and onelaunch's in a checkout too."""

MOST_BYTES = 1 << 14  # of a numpy array that is compared at each call, at 0.1 us for a KB

Containers = dict[int, tuple[Any, str, int]]
"""id -> (container, name, length), of lists, dicts, sets and deques."""


def slots_of(name: str, value: object, found: Containers, via: Slot | None) -> Iterator[Slot]:
    """The slots of one object, to which `via` led; those of modules, which are most, say so.

    Args:
        found: takes the object, if it is a container.
    """
    if isinstance(value, nn.Module):
        yield from _module_slots(name, value, via)
    elif isinstance(value, dict | types.MappingProxyType):
        mapping = cast(dict[Any, object], value)
        found[id(mapping)] = (mapping, name, len(mapping))
        for key in list(mapping):
            yield Slot("item", mapping, key, f"{name}[{_short(key)}]", None)
    elif isinstance(value, list | deque):
        items = cast(list[object], value)
        found[id(items)] = (items, name, len(items))
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
    for kind in MODULE_DICTS:
        entries = attributes.get(kind)
        if isinstance(entries, dict):
            for key in cast(dict[str, object], entries):
                yield Slot("item", entries, key, f"{prefix}{key}", module, via)
    derived = _LISTED_ANEW if isinstance(module, nn.parallel.DistributedDataParallel) else ()
    for key in list(attributes):
        if key not in MODULE_DICTS and key not in derived and key not in _NOT_READ:
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
    names = names_read(fn.__code__)
    package = fn.__globals__.get("__package__") or ""
    modules: dict[str, object] = {}
    for name in imports(fn.__code__):  # from the package of the function, perhaps
        within = f"{package}.{name}".strip(".")
        modules.update((full, sys.modules[full]) for full in {name, within} & sys.modules.keys())
    for variable in names:
        if variable in fn.__globals__ and not variable.startswith("__"):
            value = fn.__globals__[variable]
            if isinstance(value, types.ModuleType):
                modules[variable] = value
            else:
                yield Slot("item", fn.__globals__, variable, variable, None)
    yield from module_globals(modules, names)


def module_globals(modules: Mapping[str, object], names: Set[str]) -> Iterator[Slot]:
    """What is named of somebody's modules, and of modules in these: `settings.model.scale`."""
    waiting, seen = list(modules.items()), set[int]()
    while waiting:
        name, module = waiting.pop()
        if not isinstance(module, types.ModuleType) or _is_library_module(module):
            continue
        if id(module) not in seen:
            seen.add(id(module))
            for key in names & vars(module).keys():
                waiting.append((f"{name}.{key}", vars(module)[key]))
                yield Slot("item", vars(module), key, f"{name}.{key}", None)


def _class_slots(kind: type) -> Iterator[Slot]:
    """The attributes of somebody's class that are values."""
    members = {} if is_library_class(kind) else members_of(kind)
    for key, member in list(members.items()):
        if not key.startswith("__") and not hasattr(type(member), "__get__"):
            yield Slot("item", members, key, f"{kind.__qualname__}.{key}", kind)


def _contents(name: str, value: Any, found: Containers) -> Iterator[Slot]:
    """What is in a value that has neither items nor a dict: a set, an array, ``__slots__``."""
    if isinstance(value, set):
        held = cast(set[object], value)
        found[id(held)] = (held, name, len(held))
        if is_plain(frozenset(held)):
            yield Slot("contents", held, frozenset, f"what `{name}` holds", None)
    elif isinstance(value, bytearray):
        yield Slot("contents", value, bytes, name, None)
    elif isinstance(value, contextvars.ContextVar):
        yield Slot("contents", value, contextvars.ContextVar.get, name, None)
    elif type(value).__module__ in ("numpy", "array") and memoryview(value).nbytes <= MOST_BYTES:
        yield Slot("contents", value, type(value).tobytes, name, None)
    for kind in type(value).__mro__:
        for key, member in list(vars(kind).items()) if not is_library_class(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                yield Slot("contents", value, member.__get__, f"{name}.{key}", None)


def dicts_of(value: object) -> list[dict[str, Any]]:
    """The dicts that hold the attributes of an object or module."""
    if isinstance(value, nn.Module):
        inner = [value.__dict__.get(kind) for kind in MODULE_DICTS]
        return [value.__dict__, *(entries for entries in inner if isinstance(entries, dict))]
    plain = isinstance(value, dict | list | deque | tuple | functools.partial)
    return [vars(value)] if _is_object(value) and not plain else []


def methods_of(kind: type) -> Iterator[tuple[Slot, object]]:
    """The methods of a class; of an installed one, which has hundreds, the forward alone."""
    if kind in (nn.Module, object):
        return
    members = members_of(kind)
    for key in ("forward",) if is_library_class(kind) else list(members):
        member = members.get(key)
        if isinstance(member, types.FunctionType | property | staticmethod | classmethod):
            yield Slot("item", members, key, f"`{kind.__qualname__}.{key}`", kind), member


def members_of(kind: type) -> dict[str, object]:
    """A class shows its dict by a proxy; the dict itself can tell that it changes."""
    return cast(dict[str, object], gc.get_referents(vars(kind))[0])


def code_in(name: str, value: object) -> Iterator[tuple[str, object]]:
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
                    # The object is made: its `__init__` names all attributes and reads none.
                    for function in functions_in(member) if key != "__init__" else ():
                        if not _is_library(function.__code__):
                            yield f"{kind.__qualname__}.{key}", function
                    if hasattr(type(member), "__get__") and not is_library_class(type(member)):
                        yield f"{kind.__qualname__}.{key}", member
    elif not isinstance(value, types.ModuleType | types.FunctionType | Tensor):
        yield type(value).__qualname__, type(value)


@functools.lru_cache(maxsize=4096)
def attributes_read(kind: type) -> frozenset[str]:
    """The names that methods of a class, `__init__` apart, could read of an instance. Behind
    decorators only those of a library: a walk reads the code of others that are called."""
    names: set[str] = {"training", "forward"}
    for parent in kind.__mro__:
        if parent in (nn.Module, object):
            continue
        depth = None if is_library_class(parent) else 1
        for key, member in vars(parent).items():
            for function in functions_in(member)[:depth] if key != "__init__" else ():
                names |= names_read(function.__code__)
    return frozenset(names)


def library_calls(kind: type, named: Set[str]) -> frozenset[str]:
    """The methods of a class that its base classes of installed packages may call, where code
    names these of its attributes."""
    if issubclass(kind, torch.autograd.Function):
        return _OF_FUNCTIONS  # which C++ calls
    if issubclass(kind, _CALLED_BY_NAME):
        return frozenset()
    return _called(kind, frozenset(named & _library_members(kind).keys()))


@functools.lru_cache(maxsize=1024)
def _library_members(kind: type) -> dict[str, object]:
    bases = [parent for parent in kind.__mro__ if is_library_class(parent)]
    found = {key: member for parent in reversed(bases) for key, member in vars(parent).items()}
    found.pop("__init__", None)
    return found


@functools.lru_cache(maxsize=1024)
def _called(kind: type, named: frozenset[str]) -> frozenset[str]:
    theirs = _library_members(kind)
    called = {key for key in theirs if key in named or key.startswith("__")}
    found: set[str] = set()
    while called:
        found |= called
        functions = [f for key in called for f in functions_in(theirs[key])]
        called = {name for f in functions for name in names_read(f.__code__)} - found
        called &= theirs.keys()
    return frozenset(found)


_OF_FUNCTIONS = frozenset({"forward", "setup_context", "backward", "vjp", "jvp", "vmap"})
_CALLED_BY_NAME = (nn.Module, Optimizer, LRScheduler)
"""Base classes whose own methods, `forward` and `step` apart, are no part of what runs."""


def _is_object(value: object) -> bool:
    """Whether to read the attributes: an instance of somebody's class, with a `__dict__`."""
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | Tensor):
        return False
    return _has_dict(value) and not type(value).__module__.startswith(_UNWALKED)


def _has_dict(value: object) -> bool:
    """Whether there is a `__dict__`, asked of the class: `__getattr__` may do anything."""
    kinds = type(value).__mro__
    return isinstance(value, threading.local) or any("__dict__" in vars(k) for k in kinds)


def _short(key: object) -> str:
    text = repr(key) if not isinstance(key, Tensor) else f"tensor {tuple(key.shape)}"
    return text if len(text) < 40 else text[:37] + "..."


def is_library_class(kind: type) -> bool:
    """Whether a class comes from an installed package."""
    module = sys.modules.get(kind.__module__)
    return module is None or _is_library_module(module)


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
