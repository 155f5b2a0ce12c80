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

from onelaunch.frames.callees import INERT_FILES, NOTED, TELLING, is_inert, only_hands_on
from onelaunch.frames.peek import KINDS, kind_of, own_uses
from onelaunch.frames.stack import Loads, Symbol, Use
from onelaunch.native import FAILURES, compiled

_Checks = dict[tuple[int, str], tuple[dict[str, Any], str, object]]
"""(id of a namespace, name) -> the namespace, the name, and its value."""


Attributes = list[tuple[Symbol, Mapping[str, Use]]]
Calls = list[tuple[Symbol, bool]]
"""Calls, each with True if nothing but its function tells whether it is to be noted."""
_Path = tuple[tuple[str, int], ...]
_Step = tuple[str | None, object, _Path, "dict[type, OfKind] | None"]
"""A variable, or else a value; (attribute, offset) on the way from there; what is to be noted of
the attributes of the value at the end, or None if it is to be inert."""


class Plan:
    """The loads of frames with the same code, globals and last instruction.

    Attributes:
        fixed: attributes of modules and classes, which one frame notes for all.
        attributes, items, calls: the others, in their order.
        steps: those of them that `native_note` notes, if all of them are as simple as they seem.
        left: the attributes and calls that are then left.
    """

    def __init__(self, loads: Loads, at: int, namespace: dict[str, Any], noted: Noted) -> None:
        reached = loads.reached(at)
        self._loads = loads
        self._namespace = namespace
        self._checks: _Checks = {}
        steps: list[_Step] = []
        self.fixed: Attributes = []
        self.attributes: Attributes = []
        self.items = reached.items
        self.calls: Calls = []
        self.left: tuple[Attributes, Calls] = [], []
        arguments = [(Symbol("variable", key=n), uses) for n, uses in loads.arguments.items()]
        for base, uses in (*arguments, *reached.attributes):
            if self._is_fixed(base, uses):
                self.fixed.append((base, uses))
                continue
            self.attributes.append((base, uses))
            step = self._step(base, noted.kinds[id(uses)])
            if step is None:
                self.left[0].append((base, uses))
            else:
                steps.append(step)
        for call in reached.calls:
            plain = _is_plain(call)
            found = self._steps_of(call) if plain else None
            if found is None or found:
                self.calls.append((call, plain))
            if found is None:
                self.left[1].append((call, plain))
            else:
                steps += found
        self.steps = tuple(steps)
        self._checked = list(self._checks.values())

    def holds(self) -> bool:
        """Return whether the names that are not looked up again have the same values."""
        for names, name, value in self._checked:
            if names.get(name, _MISSING) is not value:
                return False
        return True

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

    def _steps_of(self, call: Symbol) -> list[_Step] | None:
        """Return steps to what must be inert for a call to note nothing."""
        called = self._step(call.base, None)
        if called is None or called[0] is not None or called[2]:
            return None if called is None else [called]
        function: Any = called[1]
        if is_inert(function):
            return []
        if not only_hands_on(function):
            return None
        parts = [part for part in call.parts if part.kind not in ("unknown", "constant")]
        steps = [step for part in parts if (step := self._step(part, None)) is not None]
        return steps if len(steps) == len(parts) else None

    def _step(self, symbol: Symbol | None, kinds: dict[type, OfKind] | None) -> _Step | None:
        """Return the step to a symbol's only value."""
        path: list[tuple[str, int]] = []
        while symbol is not None:
            checks: _Checks = {}
            value = self._value(symbol, checks)
            if value is not _MISSING:
                self._checks |= checks
                return None, value, tuple(path), kinds
            if symbol.kind == "variable":
                name, loads = symbol.key, self._loads
                known = name not in loads.assigned or name in loads.once
                return (name, None, tuple(path), kinds) if known else None
            if symbol.kind != "attribute" or symbol.key == "__class__":
                return None
            path.insert(0, (symbol.key, symbol.offset))
            symbol = symbol.base
        return None

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


class OfKind(NamedTuple):
    """What a function's loads of a value's attributes come to, for values of one class. C reads the
    first three."""

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
