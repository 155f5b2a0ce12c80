"""What the Python code of a run loads, and of which objects: seen in the frames that it ran in.

Every function that runs, in whatever package, is watched by the interpreter's profile hook. When it
returns, what its instructions load (see `loads`) is looked up from the values of its variables. So
methods of objects made in the call, partials, enumerations and classes of libraries are seen as
anything else is, and what merely has the name of something that was read is not.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.loads import UNKNOWN, Load, Loads, Symbol, Use, loads_of
from onelaunch.peek import (
    BUILTIN,
    MOST,
    attributes_of,
    class_member,
    elements,
    globals_named,
    has_attributes,
    items,
    leads_on,
    peek,
    went_through,
)

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_READ_OF_TORCH = tuple(
    _TORCH + name
    for name in ("nn", "optim", "distributions", "amp", "ao", "fx", "distributed/fsdp")
)
"""Where torch keeps state of the user's in Python; the rest is its own workings."""
_LOOKS_UP = {
    nn.Module.__getattr__.__code__,
    nn.Module.__setattr__.__code__,
    nn.Module.__delattr__.__code__,
}
"""Where the attribute of somebody's module is looked up; it is known already."""
_ITERATED = ".0"
"""The argument of a comprehension or generator expression: an iterator."""
_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_RUNS_BACKWARD = {cast(types.FunctionType, fn).__code__ for fn in _BACKWARDS}


def is_installed(file: str) -> bool:
    """Whether code is of an installed package, of the standard library, or of onelaunch."""
    return (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith((*_STANDARD, "<frozen", _OURS))
    )


@functools.cache
def is_machinery(file: str) -> bool:
    """Whether code is not read: the standard library, torch's own workings, and onelaunch."""
    if file.startswith(_TORCH):
        return not file.startswith(_READ_OF_TORCH)
    if "site-packages" in file or "dist-packages" in file:
        return False
    return file.startswith((*_STANDARD, "<frozen", _OURS, "<onelaunch", "<__array_function__"))


@dataclass(slots=True)
class Owner:
    """An object of which attributes were loaded or stored."""

    ref: Callable[[], object]
    names: dict[str, Use] = field(default_factory=dict[str, Use])
    """Attribute -> what becomes of what it held."""
    opaque: bool = False
    """Whether any attribute may have been read."""


@dataclass(slots=True)
class Reads:
    """What the Python code of a callable's runs was seen to read. Keeps nothing alive, but for
    objects that have slots alone."""

    owners: dict[int, Owner] = field(default_factory=dict[int, Owner])
    globals: dict[int, tuple[dict[str, Any], dict[str, Use]]] = field(
        default_factory=lambda: cast(Any, {})
    )
    """id -> the globals of a module, and those loaded, as in `Owner.names`."""
    variables: dict[tuple[types.CodeType, str], Use] = field(default_factory=lambda: cast(Any, {}))
    """Variables of functions around a function, as in `Owner.names`."""
    items: dict[tuple[int, object], Use] = field(default_factory=lambda: cast(Any, {}))
    """(id of a container, key), as in `Owner.names`."""
    codes: set[types.CodeType] = field(default_factory=lambda: cast(Any, set()))
    """All that ran."""
    backward: bool = False
    """Whether a backward ran inside."""
    kinds: weakref.WeakKeyDictionary[type | types.CodeType, Owner] = field(
        default_factory=lambda: cast(Any, weakref.WeakKeyDictionary())
    )
    """class, or code -> what was read of its instances, or functions, which tells of one that came
    after the run."""

    def copy(self) -> Reads:
        """What is known, without what is gone; a run adds to it."""
        return Reads(
            {
                key: Owner(owner.ref, dict(owner.names), owner.opaque)
                for key, owner in self.owners.items()
                if owner.ref() is not None
            },
            {key: (namespace, dict(names)) for key, (namespace, names) in self.globals.items()},
            dict(self.variables),
            dict(self.items),
            set(self.codes),
            self.backward,
            self.kinds.copy(),
        )

    def owner(self, value: object) -> Owner:
        """The entry of an object, made if there is none."""
        found = self.owners.get(id(value))
        if found is None or found.ref() is not value:
            found = self.owners[id(value)] = Owner(_reference(value))
        return found

    def of(self, value: object) -> Owner | None:
        """What was read of an object, or None."""
        found = self.owners.get(id(value))
        return found if found is not None and found.ref() is value else None

    def expected(self, value: object) -> Owner | None:
        """What a run will read of an object: as of others of its class, if no run has met it."""
        found = self.of(value)
        return found if found or isinstance(value, _APART) else self.kinds.get(_kind(value))

    def settle(self) -> None:
        """Sum up, after a run, what was read of the instances of each class; and let go of what
        is held here alone, an object or a graph that the run made."""
        for key, owner in list(self.owners.items()):
            value = owner.ref()
            ours = isinstance(owner.ref, functools.partial)
            # A node belongs to the graph of its run, which may last until a backward has run.
            if ours and (isinstance(value, Node) or sys.getrefcount(value) <= _OURS_ALONE):
                del self.owners[key]
            if value is None or isinstance(value, _APART):
                continue
            kind = self.kinds.setdefault(_kind(value), Owner(_gone))
            for name, use in owner.names.items():
                kind.names[name] = max(use, kind.names.get(name, Use.NONE))
            kind.opaque |= owner.opaque

    def living(self) -> list[object]:
        """The objects of which something was read, and which are still there."""
        found = [owner.ref() for owner in self.owners.values()]
        return [value for value in found if value is not None]


