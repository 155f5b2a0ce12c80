"""Facts about the code of functions, and the functions behind whatever decorates them."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import threading
import types
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from onelaunch.frames.loads import loads_of
from onelaunch.frames.named import FixedVariable, Named
from onelaunch.frames.origins import (
    TORCH,
    is_container_code,
    is_generated,
    is_standard_machinery,
    serves_machinery,
)
from onelaunch.frames.stack import ITERATED, Loads, Use
from onelaunch.identity import id

_BOOTSTRAP: Any = cast(Any, importlib)._bootstrap
_IMPORTS = {_BOOTSTRAP._find_and_load.__code__, _BOOTSTRAP._find_spec.__code__}
_COMPILES = (os.path.join(TORCH, "_dynamo", "convert_frame.py"), "__call__")
_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_HIGHER_ORDER = (TORCH + "_higher_order_ops", TORCH + "nn/attention/flex_attention.py")
_TAKE_FUNCTIONS = frozenset({"flex_attention", "cond", "while_loop", "scan", "associative_scan"})
RUNS_BACKWARD = {cast(types.FunctionType, fn).__code__ for fn in _BACKWARDS}
_ON_OTHERS = (threading.Thread.start, ThreadPoolExecutor.submit)
_LOOKS_UP = {
    nn.Module.__getattr__.__code__,
    nn.Module.__setattr__.__code__,
    nn.Module.__delattr__.__code__,
}
"""Code that looks up attributes of modules, after the load was noted."""
_ASKS_FOR_BUILD = {torch.backends.cuda.is_built.__code__}
"""Code that asks how torch was built, which torch calls in captures, too."""
HANDS_ON = {cast(types.FunctionType, fn).__code__ for fn in _ON_OTHERS}
"""Code that gives work to other threads."""
MODULE_DICTS = ("_parameters", "_buffers", "_modules")
LISTS_MODULE = {
    fn.__code__: {
        fn.__name__,
        *(n for n in fn.__code__.co_names if n in MODULE_DICTS or hasattr(nn.Module, n)),
    }
    for fn in vars(nn.Module).values()
    if inspect.isgeneratorfunction(fn)
}
"""Code of a generator over the modules, parameters or buffers of a module -> the attributes of the
module that it reads."""
UNREAD = _LOOKS_UP | _ASKS_FOR_BUILD | LISTS_MODULE.keys()
_NOTED = RUNS_BACKWARD | HANDS_ON | LISTS_MODULE.keys()
_NAMES = {code.co_name for code in _IMPORTS | _NOTED}


@dataclass(slots=True, eq=False)
class CodeFacts:
    """Facts about a function's code, the same for each frame that it runs in.

    Attributes:
        unread: True if none of its frames is read: internals of the standard library, torch or
            onelaunch.
        past: offsets of instructions; a frame that ended at one of them is not read again.
        met: True once a frame was read.
        replaced: the arguments that it assigns anew.
        special: of a special method, such as `__call__`: its first argument, with the use of its
            name; else None.
        iterates: True for a comprehension or a generator expression.
        of_class: True for the body of a class, which looks in its own names first.
        is_enclosed: True if such a body takes variables of the function around it.
        stores: see `sure_stores`.
        aside: True if its callees are no part of the run: an import, or Dynamo's compilation.
        matters: True if its calls are noted: a backward, a higher-order operator, work for another
            thread, or a list of a module's parts.
        depends: True if `is_unread` depends on the caller of a frame.
        standard: True for a function of the standard library that may be a method.
        ends: offsets of the instructions where its frames ended; see `Reads.ended`.
        singular: such offsets of frames that read attributes of tensors.
        named: offset where a frame ended -> what its global names led to.
        given: True once a frame of it was given results, or had arguments that are kept.
    """

    code: types.CodeType
    unread: bool
    past: Set[int] = frozenset()
    met: bool = False
    loads: Loads = field(init=False)
    replaced: tuple[str, ...] = ()
    special: FixedVariable | None = None
    iterates: bool = False
    of_class: bool = field(init=False)
    is_enclosed: bool = False
    stores: tuple[SureStore, ...] = ()
    ends: set[int] = field(default_factory=set)
    singular: set[int] = field(default_factory=set)
    named: dict[int, Named] = field(default_factory=dict)
    given: bool = False
    aside: bool = field(init=False)
    matters: bool = field(init=False)
    standard: bool = field(init=False)
    depends: bool = field(init=False)

    def __post_init__(self) -> None:
        file, name = self.code.co_filename, self.code.co_name
        named = name in _NAMES  # the hash of code takes 1 to 15 us
        self.aside = (named and self.code in _IMPORTS) or (file, name) == _COMPILES
        takes = name in _TAKE_FUNCTIONS and file.startswith(_HIGHER_ORDER)
        self.matters = takes or (named and self.code in _NOTED)
        self.standard = self.code.co_argcount > 0 and is_standard_machinery(file)
        self.depends = file == "<string>" or is_container_code(file)

    def is_unread(self, frame: FrameType) -> bool:
        """Return whether a frame is not read, which may depend on its caller."""
        return self.depends and (is_generated(frame) or serves_machinery(frame))

    @property
    def ignores_calls(self) -> bool:
        """True if no call of it is noted, but returns alone. It was met."""
        kept = self.replaced or self.is_enclosed or self.iterates
        return not (kept or self.depends or self.aside or self.matters)

    def meet(self) -> None:
        code, self.met = self.code, True
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        self.loads = loads_of(code)
        self.stores = sure_stores(code)
        self.replaced = tuple(name for name in arguments if name in self.loads.assigned)
        self.iterates = ITERATED in arguments
        self.of_class = not code.co_flags & inspect.CO_OPTIMIZED
        self.is_enclosed = bool(code.co_freevars) and self.of_class
        is_special = code.co_name.startswith("__") and code.co_name.endswith("__")
        if is_special and code.co_argcount:
            self.special = FixedVariable(arguments[0], {code.co_name: Use.READ})


class SureStore(NamedTuple):
    """A store that every run makes: ``self.size = len(x)``, or ``self.sizes["x"] = len(x)``.

    Attributes:
        offset: the offset of its instruction.
        variable, path: the variable, and the attributes from it to the object.
        key: the attribute, or the key.
        item: True for an item.
    """

    offset: int
    variable: str
    path: tuple[str, ...]
    key: object
    item: bool


def sure_stores(code: types.CodeType) -> tuple[SureStore, ...]:
    """Return the stores that every run makes that gets past them. A chain of attributes leads to
    their objects, from a variable that keeps its value. Exception handlers may skip any."""
    loads = loads_of(code)
    stores: list[SureStore] = []
    for offset, place in () if code.co_exceptiontable else loads.sure:
        key = place.parts[0] if place.kind == "item" else place
        path: list[str] = []
        base = place.base
        while base is not None and base.kind == "attribute":
            path.insert(0, base.key)
            base = base.base
        fixed = place.kind == "attribute" or key.kind == "constant"
        if fixed and base is not None and loads.is_fixed(base) and base.key not in loads.free:
            stores.append(SureStore(offset, base.key, tuple(path), key.key, place.kind == "item"))
    return tuple(stores)


@functools.lru_cache(maxsize=4096)
def names_read(code: types.CodeType) -> frozenset[str]:
    """Return the global and attribute names in a function's code, nested functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_read(constant)
    return frozenset(names)


def functions_in(member: object) -> list[types.FunctionType]:
    """Return the functions behind a member of a class, however it is decorated."""
    functions: dict[int, types.FunctionType] = {}
    waiting = [member]
    while waiting:
        member = waiting.pop(0)
        if isinstance(member, types.FunctionType):
            if id(member) not in functions:  # a function may wrap itself
                functions[id(member)] = member
                waiting.append(member.__dict__.get("__wrapped__"))
        else:
            waiting += behind(member)
    return list(functions.values())


def behind(member: object) -> Iterator[object]:
    """Return the functions wrapped by a descriptor (property, partial, cached_property...)."""
    if isinstance(member, property):
        yield from (f for f in (member.fget, member.fset) if f is not None)
    elif isinstance(member, staticmethod | classmethod):
        yield cast(Any, member).__func__
    elif isinstance(member, functools.singledispatchmethod):
        yield from cast(Any, member).dispatcher.registry.values()
    elif isinstance(member, _WITH_FUNC):
        yield cast(Any, member).func
    elif isinstance(member, _CACHED):
        yield cast(Any, member).__wrapped__


_WITH_FUNC = (functools.partial, functools.partialmethod, functools.cached_property)
_CACHED = type(functools.lru_cache(len))
