"""The part of a function's loads that may differ from frame to frame.

Most names of a function lead to modules and their functions: `torch`, `F.linear`. What hangs on
them is noted for a first frame; for later ones it is only checked that they lead there still.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from onelaunch.frames.callees import is_inert
from onelaunch.frames.peek import BUILTIN, has_attributes, own_uses
from onelaunch.frames.stack import Reached, Symbol, Use

_Checks = dict[tuple[int, str], tuple[dict[str, Any], str, object]]
"""(id of a namespace, name) -> the namespace, the name, and its value."""


class Plan:
    """The loads of frames with the same code, globals and last instruction.

    Attributes:
        fixed: attributes of modules, which one frame notes for all.
        attributes, items, calls: the others, in the order of `Reached`. With each call, True if
            nothing but its function tells whether it is to be noted.
    """

    def __init__(self, reached: Reached, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._checks: _Checks = {}
        self.fixed: list[tuple[Symbol, dict[str, Use]]] = []
        self.attributes: list[tuple[Symbol, dict[str, Use]]] = []
        self.items = reached.items
        self.calls: list[tuple[Symbol, bool]] = []
        for base, uses in reached.attributes:
            fixed = self._is_fixed(base, uses)
            (self.fixed if fixed else self.attributes).append((base, uses))
        for call in reached.calls:
            plain = _is_plain(call)
            if not (plain and self._is_inert(call)):
                self.calls.append((call, plain))
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


class OfKind:
    """What a function's loads of a value's attributes come to, for values of one class.

    Attributes:
        uses: attribute -> use, without those that are not noted.
        alike: True if this holds for all values of the class.
        of_tensors: True if they are tensors.
        names: the attributes that the class may have.
        others: those that were noted as the class's.
    """

    __slots__ = ("alike", "names", "of_tensors", "others", "uses")

    def __init__(self, value: object, uses: Mapping[str, Use]) -> None:
        kind = type(value)
        self.alike = not issubclass(kind, type)
        self.uses = own_uses(value, uses) if not self.alike or has_attributes(value) else {}
        self.of_tensors = issubclass(kind, Tensor)
        self.names = frozenset(() if kind in _OF_TORCH else self.uses)
        self.others = frozenset[str]()


@dataclass(slots=True, eq=False)
class Noted:
    """What a watch has noted for frames of one function."""

    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """(offset of the instruction where a frame ended, id of its globals) -> its plan."""
    kinds: dict[tuple[type, int], OfKind] = field(default_factory=dict)
    """(class, id of a mapping of the function's loads) -> what they come to."""


_MISSING = object()
_OF_TORCH = (Tensor, nn.Parameter)
