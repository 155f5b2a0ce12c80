"""The slots of one object, and the code that it leads to."""

from __future__ import annotations

import builtins
import contextvars
import enum
import functools
import gc
import itertools
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from onelaunch.call.tree import is_plain
from onelaunch.call.wrappers import inner_names, is_memory
from onelaunch.errors import text_of
from onelaunch.frames.codes import MODULE_DICTS, behind, functions_in, names_read
from onelaunch.frames.loads import loads_of
from onelaunch.frames.origins import is_installed, is_machinery
from onelaunch.frames.peek import METHODS, attributes_of, is_view, object_of
from onelaunch.frames.reads import ObjectReads, Reads, raise_uses
from onelaunch.frames.stack import Use
from onelaunch.identity import id
from onelaunch.state.attributes import Attributes, SplitAttributes, is_bare
from onelaunch.state.outside import is_array, of_script, slots_of_array
from onelaunch.state.slots import (
    InnerTensor,
    Slot,
    ThreadAttribute,
    arguments_of,
    defaults_of,
    factory_of,
    function_of,
    keyword_defaults_of,
    keywords_of,
    names_in_thread,
    new_slot,
    requires_grad,
)

LEAVES = frozenset({bool, int, float, str, type(None)})
"""Types of most values that a walk meets. They have no slots."""
REMADE_BY_DDP = frozenset({"modules_buffers", "named_module_buffers"})
"""Lists of buffers that DDP makes anew at each forward. The buffers are reached without them."""
_UNWALKED = ("torch._", "torch.cuda.", "torch.utils.", "logging.", "onelaunch.")
"""Names of machinery. Its objects are walked only where code was seen to read an attribute."""
_WITHOUT_ATTRIBUTES = frozenset({tuple, list, dict, set})
_SHARED = (type, types.ModuleType)
_REGISTRY = 64
"""The most classes of a set that are compared: `type(layer) in self.quantized`."""


