"""The places that one object holds, and the code that it leads to."""

from __future__ import annotations

import contextvars
import enum
import functools
import gc
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.call.tree import is_plain
from onelaunch.frames.members import behind, functions_in, names_read
from onelaunch.frames.origins import is_installed, is_machinery
from onelaunch.frames.peek import MOST, attributes_of
from onelaunch.frames.reads import Owner, Reads, raise_uses
from onelaunch.frames.stack import Use
from onelaunch.state.slots import (
    MISSING,
    ScriptAttribute,
    Slot,
    arguments_of,
    defaults_of,
    function_of,
    keyword_defaults_of,
    keywords_of,
)

MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_LISTED_ANEW = ("modules_buffers", "named_module_buffers")
"""Which DDP makes at each forward, of buffers that are reached without them."""
_UNWALKED = ("torch._", "torch.cuda", "torch.utils", "threading", "logging", "onelaunch")
MOST_BYTES = 1 << 14  # of a numpy array that is compared at each call, at 0.1 us for a KB


class Untouched(NamedTuple):
    """Attributes of a module that no code was seen to read or store: some 20 of each.

    Attributes:
        holder: the module's `__dict__`.
        values: what they are.
    """

    name: str
    module: nn.Module
    holder: dict[str, object]
    values: dict[str, object]
    via: Slot | None

    def slot(self, key: str) -> Slot:
        """The place of one."""
        return Slot("item", self.holder, key, f"{self.name}{key}", self.module, self.via)

    def changed(self) -> bool:
        """Whether another object is in one of them now."""
        return any(self.holder.get(key, MISSING) is not old for key, old in self.values.items())