def _reference(value: object) -> Callable[[], object]:
    """Refers to an object weakly; where that cannot be, for good, but for what a run made; see
    `Reads.settle`."""
    try:
        return weakref.ref(value)
    except TypeError:
        return functools.partial(_itself, value)


_APART = (type, types.ModuleType)
"""Of these what is read of one says nothing of another."""


def _kind(value: object) -> type | types.CodeType:
    """What one object has in common with others of which the same is read."""
    return value.__code__ if isinstance(value, types.FunctionType) else type(value)


_OURS_ALONE = 3
"""References to an object that a partial, a variable and `sys.getrefcount` itself hold."""


def _gone() -> None:
    return None


def _itself(value: object) -> object:
    return value


def _note(names: dict[Any, Use], name: Any, load: Load) -> None:
    use = Use.NONE if load.stores else load.use
    names[name] = max(names.get(name, Use.NONE), use)


class FrameWatch:
    """Notes in `reads` what the functions read that run while it is active."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self._active = True
        # The collector's callbacks run whenever there is garbage, and are not the callable's.
        self._unread = _LOOKS_UP | {getattr(fn, "__code__", None) for fn in gc.callbacks}
        self._importing: list[FrameType] = []
        """Modules whose code runs for the first time: what that reads is no part of the run."""
        self._given: dict[int, dict[str, Any]] = {}
        """id of a frame -> the arguments that it was called with, if it replaces any."""
        self._results: dict[int, dict[int, list[object]]] = {}
        """id of a frame -> what Python code called by each of its instructions returned."""
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Around a run, in this thread. Slows it down by some 50 us for each function that runs."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            with _Joining(self) if torch.is_grad_enabled() else nullcontext():
                yield
        finally:
            self._active = False
            self._given.clear()  # another thread may keep this as its hook
            self._results.clear()
            sys.setprofile(before)
            self.reads.settle()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._active:
            sys.setprofile(None)  # another thread's, which has outlived the run
            return
        if frame.f_code.co_name == "<module>":
            if event == "call":
                self._importing.append(frame)
            elif event == "return" and frame in self._importing:
                self._importing.remove(frame)
        elif self._importing:
            return
        elif event == "call":
            self._called(frame)
        elif event == "return":
            self._returned(frame, arg)

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in _RUNS_BACKWARD:
            self.reads.backward = True
        if is_machinery(code.co_filename) or code in self._unread:
            return
        self.reads.codes.add(code)
        loads = loads_of(code)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        replaced = [name for name in arguments if name in loads.assigned]
        if replaced:
            values = frame.f_locals
            given = {n: v for n in replaced if leads_on(v := values.get(n))}
            if given:
                self._given[id(frame)] = given
        if _ITERATED in arguments:  # at the end it is exhausted
            iterated = went_through(frame.f_locals.get(_ITERATED))
            self._given.setdefault(id(frame), {})[_ITERATED] = iterated

    def _returned(self, frame: FrameType, result: object) -> None:
        code, parent = frame.f_code, frame.f_back
        given = self._given.pop(id(frame), {})
        results = self._results.pop(id(frame), {})
        read = parent is not None and not is_machinery(parent.f_code.co_filename)
        if parent is not None and read and leads_on(result):
            at = self._results.setdefault(id(parent), {}).setdefault(parent.f_lasti, [])
            if len(at) < MOST:
                at.append(result)
        if is_machinery(code.co_filename) or code in self._unread:
            return
        with self._lock:
            _Frame(self.reads, frame, loads_of(code), given, results).note()


class _Joining(TorchDispatchMode):
    """Has other threads watched that work for this one: autograd's, for a device."""

    def __init__(self, watch: FrameWatch) -> None:
        super().__init__()
        self._watch = watch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Dynamo compiles what runs meanwhile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys.getprofile() is None:
            sys.setprofile(self._watch)
        return func(*args, **(kwargs or {}))