class Contents:
    """The slots of objects, as far as a callable was seen to read them; before it has run, all.

    Args:
        reads: the reads of the callable, or None.
    """

    def __init__(self, reads: Reads | None) -> None:
        self.reads = reads
        self.containers: dict[int, tuple[Any, str, int]] = {}
        """id -> (container, name, length), of lists, dicts, sets and deques."""
        self.untouched: dict[int, Attributes] = {}
        """id of a module's `__dict__` -> its attributes that no code was seen to read or store."""
        self.leaf_attributes: dict[int, Attributes] = {}
        """id of a module's `__dict__` -> its attributes that are read and lead nowhere: plain
        values, tuples of these, and the empty dicts of hooks. They are most of all slots."""
        self._keys: dict[int, list[object]] = {}
        """id of a container -> the keys of items that were read or stored."""
        for container, key in () if reads is None else reads.items:
            self._keys.setdefault(container, []).append(key)
        self.loose: set[str] = set() if reads is None else set(reads.loose)
        """Names of attributes that code loaded from unknown objects. An untouched attribute with
        the name counts as read, on any object."""
        self._ran_names: set[str] = set()
        for code in () if reads is None else reads.codes:
            self._ran_names.add(code.co_name)
            if not is_installed(code.co_filename):
                self.loose |= loads_of(code).loose
        self.splits: dict[type, SplitAttributes] = {}
        self._kinds: set[type] = set()
        """The classes of the objects that were read."""
        self._uses_by_class: dict[int, dict[str, Use]] = {}
        """id of a class -> uses of its attributes and of its instances'."""
        for kind, owner in () if reads is None else reads.kinds.items():
            if isinstance(kind, type):  # of instances that are gone, too
                self._kinds.add(kind)
                self._note_uses(kind.__mro__, owner.names)
        for value in () if reads is None else reads.alive():
            if isinstance(value, _SHARED) and (owner := reads and reads.of(value)):
                bases: list[type] = type.mro(value) if isinstance(value, type) else []
                self._note_uses([*type.mro(type(value)), *bases], owner.names, value)

    def is_whole(self, container: object) -> bool:
        """Return whether every item of a container counts as read. That is so if code used keys
        that are not known, or none."""
        key = id(container)
        return self.reads is None or key in self.reads.whole or key not in self._keys

    def _note_uses(
        self, kinds: Iterable[type], uses: Mapping[str, Use], owner: object = None
    ) -> None:
        """Note that attributes of a class, or of its instances, are looked for in its bases."""
        # `self.n += 1` reads the number of the class, but stores another.
        of_class = {n: Use.READ if u is Use.GROWS else u for n, u in uses.items()}
        for kind in kinds:
            raised = uses if id(kind) == id(owner) else of_class
            raise_uses(self._uses_by_class.setdefault(id(kind), {}), raised)

    def is_open(self, value: object) -> bool:
        """Return whether attributes of a class or module were read by names that are not known."""
        owner = self.reads and self.reads.of(value)
        return owner is not None and (owner.opaque or owner.asked)

    def names_of(self, kind: type) -> dict[str, Use]:
        """Return the uses of attributes of a class, or of its instances."""
        return self._uses_by_class.get(id(kind), {})

    def use(self, owner: ObjectReads | None, name: object) -> Use | None:
        """Return the use of an attribute; None if no code was seen to touch it."""
        if self.reads is None:
            return Use.READ
        use = None if owner is None else owner.names.get(cast(str, name))
        if owner is not None and (owner.opaque or (use is None and owner.asked)):
            return Use.READ
        return Use.READ if use is None and name in self.loose else use

    @property
    def reads_hooks(self) -> bool:
        """True if attributes of a dict of hooks, or of its class, were read."""
        return OrderedDict in self._kinds

    def is_unread_hooks(self, hooks: object) -> bool:
        """Return whether an empty dict of hooks has no attributes, and none was read."""
        return is_bare(hooks) and (self.reads is None or self.reads.of(hooks) is None)

    def split(self, module: nn.Module, attributes: dict[str, object]) -> SplitAttributes:
        """Return the attributes of a module by their uses, much the same for each of its class."""
        owner, kind, keys = self.reads and self.reads.expected(module), type(module), [*attributes]
        split = self.splits.get(kind)
        if split is None or not split.fits(keys, owner):
            unread = NOT_READ if self.reads is None else READ_APART
            if isinstance(module, nn.parallel.DistributedDataParallel):
                unread |= REMADE_BY_DDP
            uses = {key: self.use(owner, key) for key in keys if key not in unread}
            read = [key for key, use in uses.items() if use is Use.READ]
            untouched = [key for key, use in uses.items() if use is None]
            others = {key: use for key, use in uses.items() if use not in (None, Use.READ)}
            split = self.splits[kind] = SplitAttributes(keys, owner, read, untouched, others)
        return split

    def of(
        self, name: str, value: object, use: Use = Use.READ
    ) -> Iterator[tuple[Slot, Use | None]]:
        """Return the slots of one object, with their uses; of a module, those outside of Python.

        Args:
            use: the use of the slot that led to the object.
        """
        if isinstance(value, nn.Module):
            scripted = isinstance(value, torch.jit.ScriptModule)
            return of_script(f"{name}." if name else "", value) if scripted else iter(())
        if type(value) in _WITHOUT_ATTRIBUTES:
            return self._items(name, value, use)
        if isinstance(value, types.FunctionType):
            return self._of_function(name, value)
        if isinstance(value, functools.partial):
            return self._of_partial(name, value)  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, types.ModuleType):
            return self._of_python_module(name, value)
        if isinstance(value, METHODS) or is_view(value):
            return self._of_method(name, value)
        if isinstance(value, Tensor):
            of = self._of_tensor if is_memory(value) else self._of_compound
            return of(name, value)
        return itertools.chain(self._items(name, value, use), self._attributes(name, value))

    def has_contents(self, t: Tensor) -> bool:
        """Return whether a tensor has attributes that code put there, or looked for."""
        return bool(attributes_of(t)) or type(t) in self._kinds

    def _of_tensor(self, name: str, t: Tensor) -> Iterator[tuple[Slot, Use | None]]:
        """Return the slots of attributes that code put on a tensor: `weight.scale`."""
        owner, attributes = self.reads and self.reads.expected(t), attributes_of(t) or {}
        for key in list(attributes):
            yield Slot("item", attributes, key, f"{name}.{key}", t), self.use(owner, key)

    def _of_compound(self, name: str, t: Tensor) -> Iterator[tuple[Slot, Use | None]]:
        """Return the slots of a compound tensor: its inner tensors, and its class's attributes. All
        count as read, as reads of tensors' attributes are not noted."""
        attributes = vars(t)
        for key in list(attributes):
            yield Slot("item", attributes, key, f"{name}.{key}", t), Use.READ
        for key in inner_names(t):
            if key not in attributes:  # a property, or in `__slots__`
                reader = InnerTensor(key)
                yield Slot("contents", t, reader, f"{name}.{key}", None), Use.READ
        if torch.is_grad_enabled():
            read = Slot("contents", t, requires_grad, f"{name}.requires_grad", None)
            yield read, Use.READ

    def _of_method(self, name: str, method: object) -> Iterator[tuple[Slot, Use | None]]:
        """Return the slot of the object that a method is bound to, or that a view shows."""
        of = object_of(method)
        if isinstance(getattr(method, "__func__", None), types.FunctionType):
            name = "" if isinstance(of, nn.Module) else "self"  # as its code names it
        else:
            name = f"{name}.{'mapping' if is_view(method) else '__self__'}"
        if not is_plain(of):
            yield Slot("contents", method, object_of, name, None), Use.READ

    def _of_partial(
        self, name: str, value: functools.partial[Any]
    ) -> Iterator[tuple[Slot, Use | None]]:
        yield Slot("contents", value, function_of, name, None), Use.READ
        yield Slot("contents", value, arguments_of, f"{name}.args", None), Use.READ
        yield Slot("contents", value, keywords_of, f"{name}.keywords", None), Use.READ
        yield from self._attributes(name, value)

    def _items(
        self, name: str, value: Any, use: Use = Use.READ
    ) -> Iterator[tuple[Slot, Use | None]]:
        if isinstance(value, (dict, types.MappingProxyType)):
            mapping = cast(dict[Any, object], value)
            self.containers[id(mapping)] = (mapping, name, len(mapping))
            # A missing key may be added: `try: d["scale"]`, or a class's `__missing__`.
            missed = [key for key in self._keys.get(id(mapping), ()) if key not in mapping]
            by_key = None if use is not Use.ITEMS or self.is_whole(mapping) else self.reads
            for key in (*mapping, *missed):
                slot = Slot("item", mapping, key, f"{name}[{_short(key)}]", None)
                yield slot, Use.READ if by_key is None else by_key.items.get(slot.id)
            if isinstance(value, defaultdict):
                factory = f"{name}.default_factory"
                yield Slot("contents", value, factory_of, factory, None), Use.READ
        elif isinstance(value, (list, deque, tuple)):
            items = cast(Any, value)
            count = tuple.__len__(items) if isinstance(value, tuple) else len(items)
            if not isinstance(value, tuple):
                self.containers[id(items)] = (items, name, count)
            for index in range(count):
                yield new_slot(("item", items, index, f"{name}[{index}]", None, None)), Use.READ
        elif isinstance(value, set):
            held = cast(set[object], value)
            self.containers[id(held)] = (held, name, len(held))
            # A large registry of classes only grows, which its length shows.
            registry = len(held) > _REGISTRY and all(isinstance(one, type) for one in held)
            if not registry:
                reader = frozenset if is_plain(frozenset(held)) else _members_of
                yield Slot("contents", held, reader, f"what `{name}` holds", None), Use.READ
        elif isinstance(value, bytearray):
            yield Slot("contents", value, bytes, name, None), Use.READ
        elif isinstance(value, contextvars.ContextVar):
            yield Slot("contents", value, contextvars.ContextVar.get, name, None), Use.READ
        elif is_array(value):
            for slot in slots_of_array(name, value):
                yield slot, Use.READ

    def _attributes(self, name: str, value: Any) -> Iterator[tuple[Slot, Use | None]]:
        """Return the slots of an instance: its `__dict__`, and `__slots__` of user classes."""
        owner = self.reads and self.reads.expected(value)
        ours = f"{type(value).__module__}.".startswith("onelaunch.")
        if _is_unwalked(type(value)) and (owner is None or ours):
            return
        if isinstance(value, threading.Condition):  # threads that wait are never put back
            return
        attributes = attributes_of(value) or {}
        if isinstance(value, threading.local):
            known = {*attributes, *(owner.names if owner else ())}
            readers = {"__dict__": names_in_thread, **{key: ThreadAttribute(key) for key in known}}
            for key, reader in readers.items():
                slot = Slot("contents", value, reader, f"{name}.{key}", value)
                yield slot, self.use(owner, key)
        else:
            for key in list(attributes):
                yield Slot("item", attributes, key, f"{name}.{key}", value), self.use(owner, key)
        for kind in type(value).__mro__:
            known = not is_library_class(kind) or (owner is not None and owner.opaque)
            # Of a library's `__slots__`, those that code was seen to touch, as pydantic's.
            touched = owner.names if owner is not None and "__slots__" in vars(kind) else ()
            for key in list(vars(kind) if known else touched):
                member = vars(kind).get(key)
                if isinstance(member, types.MemberDescriptorType):
                    slot = Slot("contents", value, member.__get__, f"{name}.{key}", None)
                    yield slot, self.use(owner, key)

    def _of_function(self, name: str, fn: types.FunctionType) -> Iterator[tuple[Slot, Use | None]]:
        reads, code = self.reads, fn.__code__
        owner = reads and reads.expected(fn)
        if not is_installed(code.co_filename):
            # A missing attribute may be added; `__wrapped__` is no attribute to the user.
            asked = {*(owner.names if owner else ())} - vars(types.FunctionType).keys()
            for key in (vars(fn).keys() - {"__wrapped__"}) | asked:
                yield Slot("item", vars(fn), key, f"{name}.{key}", None), self.use(owner, key)
        if reads is not None and not (self._has_run(code) or is_machinery(code.co_filename)):
            return  # it did not run
        for variable, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
            use = Use.READ if reads is None else reads.variables.get((code, variable), Use.READ)
            of = f" of {name}" if is_installed(code.co_filename) else ""
            yield Slot("cell", cell, None, f"{variable}{of}", None), use
        if fn.__defaults__:
            yield Slot("of", fn, defaults_of, f"{name}.__defaults__", None), Use.READ
        if fn.__kwdefaults__:
            yield Slot("of", fn, keyword_defaults_of, f"{name}.__kwdefaults__", None), Use.READ
        if reads is None and not is_installed(code.co_filename):  # it may read any global it names
            names = dict.fromkeys(names_read(code), Use.READ)
            yield from self.of_globals(fn.__globals__, names)

    def of_globals(
        self, namespace: dict[str, Any], names: dict[str, Use]
    ) -> Iterator[tuple[Slot, Use]]:
        """Return the globals of a module that are read, and are not code of a library."""
        installed = is_installed(str(namespace.get("__file__") or ""))
        for name in list(names):
            # A missing global may be added, and hide a builtin.
            fixed = installed and _is_fixed(namespace.get(name, _is_fixed))
            if not (fixed or name in _MODULE_ATTRIBUTES):
                yield Slot("item", namespace, name, name, None), names[name]
            builtin = vars(builtins).get(name, _is_fixed) if name not in namespace else _is_fixed
            if not _is_fixed(builtin):  # the user put it there
                yield Slot("item", vars(builtins), name, name, None), names[name]

    def _of_python_module(self, name: str, module: types.ModuleType) -> Iterator[tuple[Slot, Use]]:
        owner = self.reads and self.reads.of(module)
        installed = is_library_module(module)
        names = dict(owner.names) if owner else {}
        if self.is_open(module):
            names |= dict.fromkeys(vars(module).keys() - _MODULE_ATTRIBUTES, Use.READ)
        elif not installed:
            names |= dict.fromkeys(vars(module).keys() & self.loose, Use.READ)
        for key, use in names.items():
            # A missing attribute may be added: `getattr(settings, "scale", 1)`.
            if not (installed and _is_fixed(vars(module).get(key, _is_fixed))):
                yield Slot("item", vars(module), key, f"{name}.{key}", None), use
        if self.reads is None and not installed:
            for key, value in list(vars(module).items()):
                if not (key.startswith("__") or _is_fixed(value)):
                    yield Slot("item", vars(module), key, f"{name}.{key}", None), Use.READ

    def _of_class(self, kind: type) -> Iterator[tuple[Slot, Use | None]]:
        """Return the attributes of a class; of an installed class, if they may change."""
        installed = is_library_class(kind)
        members, names = members_of(kind), self.names_of(kind)
        is_open = self.is_open(kind)
        for key, member in list(members.items()):
            if self.reads is None:
                plain = not (key.startswith("__") or hasattr(type(member), "__get__"))
                use = Use.READ if plain and not installed else None
            else:
                use = names.get(key)
                untold = is_open or key in self.loose
                untold = use is None and untold and not hasattr(type(member), "__get__")
                if untold or (use is None and self._ran(member)):
                    use = Use.READ
            if use is not None and not (installed and key != "forward" and _is_fixed(member)):
                yield Slot("item", members, key, f"{kind.__qualname__}.{key}", kind), use
        if isinstance(kind, enum.EnumMeta) and not installed:
            yield from self._items(kind.__qualname__, vars(kind)["_member_map_"])

    def _ran(self, member: object) -> bool:
        """Return whether a member of a class is, or wraps, code that ran: Python calls some."""
        if type(member) in LEAVES:
            return False
        if type(member) is types.FunctionType and not member.__dict__:  # nearly all
            return self._has_run(member.__code__)
        return any(self._has_run(fn.__code__) for fn in functions_in(member))

    def _has_run(self, code: types.CodeType) -> bool:
        """Return whether code ran. By its name first: the hash of code takes 1 to 15 us."""
        named = code.co_name in self._ran_names
        return named and self.reads is not None and code in self.reads.codes

    def code_of(self, name: str, value: object) -> Iterator[tuple[str, object]]:
        """Return further objects that an object leads to: its class, and code behind decorators."""
        if isinstance(value, nn.Module) or type(value) in _WITHOUT_ATTRIBUTES:
            yield type(value).__qualname__, type(value)
        elif isinstance(value, types.MethodType):
            yield name, value.__func__
        elif isinstance(value, type):
            for kind in (*value.__mro__, type(value)):
                if kind.__module__ != "builtins":
                    yield kind.__qualname__, kind
            if self.reads is None and not is_library_class(value):
                for key, member in vars(value).items():
                    for function in functions_in(member):
                        yield f"{value.__qualname__}.{key}", function
        elif not (isinstance(value, types.ModuleType) or is_memory(value)):
            for inner in behind(value):
                yield name, inner
            wrapped = (attributes_of(value) or {}).get("__wrapped__")
            if wrapped is not None:
                yield name, wrapped
            if not isinstance(value, types.FunctionType):
                yield type(value).__qualname__, type(value)