class Contents:
    """What objects hold, as far as a callable was seen to read it; before it has run, all of it.

    Args:
        reads: what was seen, or None.
    """

    def __init__(self, reads: Reads | None) -> None:
        self.reads = reads
        self.containers: dict[int, tuple[Any, str, int]] = {}
        """id -> (container, name, length), of lists, dicts, sets and deques."""
        self.untouched: dict[int, Untouched] = {}
        """id of a module's `__dict__` -> those of its attributes that nobody was seen to touch."""
        self._met: dict[int, list[object]] = {}
        """id of a container of which items were read, or stored -> their keys."""
        for container, key in () if reads is None else reads.items:
            self._met.setdefault(container, []).append(key)
        self._named: dict[int, dict[str, Use]] = {}
        """id of a class -> what was read of it and of its instances."""
        for value in () if reads is None else reads.alive():
            owner = reads and reads.of(value)
            kinds = list(type(value).__mro__)
            kinds += value.__mro__ if isinstance(value, type) else ()
            for kind in kinds:
                names = self._named.setdefault(id(kind), {})
                raise_uses(names, owner.names if owner else {})

    def names_of(self, kind: type) -> dict[str, Use]:
        """What was read of a class, or of its instances."""
        return self._named.get(id(kind), {})

    def _use(self, owner: Owner | None, name: object) -> Use | None:
        """What becomes of an attribute; None where nobody was seen to touch it."""
        if self.reads is None:
            return Use.READ
        if owner is None:
            return None
        return Use.READ if owner.opaque else owner.names.get(cast(str, name))

    def of(
        self, name: str, value: object, via: Slot | None, use: Use = Use.READ
    ) -> Iterator[tuple[Slot, Use | None]]:
        """The places of one object, to which `via` led, whose use is given."""
        if isinstance(value, nn.Module):
            yield from self._of_module(name, value, via)
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(name, value)
        elif isinstance(value, functools.partial):
            yield Slot("contents", value, function_of, name, None), Use.READ
            yield Slot("contents", value, arguments_of, f"{name}.args", None), Use.READ
            yield Slot("contents", value, keywords_of, f"{name}.keywords", None), Use.READ
            yield from self._attributes(name, value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, types.ModuleType):
            yield from self._of_python_module(name, value)
        elif not isinstance(value, types.MethodType | Tensor):
            yield from self._items(name, value, use)
            yield from self._attributes(name, value)

    def _items(
        self, name: str, value: Any, use: Use = Use.READ
    ) -> Iterator[tuple[Slot, Use | None]]:
        """What is in a container."""
        if isinstance(value, dict | types.MappingProxyType):
            mapping = cast(dict[Any, object], value)
            self.containers[id(mapping)] = (mapping, name, len(mapping))
            # One that has not been there may come: `try: d["scale"]`, or a class's `__missing__`.
            missed = [key for key in self._met.get(id(mapping), ()) if key not in mapping]
            for key in (*mapping, *missed):
                text = f"{name}[{_short(key)}]"
                slot = Slot("item", mapping, key, text, None)
                known = self.reads if id(mapping) in self._met and use is Use.ITEMS else None
                yield slot, Use.READ if known is None else known.items.get(slot.id)
            if isinstance(value, defaultdict):
                factory = f"{name}.default_factory"
                yield Slot("contents", value, _factory_of, factory, None), Use.READ
        elif isinstance(value, list | deque | tuple):
            items = cast(Any, value)
            count = tuple.__len__(items) if isinstance(value, tuple) else len(items)
            if not isinstance(value, tuple):
                self.containers[id(items)] = (items, name, count)
            for index in range(count):
                yield Slot("item", items, index, f"{name}[{index}]", None), Use.READ
        elif isinstance(value, set):
            held = cast(set[object], value)
            self.containers[id(held)] = (held, name, len(held))
            # A registry of classes grows, which its length tells; there may be hundreds.
            registry = bool(held) and all(isinstance(one, type) for one in held)
            if len(held) <= MOST and not registry:
                how = frozenset if is_plain(frozenset(held)) else _members_of
                yield Slot("contents", held, how, f"what `{name}` holds", None), Use.READ
        elif isinstance(value, bytearray):
            yield Slot("contents", value, bytes, name, None), Use.READ
        elif isinstance(value, contextvars.ContextVar):
            yield Slot("contents", value, contextvars.ContextVar.get, name, None), Use.READ
        elif _is_array(value) and _nbytes(value) <= MOST_BYTES:
            yield Slot("contents", value, type(value).tobytes, name, None), Use.READ

    def _attributes(self, name: str, value: Any) -> Iterator[tuple[Slot, Use | None]]:
        """What an instance of somebody's class has in its `__dict__` and its slots."""
        if type(value).__module__.startswith(_UNWALKED):
            return
        owner = self.reads and self.reads.expected(value)
        for key in list(attributes_of(value) or ()):
            yield (
                Slot("item", attributes_of(value), key, f"{name}.{key}", value),
                self._use(owner, key),
            )
        for kind in type(value).__mro__:
            for key, member in list(vars(kind).items()) if not is_library_class(kind) else ():
                if isinstance(member, types.MemberDescriptorType):
                    slot = Slot("contents", value, member.__get__, f"{name}.{key}", None)
                    yield slot, self._use(owner, key)

    def _of_module(
        self, name: str, module: nn.Module, via: Slot | None
    ) -> Iterator[tuple[Slot, Use | None]]:
        attributes = module.__dict__
        owner = self.reads and self.reads.expected(module)
        prefix = f"{name}." if name else ""
        for kind in MODULE_DICTS:
            entries = attributes.get(kind)
            if isinstance(entries, dict):
                for key in cast(dict[str, object], entries):
                    yield Slot("item", entries, key, f"{prefix}{key}", module, via), Use.READ
        derived = _LISTED_ANEW if isinstance(module, nn.parallel.DistributedDataParallel) else ()
        untouched: dict[str, object] = {}
        for key, value in list(attributes.items()):
            if key in MODULE_DICTS or key in derived or (self.reads is None and key in _NOT_READ):
                continue
            use = self._use(owner, key)
            if use is None and not isinstance(value, Tensor):  # whose memory may be known otherwise
                untouched[key] = value
            else:
                yield Slot("item", attributes, key, f"{prefix}{key}", module, via), use
        if untouched:
            self.untouched[id(attributes)] = Untouched(prefix, module, attributes, untouched, via)
        if isinstance(module, torch.jit.ScriptModule):
            yield from _of_script(prefix, module)

    def _of_function(self, name: str, fn: types.FunctionType) -> Iterator[tuple[Slot, Use | None]]:
        reads, code = self.reads, fn.__code__
        owner = reads and reads.expected(fn)
        if not is_installed(code.co_filename):
            for key in vars(fn).keys() - {"__wrapped__"}:
                yield Slot("item", vars(fn), key, f"{name}.{key}", None), self._use(owner, key)
        if reads is not None and not (code in reads.codes or is_machinery(code.co_filename)):
            return  # it did not run
        for variable, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
            use = Use.READ if reads is None else reads.variables.get((code, variable), Use.READ)
            yield Slot("cell", cell, None, variable, None), use
        if fn.__defaults__:
            yield Slot("of", fn, defaults_of, f"{name}.__defaults__", None), Use.READ
        if fn.__kwdefaults__:
            yield Slot("of", fn, keyword_defaults_of, f"{name}.__kwdefaults__", None), Use.READ
        if reads is None and not is_installed(code.co_filename):  # it may read all that it names
            names = dict.fromkeys(names_read(code), Use.READ)
            yield from self.of_globals(fn.__globals__, names)

    def of_globals(
        self, namespace: dict[str, Any], names: dict[str, Use]
    ) -> Iterator[tuple[Slot, Use]]:
        """The globals of a module that are read; of an installed one those that may change."""
        installed = is_installed(str(namespace.get("__file__") or ""))
        for name in list(names):
            # One that has not been there may come, and hide a builtin.
            fixed = installed and _is_fixed(namespace.get(name, _is_fixed))
            if not (fixed or name.startswith("__")):
                yield Slot("item", namespace, name, name, None), names[name]

    def _of_python_module(self, name: str, module: types.ModuleType) -> Iterator[tuple[Slot, Use]]:
        """What was read of a module's attributes: `settings.model.scale`."""
        owner = self.reads and self.reads.of(module)
        installed = is_library_module(module)
        for key, use in owner.names.items() if owner else ():
            # One that has not been there may come: `getattr(settings, "scale", 1)`.
            if not (installed and _is_fixed(vars(module).get(key, _is_fixed))):
                yield Slot("item", vars(module), key, f"{name}.{key}", None), use

    def _of_class(self, kind: type) -> Iterator[tuple[Slot, Use | None]]:
        """The attributes of a class; of an installed one those that may change."""
        installed = is_library_class(kind)
        members, names = members_of(kind), self.names_of(kind)
        for key, member in list(members.items()):
            if self.reads is None:
                plain = not (key.startswith("__") or hasattr(type(member), "__get__"))
                use = Use.READ if plain and not installed else None
            else:
                use = names.get(key, Use.READ if self._ran(member) else None)
            if use is not None and not (installed and key != "forward" and _is_fixed(member)):
                yield Slot("item", members, key, f"{kind.__qualname__}.{key}", kind), use
        if isinstance(kind, enum.EnumMeta) and not installed:
            yield from self._items(kind.__qualname__, vars(kind)["_member_map_"])

    def _ran(self, member: object) -> bool:
        """Whether a member of a class is, or wraps, code that ran: Python calls some by itself."""
        codes = self.reads.codes if self.reads is not None else ()
        return any(fn.__code__ in codes for fn in functions_in(member))

    def code_of(self, name: str, value: object) -> Iterator[tuple[str, object]]:
        """What else an object leads to: its class, and code behind decorators."""
        if isinstance(value, types.MethodType):
            yield "self" if not isinstance(value.__self__, nn.Module) else "", value.__self__
            yield name, value.__func__
        elif isinstance(value, type):
            for kind in (*value.__mro__, type(value)):
                if kind.__module__ != "builtins":
                    yield kind.__qualname__, kind
            if self.reads is None and not is_library_class(value):
                for key, member in vars(value).items():
                    for function in functions_in(member):
                        yield f"{value.__qualname__}.{key}", function
        elif not isinstance(value, types.ModuleType | Tensor):
            for inner in behind(value):
                yield name, inner
            wrapped = (attributes_of(value) or {}).get("__wrapped__")
            if wrapped is not None and not isinstance(value, nn.Module):
                yield name, wrapped
            if not isinstance(value, types.FunctionType):
                yield type(value).__qualname__, type(value)


