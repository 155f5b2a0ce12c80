"""What is the same in almost every frame of a function's code: what its global names lead to, and
what its arguments' classes hold."""

from __future__ import annotations

import builtins
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor, nn

from onelaunch.frames.callees import is_inert
from onelaunch.frames.peek import LEAVES, attributes_of, class_member, facts_of_type, is_of_tensors
from onelaunch.frames.stack import Reached, Symbol, Use

Uses = dict[str, Use]
Calls = list[Symbol]


def reads_nothing(function: object, calls: Calls) -> bool:
    """Return whether calls of a function read nothing that its own code does not tell."""
    return is_inert(function) or (function is iter and all(len(c.parts) == 1 for c in calls))


class Shape(NamedTuple):
    """The notes of an object that the next object of its class need not repeat."""

    noted: bool
    """False for objects whose attributes are not noted."""
    of_class: Set[str]
    """The attributes that are not the object's own."""
    methods: Sequence[tuple[str, object]]
    """(name, function of the class that reads nothing, or None)."""

    def is_of(self, value: object, uses: Uses) -> bool:
        """Return whether another object of the class has this shape, too."""
        if not self.noted:
            return True
        own, kind = attributes_of(value) or _NO_NAMES, type(value)
        if uses.keys() - own.keys() != self.of_class:
            return False
        for name, function in self.methods:
            if class_member(kind, name, _NOTHING) is not function:
                return False
        return True


class FixedVariable:
    """A variable that is never assigned, with its loads."""

    def __init__(self, name: str, uses: Uses, methods: list[tuple[Symbol, Calls]]) -> None:
        self.name = name
        self.uses = uses
        """attribute -> use."""
        self.methods = methods
        """(attribute that is called, its calls)."""
        self.shapes: dict[type, Shape] = {}

    def learn(self, value: object, found: list[list[object]]) -> None:
        """Note the shape of a value, if it has one. `found` has the values of each method."""
        kind, facts = type(value), facts_of_type(value)
        names = [callee.key for callee, _ in self.methods]
        if kind in _OF_TORCH:
            if all(is_of_tensors(kind, name) for name in (*self.uses, *names)):
                self.shapes[kind] = _NOTHING
        elif kind in LEAVES:
            if not names:
                self.shapes[kind] = _NOTHING
        elif facts.plain and facts.attributes:
            of_class = self.uses.keys() - (attributes_of(value) or _NO_NAMES).keys()
            methods = [(name, class_member(kind, name, _NOTHING)) for name in names]
            for (name, member), functions, (_, calls) in zip(
                methods, found, self.methods, strict=True
            ):
                of_member = functions if member is None else [f for f in functions if f is member]
                if name not in of_class or len(of_member) != (member is not None):
                    return
                if len(functions) != len(of_member) or not reads_nothing(member, calls):
                    return
            self.shapes[kind] = Shape(True, of_class, methods)


class Named:
    """The objects that a frame's global names lead to, and what is left to look up in each frame.

    Args:
        namespace: the frame's globals, where the names begin.
        follow: False for the body of a class, which looks in its own names first.
    """

    def __init__(self, reached: Reached, namespace: dict[str, Any], follow: bool) -> None:
        self._namespace = namespace
        self._links: list[tuple[Mapping[str, Any], str, object]] = []
        """(namespace, name, value)."""
        self.variables = [FixedVariable(*variable) for variable in reached.variables]
        self.found: list[tuple[object, Uses]] = []
        """(object, attribute -> use), of the objects that names led to."""
        attributes = list(reached.attributes)
        self.callees = dict(reached.callees)
        """callee -> its calls, without the functions that names led to and that read nothing."""
        for base, uses in reached.named_attributes:
            value = self._follow(base) if follow else None
            if value is None or _is_mixed(value, uses):
                attributes.append((base, uses))
            else:
                self.found.append((value, uses))
        self.attributes = [(base, uses, set[type]()) for base, uses in attributes]
        """(another object, attribute -> use, classes without these attributes)."""
        for base, calls in reached.named_callees.items():
            value = self._follow(base) if follow else None
            if value is None or not reads_nothing(value, calls):
                self.callees[base] = calls

        more = self.variables or self.attributes or self.callees
        self._is_all = not (more or reached.items or reached.shaped or reached.opaque)

    def is_all(self, namespace: dict[str, Any]) -> bool:
        """Return whether another frame has nothing else to look up, and nothing has changed."""
        return self._is_all and self.is_current(namespace)

    def is_current(self, namespace: dict[str, Any]) -> bool:
        """Return whether the names lead to the same objects still."""
        current = self._namespace is namespace
        for names, name, value in self._links:
            current &= names.get(name) is value
        return current

    def _follow(self, symbol: Symbol) -> object:
        """Return the object that a name leads to, or None."""
        name: str = symbol.key
        names: Mapping[str, Any] = self._namespace
        if symbol.kind == "attribute":
            module = self._follow(symbol.base) if symbol.base is not None else None
            if not _is_module(module) or class_member(type(module), name) is not None:
                return None
            names = vars(module)
        elif name not in names:
            self._links.append((names, name, None))
            names = vars(builtins)
        value = names.get(name)
        if not issubclass(type(value), _KEPT):
            return None
        self._links.append((names, name, value))
        return value


def _is_mixed(value: object, uses: Uses) -> bool:
    """Return whether a module's attributes may be in its own names or its class, as it changes."""
    own = vars(value) if _is_module(value) else _NO_NAMES
    return type(value) is not types.ModuleType and not own.keys().isdisjoint(uses)


def _is_module(value: object) -> bool:
    kind = type(value)  # `isinstance` would ask the value for its class
    return issubclass(kind, types.ModuleType) and (
        class_member(kind, "__getattribute__") is types.ModuleType.__getattribute__
    )


_KEPT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
"""Types of the objects that are kept alive until the watch ends."""
_OF_TORCH = (Tensor, nn.Parameter)
_NO_NAMES: dict[str, Any] = {}
_NOTHING = Shape(False, set(), ())