def _members_of(value: set[object]) -> frozenset[int]:
    """Return the ids of a set's elements, which keeps none of them alive."""
    return frozenset(map(id, value))


def _is_unwalked(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}.".startswith(_UNWALKED)


READ_APART = frozenset(MODULE_DICTS)
_HOOKS = ("_forward_", "_backward_", "_state_", "_load_state_", "_non_persistent_")
NOT_READ = READ_APART.union(key for key in vars(nn.Module()) if key.startswith(_HOOKS))
"""Attributes of every `nn.Module` that no forward reads as slots: hooks, whose number is guarded as
a `Size`, and attributes for saving and loading. Parameters, buffers and modules are read apart."""


_MODULE_ATTRIBUTES = {
    *vars(types.ModuleType("")),
    *("__file__", "__builtins__", "__cached__", "__path__"),
}


def dicts_of(value: object) -> list[dict[str, Any]]:
    """Return the dicts that hold the attributes of an object or module."""
    if isinstance(value, nn.Module):
        own = value.__dict__
        return [own, *[d for kind in MODULE_DICTS if isinstance(d := own.get(kind), dict)]]
    if isinstance(value, (type, types.ModuleType, types.FunctionType, *METHODS)):
        return []
    if type(value) in _WITHOUT_ATTRIBUTES:
        return []
    unwalked = _is_unwalked(type(value)) and not isinstance(value, Tensor)
    if unwalked or isinstance(value, threading.Condition):
        return []
    attributes = attributes_of(value)
    return [] if attributes is None else [attributes]