def _factory_of(value: defaultdict[Any, Any]) -> object:
    return value.default_factory


def _members_of(value: set[object]) -> frozenset[int]:
    """Which objects are in a set, told without keeping any."""
    return frozenset(map(id, value))


def _is_array(value: object) -> bool:
    return isinstance(value, memoryview) or type(value).__module__ in ("numpy", "array")


def _nbytes(value: Any) -> int:
    try:
        return memoryview(value).nbytes
    except (TypeError, ValueError, BufferError):
        return MOST_BYTES + 1


_NOT_READ = frozenset(
    key
    for key in vars(nn.Module())
    if key.startswith(("_forward_", "_backward_", "_state_", "_load_state_", "_non_persistent_"))
)
"""Of what `nn.Module` gives to each module: hooks, and what only saving and loading read."""


def _of_script(prefix: str, module: Any) -> Iterator[tuple[Slot, Use]]:
    """What a TorchScript module holds where Python does not: its numbers, tensors and mode."""
    inner, known = module._c, vars(module).get("_concrete_type")
    parameters: Any = torch._C.ParameterDict(inner)
    keys = [*dict(parameters.items()), "training"]
    keys += () if known is None else known.get_attributes()
    for key in dict.fromkeys(keys):
        value = inner.getattr(key)
        if is_plain(value) or isinstance(value, Tensor):
            yield Slot("contents", inner, ScriptAttribute(key), f"{prefix}{key}", None), Use.READ
    for key, part in module.named_children():
        yield from _of_script(f"{prefix}{key}.", part)