class _Frame:
    """One function that has run: the values of its symbols."""

    def __init__(
        self,
        reads: Reads,
        frame: FrameType,
        loads: Loads,
        given: Mapping[str, Any],
        results: Mapping[int, list[object]],
    ) -> None:
        self._reads = reads
        self._code = frame.f_code
        self._globals = frame.f_globals
        self._locals = frame.f_locals
        self._loads = loads
        self._given = given
        self._results = {loads.instruction(at): found for at, found in results.items()}
        self._variables: dict[str, list[object]] = {}

    def note(self) -> None:
        """Note all that the function's code loads and stores."""
        for load in self._loads.loads:
            self._noted(load)
        for symbol in self._loads.opaque:
            self._opaque(self._values(symbol))
        for call in self._loads.calls:
            self._passed(call)

    def _noted(self, load: Load) -> None:
        place = load.place
        if place.kind == "attribute":
            for value in self._values(place.base):
                if has_attributes(value):
                    owner = self._reads.owner(value)
                    _note(owner.names, place.key, load)
                    if place.key not in (attributes_of(value) or ()):  # its class has it
                        _note(self._reads.owner(type(value)).names, place.key, load)
        elif place.kind == "global":
            if place.key in self._globals or load.stores:
                entry = self._reads.globals.setdefault(
                    id(self._globals), (self._globals, cast(dict[str, Use], {}))
                )
                _note(entry[1], place.key, load)
        elif place.kind == "variable":
            _note(self._reads.variables, (self._code, place.key), load)
        elif place.kind == "item":
            (key,) = place.parts
            keys = [k for k in self._values(key) if type(k) in (int, str, bool, float)]
            for value in self._values(place.base) if keys else ():
                if isinstance(value, dict | list | deque | types.MappingProxyType):
                    for k in keys:
                        _note(self._reads.items, (id(value), k), load)

    def _passed(self, call: Symbol) -> None:
        """What code that is not read may do with the objects that it is given."""
        if self._is_made_by_c(call.base):
            self._opaque(v for part in call.parts for v in self._values(part))
        for function in self._values(call.base):
            if function is vars or function is dir:
                self._opaque(v for part in call.parts for v in self._values(part))
            elif (function is getattr or function is hasattr) and len(call.parts) > 1:
                self._looked_up(call.parts[0], call.parts[1])
            elif getattr(function, "__module__", None) in _READS_ALL:
                self._opaque(v for part in call.parts for v in self._values(part))

    def _is_made_by_c(self, function: Symbol | None) -> bool:
        """Whether what is called is an object whose class is C's: `attrgetter("scale")(layer)`."""
        if function is None or function.kind != "call":
            return False
        made = [v for v in self._values(function.base) if isinstance(v, type)]
        return any(map(_is_called_by_c, made))

    def _looked_up(self, base: Symbol, name: Symbol) -> None:
        names = [n for n in self._values(name) if type(n) is str]
        for value in self._values(base):
            if not has_attributes(value):
                continue
            if not names:
                self._reads.owner(value).opaque = True
            for n in names:
                self._reads.owner(value).names[n] = Use.READ

    def _opaque(self, values: Iterable[object]) -> None:
        for value in values:
            if has_attributes(value) and not isinstance(value, _NOT_OPAQUE):
                self._reads.owner(value).opaque = True

    # Values of symbols.

    def _values(self, symbol: Symbol | None) -> list[object]:
        """What a symbol may have stood for. Runs no code of the user's."""
        symbol = symbol or UNKNOWN
        kind = symbol.kind
        if kind == "variable":
            return self._variable(symbol.key)
        found: list[object] = list(self._results.get(symbol.offset, ()))
        if kind == "constant":
            found.append(symbol.key)
        elif kind == "global":
            found += globals_named(self._globals, symbol.key)
        elif kind == "attribute":
            found += [v for o in self._values(symbol.base) for v in peek(o, symbol.key)]
        elif kind == "item" and symbol.base is not None and symbol.base.kind == "parts":
            found += self._values(symbol.base)
        elif kind == "item":
            keys = self._values(symbol.parts[0])
            found += [v for o in self._values(symbol.base) for v in items(o, keys)]
        elif kind == "element":
            found += [v for o in self._values(symbol.base) for v in elements(o)]
        elif kind in ("parts", "either"):
            found += [v for part in symbol.parts for v in self._values(part)]
        elif kind == "call":
            found += self._returned(symbol)
        elif kind == "module":
            found += self._module(symbol)
        return found[:MOST]

    def _variable(self, name: str) -> list[object]:
        """Its values at the call and at the end, and all that are assigned in between."""
        if name in self._variables:
            return self._variables[name]
        found = self._variables[name] = [
            values[name] for values in (self._given, self._locals) if name in values
        ]
        seen = {id(v) for v in found}
        before = -1
        while before < len(found) < MOST:
            before = len(found)
            for symbol in self._loads.assigned.get(name, ()):
                for value in self._values(symbol):
                    if id(value) not in seen and (leads_on(value) or type(value) in (str, int)):
                        seen.add(id(value))
                        found.append(value)
            if name not in self._loads.assigned:
                break
        return found

    def _returned(self, call: Symbol) -> list[object]:
        """What a call may have given: of code that is not read, something of what it was given."""
        found: list[object] = []
        for function in self._values(call.base):
            if function is getattr and len(call.parts) > 1:
                names = [n for n in self._values(call.parts[1]) if type(n) is str]
                objects = self._values(call.parts[0])
                found += [v for o in objects for n in names for v in peek(o, n)]
                found += [v for o in objects for v in _held(o)] if not names else []
                found += [v for default in call.parts[2:] for v in self._values(default)]
            elif function is type and len(call.parts) == 1:
                found += map(type, self._values(call.parts[0]))
            elif _is_unread(function):
                given = [v for part in call.parts for v in self._values(part)]
                found += [v for v in given if leads_on(v)]
                found += [v for v in map(elements, given) for v in v if leads_on(v)]
        if self._is_made_by_c(call.base):
            given = [v for part in call.parts for v in self._values(part)]
            found += [v for o in given for v in (*_held(o), *elements(o)) if leads_on(v)]
        return found

    def _module(self, symbol: Symbol) -> list[object]:
        level = next((v for v in self._values(symbol.parts[0]) if type(v) is int), 0)
        name: str = symbol.key
        if level:
            package = self._globals.get("__package__") or ""
            package = package.rsplit(".", level - 1)[0] if level > 1 else package
            name = f"{package}.{name}".strip(".")
        # `import a.b` gives `a`, and `from a.b import c` the module `a.b`.
        found = [sys.modules.get(name), sys.modules.get(name.partition(".")[0])]
        return [module for module in found if module is not None]