def members_of(kind: type) -> dict[str, object]:
    """Return the dict behind a class's proxy, which can be watched for changes."""
    return cast(dict[str, object], gc.get_referents(vars(kind))[0])


def _is_fixed(value: object) -> bool:
    """Return whether a value of an installed package is code, which is taken never to change."""
    while isinstance(value, (staticmethod, classmethod)):
        value = cast(Any, value).__func__
    if isinstance(value, types.FunctionType):
        return is_installed(value.__code__.co_filename)
    if isinstance(value, type):
        return is_library_class(value)
    if isinstance(value, types.ModuleType):
        return is_library_module(value)
    if isinstance(value, METHODS):  # bound to an object, a method is state, like the object
        of = object_of(value)
        return of is None or _is_fixed(of)
    return hasattr(type(value), "__get__")


def is_library_class(kind: type) -> bool:
    name = kind.__module__ if type(kind.__module__) is str else ""
    return _is_library(name, sys.modules.get(name))


def is_library_module(module: types.ModuleType) -> bool:
    return _is_library(module.__name__, module)


def _is_library(name: str, module: types.ModuleType | None) -> bool:
    """Return whether a name comes from an installed package. A module without a file (executed, or
    written in C) belongs where the packages around it do."""
    while True:
        if type(file := module and vars(module).get("__file__")) is str:
            return name != "__main__" and is_installed(file)
        if not name or name in sys.builtin_module_names:
            return bool(name)
        name = name.rpartition(".")[0]
        module = sys.modules.get(name)


def _short(key: object) -> str:
    text = text_of(key) if not isinstance(key, Tensor) else f"tensor {tuple(key.shape)}"
    return text if len(text) < 40 else text[:37] + "..."
