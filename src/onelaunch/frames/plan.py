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
from types import ModuleType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from onelaunch.frames.callees import INERT_FILES, NOTED, TELLING, is_inert
from onelaunch.frames.peek import BUILTIN, KINDS, kind_of, own_uses
from onelaunch.frames.stack import Loads, Symbol, Use
from onelaunch.native import FAILURES, compiled

_Checks = dict[tuple[int, str], tuple[dict[str, Any], str, object]]
"""(id of a namespace, name) -> the namespace, the name, and its value."""


class Plan:
    """The loads of frames with the same code, globals and last instruction.

    Attributes:
        fixed: attributes of modules, which one frame notes for all.
        attributes, items, calls: the others, in the order of `Reached`. With each call, True if
            nothing but its function tells whether it is to be noted.
        simple: (variable, attribute or None, offset) of calls of a variable that is assigned once
            at most, or of its attribute.
        others: the calls that are not simple.
    """

    def __init__(self, loads: Loads, at: int, namespace: dict[str, Any]) -> None:
        reached = loads.reached(at)
        self._namespace = namespace
        self._checks: _Checks = {}
        self.fixed: list[tuple[Symbol, dict[str, Use]]] = []
        self.attributes: list[tuple[Symbol, dict[str, Use]]] = []
        self.items = reached.items
        self.calls: list[tuple[Symbol, bool]] = []
        self.others: list[tuple[Symbol, bool]] = []
        simple: list[tuple[str, str | None, int]] = []
        for base, uses in reached.attributes:
            fixed = self._is_fixed(base, uses)
            (self.fixed if fixed else self.attributes).append((base, uses))
        for call in reached.calls:
            plain = _is_plain(call)
            if plain and self._is_inert(call):
                continue
            self.calls.append((call, plain))
            found = _simple(call, loads) if plain else None
            if found is None:
                self.others.append((call, plain))
            else:
                simple.append(found)
        self.simple = tuple(simple)
        self._checked = list(self._checks.values())

    def holds(self) -> bool:
        """Return whether the names that are not looked up again have the same values."""
        for names, name, value in self._checked:
            if names.get(name, _MISSING) is not value:
                return False
        return True

    def _is_fixed(self, base: Symbol, uses: dict[str, Use]) -> bool:
        checks: _Checks = {}
        value = self._value(base, checks)
        if issubclass(type(value), ModuleType):
            for name in uses:
                _look_up(vars(value), name, checks)
        elif not issubclass(type(value), type):  # what hangs on a class is always noted
            return False
        self._checks |= checks
        return True

    def _is_inert(self, call: Symbol) -> bool:
        checks: _Checks = {}
        function = self._value(call.base, checks)
        raised = issubclass(type(function), type) and issubclass(function, BaseException)
        alone = raised and all(part.kind in ("unknown", "constant") for part in call.parts)
        if function is _MISSING or not (is_inert(function) or (alone and id(function) in BUILTIN)):
            return False
        self._checks |= checks
        return True

    def _value(self, symbol: Symbol | None, checks: _Checks) -> object:
        """Return the value to which names of modules lead."""
        if symbol is not None and symbol.kind == "global":
            value = _look_up(self._namespace, symbol.key, checks)
            return _look_up(vars(builtins), symbol.key, checks) if value is _MISSING else value
        if symbol is not None and symbol.kind == "attribute":
            module = self._value(symbol.base, checks)
            if type(module) is ModuleType:
                return _look_up(module.__dict__, symbol.key, checks)
        return _MISSING


def _simple(call: Symbol, loads: Loads) -> tuple[str, str | None, int] | None:
    called = cast(Symbol, call.base)
    attribute = called.key if called.kind == "attribute" else None
    variable = called if attribute is None else cast(Symbol, called.base)
    if variable.kind != "variable" or attribute == "__class__":
        return None
    if variable.key in loads.assigned and variable.key not in loads.once:
        return None
    return variable.key, attribute, called.offset


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


class OfKind(NamedTuple):
    """What a function's loads of a value's attributes come to, for values of one class.
    native/frames.c reads the first three."""

    uses: Mapping[str, Use]
    """attribute -> use, without those that are not noted."""
    others: frozenset[str]
    """The attributes that were noted as the class's."""
    simple: bool
    """True if nothing but `uses` and `others` is to be noted."""
    names: frozenset[str]
    """The attributes that the class may have."""

    @classmethod
    def of(cls, value: object, uses: Mapping[str, Use]) -> OfKind:
        facts = kind_of(value)
        own = own_uses(value, uses) if facts.attributes else {}
        of_class = () if type(value) in _OF_TORCH else own
        return cls(own, frozenset(), facts.plain, frozenset(of_class))


@dataclass(slots=True, eq=False)
class Noted:
    """What a watch has noted for frames of one function."""

    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """(offset of the instruction where a frame ended, id of its globals) -> its plan."""
    kinds: defaultdict[int, dict[type, OfKind]] = field(default_factory=lambda: defaultdict(dict))
    """id of a mapping of the function's loads -> class -> what they come to."""
    arguments: dict[str, dict[type, OfKind]] = field(default_factory=dict)
    """variable of `Loads.arguments` -> its part of `kinds`."""


@functools.cache
def native_note() -> Any:
    """Return what notes simple loads in C, or None."""
    try:
        library = compiled("frames")
        library.know(KINDS, INERT_FILES, NOTED, TELLING)
    except FAILURES:
        return None
    return library.note


_MISSING = object()
_OF_TORCH = (Tensor, nn.Parameter)
