"""What is the same in almost every frame of a function's code: what its global names lead to, and
what its arguments' classes hold."""

from __future__ import annotations

import builtins
import types
from collections.abc import Mapping, Sequence
from typing import Any

from onelaunch.frames.callees import is_inert
from onelaunch.frames.peek import class_member, facts_of_type, own_uses, peek
from onelaunch.frames.reads import Reads, raise_uses
from onelaunch.frames.stack import Loads, Reached, Symbol, Use
from onelaunch.identity import id

Uses = dict[str, Use]
Calls = list[Symbol]


def reads_nothing(function: object, calls: Calls) -> bool:
    """Return whether calls of a function read nothing that its own code does not tell."""
    return is_inert(function) or (function is iter and all(len(c.parts) == 1 for c in calls))


class KnownUses:
    """Loads of attributes of a value, which are much the same for each value of a class."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses
        """attribute -> use."""
        self._own: dict[type, frozenset[str]] = {}
        """class -> the attributes that are not noted as read of the class."""
        self._bare: set[type] = set()
        """Classes of values whose attributes are not noted."""

    def note_alike(self, value: object, reads: Reads) -> bool:
        """Note the loads from another value of a known class. Return False if it is not alike."""
        kind = type(value)
        if kind in self._bare:
            return True
        own = self._own.get(kind)
        if own is None or not own <= _get_attribute(value, "__dict__").keys():
            return False
        raise_uses(reads.owner(value).names, self.uses)
        return True

    def learn(self, value: object) -> None:
        """Note what the loads from a value have in common with the next of its class."""
        kind, facts = type(value), facts_of_type(value)
        if not facts.attributes or not own_uses(value, self.uses):
            self._bare.add(kind)
        elif facts.plain:
            own = self.uses.keys() & _get_attribute(value, "__dict__").keys()
            self._own[kind] = own & self._own.get(kind, own)


class FixedVariable(KnownUses):
    """A variable that is never assigned, with its loads."""

    def __init__(self, name: str, uses: Uses, methods: Sequence[tuple[Symbol, Calls]] = ()) -> None:
        super().__init__(uses)
        self.name = name
        self.methods = methods
        """(attribute that is called, its calls)."""
        self._inert: set[object] = set()
        """Functions whose calls read nothing."""

    def readers(self, value: object) -> list[tuple[object, Calls]]:
        """Return the functions behind the value's methods that may read something, with calls."""
        functions: list[tuple[object, Calls]] = []
        for callee, calls in self.methods:
            for function in peek(value, callee.key):
                of_python = type(function) is types.FunctionType
                if of_python and function in self._inert:
                    continue
                if not reads_nothing(function, calls):
                    functions.append((function, calls))
                elif of_python:
                    self._inert.add(function)
        return functions


class Named:
    """The objects that a frame's global names lead to, and what is left to look up in each frame.

    Args:
        namespace: the frame's globals, where the names begin.
        follow: False for the body of a class, which looks in its own names first.
        special: the first argument of a special method.
    """

    def __init__(
        self,
        reached: Reached,
        loads: Loads,
        namespace: dict[str, Any],
        follow: bool,
        special: FixedVariable | None,
    ) -> None:
        self._namespace = namespace
        self._links: dict[tuple[int, str], tuple[dict[str, Any], object]] = {}
        """(id of a namespace, name) -> (namespace, value)."""
        self._own: list[tuple[dict[str, Any], frozenset[str]]] = []
        """(namespace of a module, names in it), where its class may have some of them, too."""
        self.variables = [FixedVariable(*variable) for variable in reached.variables]
        self.objects: list[tuple[object, Uses]] = []
        """(object, attribute -> use), of the objects that names led to."""
        attributes = list(reached.attributes)
        self.callees = dict(reached.callees)
        """callee -> its calls, without the functions that names led to and that read nothing."""
        for base, uses in reached.named_attributes:
            value = self._follow(base) if follow else None
            if value is None:
                attributes.append((base, uses))
            else:
                self.objects.append((value, uses))
                if type(value) is not types.ModuleType and _is_module(value):
                    self._own.append((vars(value), frozenset(uses.keys() & vars(value).keys())))
        self.attributes = [(base, KnownUses(uses)) for base, uses in attributes]
        """(another object, its loads)."""
        for base, calls in reached.named_callees.items():
            value = self._follow(base) if follow else None
            if value is None or not reads_nothing(value, calls):
                self.callees[base] = calls
        self._alike = self.variables if special is None else [*self.variables, special]
        again = loads.assigned.keys() - loads.once
        self._called = [(c.key, calls) for c, calls in self.callees.items() if c.kind == "variable"]
        self._has_more = bool(
            len(self._called) < len(self.callees)
            or any(name in again for name, _ in self._called)
            or (special is not None and special.name in loads.assigned)
            or self.attributes
            or reached.items
            or reached.shaped
            or loads.opaque
        )

    def note_alike(
        self, reads: Reads, namespace: dict[str, Any], values: Mapping[str, Any]
    ) -> bool:
        """Note another frame, if it reads like those before it. Else return False."""
        if self._has_more or not self.is_current(namespace):
            return False
        for variable in self._alike:
            if variable.name in values:
                value = values[variable.name]
                if not variable.note_alike(value, reads):
                    return False
                if variable.methods and variable.readers(value):
                    return False
        for name, calls in self._called:
            if name not in values or not reads_nothing(values[name], calls):
                return False
        return True

    def is_current(self, namespace: dict[str, Any]) -> bool:
        """Return whether the names lead to the same objects still."""
        if self._namespace is not namespace:
            return False
        for (_, name), (names, value) in self._links.items():
            if names.get(name) is not value:
                return False
        return not self._own or all(names <= own.keys() for own, names in self._own)

    def _follow(self, symbol: Symbol) -> object:
        name: str = symbol.key
        names: dict[str, Any] = self._namespace
        if symbol.kind == "attribute":
            module = self._follow(symbol.base) if symbol.base is not None else None
            if not _is_module(module) or class_member(type(module), name) is not None:
                return None
            names = vars(module)
        elif name not in names:
            self._links[id(names), name] = names, None
            names = builtins.__dict__
        value = names.get(name)
        if not issubclass(type(value), _KEPT):
            return None
        self._links[id(names), name] = names, value
        return value


def _is_module(value: object) -> bool:
    kind = type(value)  # `isinstance` would ask the value for its class
    return issubclass(kind, types.ModuleType) and (
        class_member(kind, "__getattribute__") is types.ModuleType.__getattribute__
    )


_KEPT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
"""Types of the objects that are kept alive until the watch ends."""
_get_attribute: Any = object.__getattribute__
