"""The values that the symbols of a function's code had in a frame that has ended."""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, cast

from onelaunch.frames.callees import (
    ITEM_METHODS,
    is_called_by_c,
    is_getattr,
    is_of_dict,
    is_unread,
    taken_apart,
)
from onelaunch.frames.codes import CodeFacts
from onelaunch.frames.origins import is_machinery
from onelaunch.frames.peek import (
    MOST,
    attribute_values,
    elements,
    has_contents,
    items,
    namespaces,
    peek,
)
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Symbol
from onelaunch.identity import id


class Values:
    """The values of the symbols of a function that has run."""

    def __init__(
        self,
        reads: Reads,
        frame: FrameType,
        facts: CodeFacts,
        arguments: Mapping[str, Any],
        results: Mapping[int, list[object]],
    ) -> None:
        self._reads = reads
        values = frame.f_locals
        self._locals = values if type(values) is dict else dict(values)
        self._facts = facts
        self._code = facts.code
        self._globals = frame.f_globals
        self._loads = loads = facts.loads
        self._arguments = arguments
        self._results = (
            {loads.instruction(at): found for at, found in results.items()} if results else _NONE
        )
        self._putting = _NONE_YET  # whose contents are being looked for
        self._following = 0
        """Number of variables whose values are being looked for."""
        self._added = 0
        """Number of values that were found by following assignments."""
        self._so_far: dict[Symbol, tuple[int, list[object]]] = {}
        """symbol -> (`_added` at that time, values), while variables are being followed."""
        self._looked_up: dict[Symbol | str, list[object]] = {}
        """symbol, or name of a variable -> its values."""

    def _values(self, symbol: Symbol | None) -> list[object]:
        """Return the values that a symbol may have had. Runs no user code."""
        if symbol is None:
            return []
        earlier = self._looked_up.get(symbol)
        if earlier is not None:
            return earlier
        kind = symbol.kind
        if kind == "variable":
            values = self._variable(symbol.key)
        elif kind == "global":
            spaces = (self._globals, vars(builtins))
            values = [space[symbol.key] for space in spaces if symbol.key in space][:1]
            if self._facts.of_class and symbol.key in self._locals:
                values = [self._locals[symbol.key], *values]
        elif kind == "constant":
            values = [symbol.key]
        elif kind == "unknown":
            values = []
        else:
            before = self._added
            so_far = self._so_far.get(symbol)
            if so_far is not None and so_far[0] == before:
                return so_far[1]
            values = self._find(symbol)
            if self._following and not self._loads.is_settled(symbol):
                if self._added == before and not self._putting:
                    self._so_far[symbol] = before, values
                return values
        self._looked_up[symbol] = values
        return values

    def _find(self, symbol: Symbol) -> list[object]:
        kind = symbol.kind
        values: list[object] = list(self._results.get(symbol.offset, ())) if self._results else []
        if kind == "attribute":
            for value in self._values(symbol.base):
                values += peek(value, symbol.key)
        elif kind == "namespace":
            values += namespaces(self._values(symbol.base))
        elif kind in ("item", "element"):
            keys = [v for part in symbol.parts for v in self._values(part)]
            inside = self._values(symbol.base)
            values += self._put_into(symbol.base)
            for value in inside:
                values += items(value, keys)
            if symbol.base and symbol.base.kind in _MADE:  # its values are known by their items
                values += inside
        elif kind in ("parts", "either"):
            values += [v for part in symbol.parts for v in self._values(part)]
        elif kind == "call":
            values += self._returned(symbol)
        elif kind == "module":
            values += self._module(symbol)
        return (
            values
            if len(values) < _MOST_REPEATED
            else list({id(v): v for v in values}.values())[:MOST]
        )

    def _variable(self, name: str) -> list[object]:
        """Return a variable's values: at the call, at the end, and those assigned in between."""
        if name in self._looked_up:
            return self._looked_up[name]
        held = self._looked_up[name] = [
            values[name] for values in (self._arguments, self._locals) if name in values
        ]
        loads = self._loads
        if name not in loads.assigned or (held and name in loads.once):
            return held
        if not held and name not in loads.cleared and name not in loads.free:
            return held  # no assignment to it ran
        seen = {id(v) for v in held}
        assigned = loads.assigned[name]
        again = not all(map(loads.is_settled, assigned))
        before = -1
        self._following += 1
        while before < len(held) < MOST and (before < 0 or again):
            before = len(held)
            for symbol in assigned:
                for value in self._values(symbol):
                    if id(value) not in seen and (has_contents(value) or type(value) in (str, int)):
                        seen.add(id(value))
                        held.append(value)
                        self._added += 1
        self._following -= 1
        return held

    def _returned(self, call: Symbol) -> list[object]:
        """Return the possible results of a call; for unread code, the arguments and their items."""
        results: list[object] = []
        for called in self._values(call.base):
            if type(called) is types.FunctionType and not is_machinery(called.__code__.co_filename):
                continue  # its results were seen
            function, given = taken_apart(called)
            if is_getattr(function):
                objects, names, _ = self._of_getattr(given, call)
                results += [v for o in objects for n in names for v in peek(o, n)]
                results += [v for o in objects for v in attribute_values(o)] if not names else []
                results += [v for default in self._given(call)[2:] for v in self._values(default)]
            elif function is globals:
                results.append(self._globals)
            elif function is vars:
                results += namespaces([*given, *self._arguments_of(call)])
            elif function is operator.attrgetter:
                names = [v for v in self._arguments_of(call) if type(v) is str]
                results += [operator.attrgetter(*names)] if names else []
            elif function is type and len(call.parts) == 1:
                results += map(type, self._values(call.parts[0]))
            elif isinstance(function, weakref.ref):
                results.append(cast(Any, weakref.ref.__call__(function)))
            elif isinstance(function, operator.attrgetter):
                arguments = [*given, *self._arguments_of(call)]
                results += [v for o in arguments for v in attribute_values(o) if has_contents(v)]
            elif isinstance(function, type) and is_called_by_c(function):
                results += filter(has_contents, self._arguments_of(call))
                if function is functools.partial:
                    results += self._partials(call)
            elif is_of_dict(function) and cast(Any, function).__name__ in ITEM_METHODS:
                holders, keys, _ = self._of_dict(given, call)
                values = [*self._arguments_of(call), *(v for o in holders for v in items(o, keys))]
                results += filter(has_contents, values)
            elif is_unread(called):
                arguments = [*given, *self._arguments_of(call)]
                full = [v for v in arguments if has_contents(v)]
                results += full
                results += [v for v in map(elements, full) for v in v if has_contents(v)]
                if self._loads.grown:
                    put = [v for part in call.parts for v in self._put_into(part)]
                    results += filter(has_contents, put)
        if call.base and call.base.kind == "call" and self._is_made_by_c(call.base):
            arguments = self._arguments_of(call)  # of an `itemgetter("k")`
            results += [
                v
                for o in arguments
                for v in (*attribute_values(o), *elements(o))
                if has_contents(v)
            ]
        return results

    def _put_into(self, container: Symbol | None) -> list[object]:
        """Return values that the code put into a container. They may be out of it by the end."""
        grown = self._loads.grown
        place = self._loads.place(container) if container and grown else None
        if place is None or place not in grown or place in self._putting:
            return []
        self._putting |= {place}
        values = [v for symbol in grown[place] for v in self._values(symbol)]
        self._putting -= {place}
        return values

    def _partials(self, call: Symbol) -> list[object]:
        """Return the partials that a call may have made of functions, with their first arguments
        as far as they are known."""
        functions, *rest = [self._values(part) for part in call.parts] or [[]]
        given = [values[0] for values in itertools.takewhile(len, rest)]
        return [functools.partial(f, *given) for f in functions if callable(f)]

    def _module_names(self, symbol: Symbol) -> list[str]:
        level = next((v for v in self._values(symbol.parts[0]) if type(v) is int), 0)
        name: str = symbol.key
        if level:
            package = self._globals.get("__package__") or ""
            package = package.rsplit(".", level - 1)[0] if level > 1 else package
            name = f"{package}.{name}".strip(".")
        # `import a.b` gives `a`, and `from a.b import c` the module `a.b`.
        return [name, name.partition(".")[0]]

    def _module(self, symbol: Symbol) -> list[object]:
        modules = map(sys.modules.get, self._module_names(symbol))
        return [module for module in modules if module is not None]

    def _of_dict(
        self, given: tuple[object, ...], call: Symbol
    ) -> tuple[Sequence[object], Sequence[object], bool]:
        """Return the dicts whose method is called, the method's first arguments, and whether there
        are no others."""
        holders, rest = given[:1], call.parts
        if not given and rest:
            first = next(iter(self._values(rest[0])), None)
            if first is not None and not issubclass(type(first), _DICTS):
                rest = self._given(call)  # else it is a method of its holder
        if not given:
            holders, rest = self._values(rest[0]) if rest else (), rest[1:]
        if len(given) > 1 or not rest:
            return holders, given[1:2], True
        return holders, self._values(rest[0]), self._loads.tells(rest[0])

    def _given(self, call: Symbol) -> tuple[Symbol, ...]:
        """Return the arguments of a function of C, which is no method of the object that has it, as
        in `builtins.getattr(box, "scale")` and `dict.get(table, key)`."""
        base, parts = call.base, call.parts
        if base is None or base.kind != "attribute" or not parts or parts[0] is not base.base:
            return parts
        return parts[1:]

    def _arguments_of(self, call: Symbol) -> list[object]:
        return [value for part in call.parts for value in self._values(part)]

    def _is_made_by_c(self, call: Symbol) -> bool:
        """Return whether a call makes an instance of a C class that may read any attribute."""
        classes = [v for v in self._values(call.base) if isinstance(v, type) and is_called_by_c(v)]
        named = all(map(self._loads.tells, call.parts))
        return any(v is not operator.attrgetter or not named for v in classes)

    def _names(self, name: Symbol) -> tuple[list[str], bool]:
        """Return the known values of a symbol for a name, and whether there are no others."""
        return [n for n in self._values(name) if type(n) is str], self._loads.tells(name)

    def _of_getattr(
        self, given: tuple[object, ...], call: Symbol
    ) -> tuple[list[object], list[str], bool]:
        """Return the objects of a `getattr`, and the result of `_names` for its name.

        Args:
            given: the first arguments, where a partial or a method binds them.
        """
        base = call.base
        named = base is not None and base.kind == "attribute" and base.key == "__getattribute__"
        if named and call.parts:
            objects = [v for part in call.parts[:-1] for v in self._values(part)]
            return objects, *self._names(call.parts[-1])  # of `super()`, or `object` and an object
        parts = self._given(call)
        objects = list(given[:1]) or [v for part in parts[:1] for v in self._values(part)]
        if len(given) > 1:
            return objects, [n for n in given[1:2] if type(n) is str], True
        parts = parts[1 - len(given) :]
        names, told = self._names(parts[0]) if parts else ([], False)
        return objects, names, told


_DICTS = (dict, types.MappingProxyType)
_NONE: Mapping[int, list[object]] = {}
_NONE_YET: frozenset[Symbol] = frozenset()
_MOST_REPEATED = 128
"""The number of values from which on those that were found twice are dropped."""
_MADE = ("call", "parts", "either")
"""Kinds of symbols for containers that the code itself makes."""