_NOT_OPAQUE = (types.ModuleType, types.FunctionType, type, nn.Module, dict, list, tuple, deque)
"""What code that is not read is given without reading its attributes one by one."""


def _is_unread(function: object) -> bool:
    """Whether what is called is no Python code that would be seen."""
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return is_machinery(function.__code__.co_filename)
    if id(function) in _HARMLESS:
        return False
    if isinstance(function, type):
        return id(function) in BUILTIN or function.__module__ in ("itertools", "collections")
    if isinstance(function, functools.partial):
        return _is_unread(cast(functools.partial[object], function).func)
    # An object that C calls: `operator.attrgetter("scale")`.
    return isinstance(function, _OF_C) or _is_called_by_c(type(function))


def _held(value: object) -> Iterable[object]:
    """What an object's attributes hold, of which any may be read."""
    return list((attributes_of(value) or {}).values()) if has_attributes(value) else ()


def _is_called_by_c(kind: type) -> bool:
    return isinstance(class_member(kind, "__call__"), types.WrapperDescriptorType)


_READS_ALL = frozenset(
    {"copy", "copyreg", "dataclasses", "inspect", "json", "operator", "pickle", "_pickle", "pprint"}
)
"""Modules whose functions read the attributes of whatever they are given."""
_OF_C = (
    *(types.BuiltinFunctionType, types.MethodWrapperType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
)


_HARMLESS = set(
    map(id, (isinstance, issubclass, callable, id, len, type, hasattr, getattr, super, hash))
)
