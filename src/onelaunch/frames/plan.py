"""The part of a function's loads that may differ from frame to frame.

Most names of a function lead to modules and their functions: `torch`, `F.linear`. What hangs on
them is noted for a first frame; for later ones it is only checked that they lead there still.
"""

from __future__ import annotations

import builtins
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from onelaunch.frames.callees import (
    is_inert,
    only_hands_on,
    reads_attributes,
)
from onelaunch.frames.peek import kind_of, own_uses
from onelaunch.frames.stack import Loads, Symbol, Use

_Checks = dict[tuple[int, str], tuple[dict[str, Any], str, object]]
"""(id of a namespace, name) -> the namespace, the name, and its value."""


Attributes = list[tuple[Symbol, Mapping[str, Use]]]
Calls = list[tuple[Symbol, bool]]
"""Calls, each with True if nothing but its function tells whether it is to be noted."""


class FramePlan:
    """The loads of frames with the same code, globals and last instruction.

    Attributes:
        fixed: attributes of modules and classes, which one frame notes for all.
        attributes, items, calls: the others, in their order.
    """

    def __init__(self, loads: Loads, at: int, namespace: dict[str, Any]) -> None:
        reached = loads.reached(at)
        self._namespace = namespace
        self._checks: _Checks = {}
        self.fixed: Attributes = []
        self.attributes: Attributes = []
        self.items = reached.items
        arguments = [(Symbol("variable", key=n), uses) for n, uses in loads.arguments.items()]
        for load in (*arguments, *reached.attributes):
            (self.fixed if self._is_fixed(*load) else self.attributes).append(load)
        calls = [(call, _is_plain(call)) for call in reached.calls]
        self.calls: Calls = [
            (call, plain) for call, plain in calls if not (plain and self._notes_nothing(call))
        ]
        self._checked = tuple(self._checks.values())

    def holds(self) -> bool:
        """Return whether the names that are not looked up again have the same values."""
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

    def _notes_nothing(self, call: Symbol) -> bool:
        """Return whether names of modules tell that a call notes nothing."""
        checks: _Checks = {}
        function: Any = self._value(call.base, checks)
        if function is _MISSING or issubclass(type(function), Tensor):
            return False
        found = is_inert(function) or (
            only_hands_on(function)
            and all(self._reads_nothing(part, checks) for part in call.parts)
        )
        self._checks |= checks if found else {}
        return found

    def _reads_nothing(self, part: Symbol, checks: _Checks) -> bool:
        """Return whether an argument is no callee that reads attributes."""
        if part.kind in ("unknown", "constant"):
            return True
        value = self._value(part, checks)
        return issubclass(type(value), type) and not reads_attributes(value)

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
    """The noted part of attributes' uses, for values of one class."""

    uses: Mapping[str, Use]
    """attribute -> use, without those that are not noted."""
    others: frozenset[str]
    """The attributes that were noted as the class's."""
    names: frozenset[str]
    """The attributes that the class may have."""

    @classmethod
    def of(cls, value: object, uses: Mapping[str, Use]) -> UsesOfClass:
        own = own_uses(value, uses) if kind_of(value).attributes else {}
        of_class = () if type(value) in _OF_TORCH else own
        return cls(own, frozenset(), frozenset(of_class))


@dataclass(slots=True, eq=False)
class Noted:
    """A watch's knowledge of a function's frames."""

    plans: dict[tuple[int, int], FramePlan] = field(default_factory=dict)
    """(offset of the instruction where a frame ended, id of its globals) -> its plan."""
    kinds: defaultdict[int, dict[type, UsesOfClass]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """id of a mapping of the function's loads -> class -> the noted part."""


_MISSING = object()
_OF_TORCH = (Tensor, nn.Parameter)
