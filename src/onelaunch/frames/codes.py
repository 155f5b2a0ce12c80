"""Facts about a function's code, the same for each frame that it runs in."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import os
import threading
import types
from collections.abc import Set
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

_BOOTSTRAP: Any = cast(Any, importlib)._bootstrap
_IMPORTS = {_BOOTSTRAP._find_and_load.__code__, _BOOTSTRAP._find_spec.__code__}
_COMPILES = (os.path.join(TORCH, "_dynamo", "convert_frame.py"), "__call__")
_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_HIGHER_ORDER = (TORCH + "_higher_order_ops", TORCH + "nn/attention/flex_attention.py")
_TAKE_FUNCTIONS = frozenset({"flex_attention", "cond", "while_loop", "scan", "associative_scan"})
RUNS_BACKWARD = {cast(types.FunctionType, fn).__code__ for fn in _BACKWARDS}
_ON_OTHERS = (threading.Thread.start, ThreadPoolExecutor.submit)
LOOKS_UP = {
    nn.Module.__getattr__.__code__,
    nn.Module.__setattr__.__code__,
    nn.Module.__delattr__.__code__,
}
"""Code that looks up attributes of modules, after the load was noted."""
ASKS_FOR_BUILD = {torch.backends.cuda.is_built.__code__}
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
_NOTED = RUNS_BACKWARD | HANDS_ON | LISTS_MODULE.keys()
_NAMES = {code.co_name for code in _IMPORTS | _NOTED}


@dataclass(slots=True, eq=False)
class CodeFacts:
    """Facts about a function's code, the same for each frame that it runs in.

    Attributes:
        unread: True if none of its frames is read: internals of the standard library, torch or
            onelaunch.
        past: ends of frames that are not read again.
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
    def is_quiet(self) -> bool:
        """True if no call of it is noted, but returns alone. It was met."""
        kept = self.replaced or self.is_enclosed or self.iterates
        return not (kept or self.depends or self.aside or self.matters)

    def meet(self) -> None:
        """Read the code, at its first frame."""
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


_PLACE_STORES = {dis.opmap["STORE_ATTR"], dis.opmap["STORE_SUBSCR"]}


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


@functools.lru_cache(maxsize=4096)
def sure_stores(code: types.CodeType) -> tuple[SureStore, ...]:
    """Return the stores that every run makes that gets past them. A jump may skip a store in a
    branch or a loop, and exception handlers may skip any."""
    if code.co_exceptiontable or _PLACE_STORES.isdisjoint(code.co_code[::2]):
        return ()
    steps = list(dis.get_instructions(code))
    assigned: set[str] = set()
    for step in steps:
        if step.opname.startswith("STORE_FAST"):
            assigned.update(step.argval if isinstance(step.argval, tuple) else (step.argval,))
    found: list[SureStore] = []
    beyond = 0  # where the furthest jump until here leads
    for number, step in enumerate(steps):
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            beyond = max(beyond, step.argval)
        if step.opname.startswith("RETURN"):
            beyond = len(code.co_code)
        if beyond <= step.offset and step.opcode in _PLACE_STORES:
            store = _store(steps[: number + 1])
            if store is not None and store.variable not in assigned:
                found.append(store)
    return tuple(found)


def _store(steps: list[dis.Instruction]) -> SureStore | None:
    """Return the store of the last instruction, if a chain of attributes leads to its object."""
    last = steps.pop()
    item = last.opcode == dis.opmap["STORE_SUBSCR"]
    key = last.argval
    if item:
        constant = steps.pop()
        if constant.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
            return None
        key = constant.argval
    path: list[str] = []
    while steps and steps[-1].opname == "LOAD_ATTR":
        path.insert(0, steps.pop().argval)
    if not steps or not steps[-1].opname.startswith("LOAD_FAST"):
        return None
    name = steps[-1].argval
    variable = name[-1] if isinstance(name, tuple) else name
    return SureStore(last.offset, variable, tuple(path), key, item)
