"""The part of a function's loads that may differ from frame to frame.

Most names of a function lead to modules and their functions: `torch`, `F.linear`. What hangs on
them is noted for a first frame; for later ones it is only checked that they lead there still.
"""

from __future__ import annotations

import builtins
import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from onelaunch.frames.callees import (
    INERT_FILES,
    ITEM_METHODS,
    NOTED,
    is_inert,
    only_hands_on,
    reads_attributes,
)
from onelaunch.frames.peek import KINDS, kind_of, own_uses
from onelaunch.frames.stack import ITERATED, Loads, Symbol, Use
from onelaunch.native import FAILURES, compiled

_Checks = dict[tuple[int, str], tuple[dict[str, Any], str, object]]
"""(id of a namespace, name) -> the namespace, the name, and its value."""


Attributes = list[tuple[Symbol, Mapping[str, Use]]]
Calls = list[tuple[Symbol, bool]]
"""Calls, each with True if nothing but its function tells whether it is to be noted."""


class LoadStep(NamedTuple):
    """A way to a value, from a variable or a fixed value. C reads all but the last."""

    variable: str | None
    value: object
    """The fixed value where there is no variable."""
    path: tuple[tuple[str, int], ...]
    """(attribute, offset) of each load on the way."""
    kinds: dict[type, UsesOfClass] | None
    """class -> the noted part of its attributes' uses. None if the value is to be inert."""
    listed: Any
    """The entry of `Attributes` or `Calls`."""


class FramePlan:
    """The loads of frames with the same code, globals and last instruction.

    Attributes:
        fixed: attributes of modules and classes, which one frame notes for all.
        attributes, items, calls: the others, in their order.
        steps: ways to values of simple attributes and calls, for `native_frames`.
        left: the attributes and calls without steps.
    """

    def __init__(
        self, code: CodeType, loads: Loads, at: int, namespace: dict[str, Any], noted: Noted
    ) -> None:
        reached = loads.reached(at)
        self._namespace = namespace
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        several = {n for n in loads.assigned if n in given or n not in loads.once}
        self._several = several | {ITERATED}
        """Variables that may have had several values."""
        self._checks: _Checks = {}
        steps: list[LoadStep] = []
        self.fixed: Attributes = []
        self.attributes: Attributes = []
        self.items = reached.items
        self.calls: Calls = []
        self.left: tuple[Attributes, Calls] = [], []
        arguments = [(Symbol("variable", key=n), uses) for n, uses in loads.arguments.items()]
        for load in (*arguments, *reached.attributes):
            if self._is_fixed(*load):
                self.fixed.append(load)
                continue
            self.attributes.append(load)
            step = self._step(load[0], noted.kinds[id(load[1])], load)
            if step is None:
                self.left[0].append(load)
            else:
                steps.append(step)
        for call in reached.calls:
            listed = call, _is_plain(call)
            found = self._steps_of(listed)
            if found is None or found:
                self.calls.append(listed)
            if found is None:
                self.left[1].append(listed)
            else:
                steps += found
        self.steps = tuple(steps)
        self._checked = tuple(self._checks.values())

    def holds(self) -> bool:
        """Return whether the names that are not looked up again have the same values."""
        library = native_frames()
        if library is not None:
            return library.hold(self._checked, _MISSING)
        return all(names.get(name, _MISSING) is value for names, name, value in self._checked)

    def _is_fixed(self, base: Symbol, uses: Mapping[str, Use]) -> bool:
        checks: _Checks = {}
        value = self._value(base, checks)
        if issubclass(type(value), ModuleType):
            for name in uses:
                _look_up(vars(value), name, checks)
        elif not issubclass(type(value), type):  # what hangs on a class is always noted
            return False
        self._checks |= checks
        return True

    def _steps_of(self, listed: tuple[Symbol, bool]) -> list[LoadStep] | None:
        """Return steps to what must be inert for a call to note nothing."""
        call, plain = listed
        called = self._step(call.base, None, listed) if plain else None
        if called is None or called.variable is not None or called.path:
            return None if called is None else [called]
        function: Any = called.value
        if is_inert(function):
            return []
        if not only_hands_on(function):
            return None
        steps: list[LoadStep] = []
        for part in call.parts:
            step = self._step(part, None, listed)
            if part.kind in ("unknown", "constant"):
                continue
            if step is None:
                return None
            if step.variable is not None or step.path:
                steps.append(step)
            elif not issubclass(type(step.value), type) or reads_attributes(step.value):
                return None
        return steps

    def _step(
        self, symbol: Symbol | None, kinds: dict[type, UsesOfClass] | None, listed: object
    ) -> LoadStep | None:
        """Return the step to a symbol's only value."""
        path: list[tuple[str, int]] = []
        while symbol is not None:
            checks: _Checks = {}
            value = self._value(symbol, checks)
            if issubclass(type(value), Tensor):
                return None  # the run may replace it, and its memory is to be free at once
            if value is not _MISSING:
                self._checks |= checks
                return LoadStep(None, value, tuple(path), kinds, listed)
            if symbol.kind == "variable":
                only = symbol.key not in self._several
                return LoadStep(symbol.key, None, tuple(path), kinds, listed) if only else None
            if symbol.kind != "attribute" or symbol.key == "__class__":
                return None
            path.insert(0, (symbol.key, symbol.offset))
            symbol = symbol.base
        return None

    def _value(self, symbol: Symbol | None, checks: _Checks) -> object:
        """Return the value to which names of modules lead."""
        if symbol is not None and symbol.kind == "global":
            value = _look_up(self._namespace, symbol.key, checks)
            return _look_up(builtins.__dict__, symbol.key, checks) if value is _MISSING else value
        if symbol is not None and symbol.kind == "attribute":
            module = self._value(symbol.base, checks)
            if type(module) is ModuleType:
                return _look_up(module.__dict__, symbol.key, checks)
        return _MISSING