def dicts_of(value: object) -> list[dict[str, Any]]:
    """The dicts that hold the attributes of an object or module."""
    if isinstance(value, nn.Module):
        inner = [value.__dict__.get(kind) for kind in MODULE_DICTS]
        return [value.__dict__, *(entries for entries in inner if isinstance(entries, dict))]
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | Tensor):
        return []
    if type(value).__module__.startswith(_UNWALKED):
        return []
    attributes = attributes_of(value)
    return [] if attributes is None else [attributes]


def members_of(kind: type) -> dict[str, object]:
    """A class shows its dict by a proxy; the dict itself can tell that it changes."""
    return cast(dict[str, object], gc.get_referents(vars(kind))[0])


def _is_fixed(value: object) -> bool:
    """Whether what an installed package has under a name is its code, taken as it is."""
    while isinstance(value, staticmethod | classmethod):
        value = cast(Any, value).__func__
    if isinstance(value, types.FunctionType):
        return is_installed(value.__code__.co_filename)
    if isinstance(value, type):
        return is_library_class(value)
    if isinstance(value, types.ModuleType):
        return is_library_module(value)
    return hasattr(type(value), "__get__") or isinstance(value, types.BuiltinFunctionType)


def is_library_class(kind: type) -> bool:
    """Whether a class comes from an installed package."""
    name = kind.__module__ if type(kind.__module__) is str else ""
    return _is_library(name, sys.modules.get(name))


def is_library_module(module: types.ModuleType) -> bool:
    """Whether a module is of an installed package."""
    return _is_library(module.__name__, module)


def _is_library(name: str, module: types.ModuleType | None) -> bool:
    """Whether a name is of an installed package: where its module has no file, as one that was
    executed or is written in C, the packages around it tell."""
    while True:
        file = getattr(module, "__file__", None)
        if file is not None:
            return name != "__main__" and is_installed(file)
        if not name or name in sys.builtin_module_names:
            return bool(name)
        name = name.rpartition(".")[0]
        module = sys.modules.get(name)


def _short(key: object) -> str:
    text = repr(key) if not isinstance(key, Tensor) else f"tensor {tuple(key.shape)}"
    return text if len(text) < 40 else text[:37] + "..."