def _look_up(names: dict[str, Any], name: str, checks: _Checks) -> object:
    value = names.get(name, _MISSING)
    checks[id(names), name] = names, name, value
    return value


def _is_plain(call: Symbol) -> bool:
    """Return whether only the function that is called tells what the call may read."""
    base = call.base
    if base is None or call.kind != "call" or base.kind == "call":
        return False
    return base.kind != "attribute" or base.key != "__getattribute__"


class UsesOfClass(NamedTuple):
    """The noted part of attributes' uses, for values of one class. C reads the first three."""

    uses: Mapping[str, Use]
    """attribute -> use, without those that are not noted."""
    others: frozenset[str]
    """The attributes that were noted as the class's."""
    simple: bool
    """True if nothing but `uses` and `others` is to be noted."""
    names: frozenset[str]
    """The attributes that the class may have."""

    @classmethod
    def of(cls, value: object, uses: Mapping[str, Use]) -> UsesOfClass:
        facts = kind_of(value)
        own = own_uses(value, uses) if facts.attributes else {}
        of_class = () if type(value) in _OF_TORCH else own
        return cls(own, frozenset(), facts.plain, frozenset(of_class))


@dataclass(slots=True, eq=False)
class Noted:
    """A watch's knowledge of a function's frames."""

    plans: dict[tuple[int, int], FramePlan] = field(default_factory=dict)
    """(offset of the instruction where a frame ended, id of its globals) -> its plan."""
    kinds: defaultdict[int, dict[type, UsesOfClass]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """id of a mapping of the function's loads -> class -> the noted part."""


@functools.cache
def native_frames() -> Any:
    """Return the compiled module for the steps of plans, or None."""
    try:
        library = compiled("frames")
        library.know(KINDS, INERT_FILES, NOTED, ITEM_METHODS)
    except FAILURES:
        return None
    return library


_MISSING = object()
_OF_TORCH = (Tensor, nn.Parameter)
