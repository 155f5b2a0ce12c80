"""A function that has run: its loads, looked up on the objects that its variables held."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, cast

from torch import Tensor, nn

from onelaunch.frames.callees import (
    CHANGE,
    ITEM_METHODS,
    READ_WHOLE,
    SETTERS,
    hands_on,
    is_called_by_c,
    is_format,
    is_getattr,
    is_inert,
    is_of_dict,
    is_unread,
    names_of,
    paths_of,
    reads_attributes,
    taken_apart,
)
from onelaunch.frames.origins import is_installed, is_machinery
from onelaunch.frames.peek import (
    MOST,
    attribute_values,
    attributes_of,
    elements,
    global_values,
    has_attributes,
    has_contents,
    is_key,
    items,
    keys_of,
    namespaces,
    own_uses,
    peek,
)
from onelaunch.frames.reads import Reads, StandIn, raise_uses
from onelaunch.frames.stack import MEMBER, UNKNOWN, Loads, Symbol, Use, without_offset
from onelaunch.source import TORCH


class RanFrame:
    """A function that has run, with the values of its symbols."""

    def __init__(
        self,
        reads: Reads,
        frame: FrameType,
        loads: Loads,
        arguments: Mapping[str, Any],
        results: Mapping[int, list[object]],
    ) -> None:
        self._reads = reads
        values = frame.f_locals
        self._locals = values if type(values) is dict else dict(values)
        self._code = frame.f_code
        self._globals = frame.f_globals
        # The body of a class looks in its own names first.
        of_class = (
            not frame.f_code.co_flags & inspect.CO_OPTIMIZED and values is not frame.f_globals
        )
        self._names_of_class = self._locals if of_class else _NO_NAMES
        self._loads = loads
        self._arguments = arguments
        self._results = (
            {loads.instruction(at): found for at, found in results.items()} if results else _NONE
        )
        self._variables: dict[str, list[object]] = {}
        self._putting: set[Symbol] = set()  # whose contents are being looked for
        self._following = 0
        """Number of variables whose values are being looked for."""
        self._known: dict[int, list[object]] = {}
        """id of a symbol -> its values."""
        self.of_tensors = False
        """True if it read what hangs on tensors, as no other frame may do."""

    def note(self, at: int) -> None:
        """Note all loads and stores of the function's code.

        Args:
            at: the offset of the instruction where the frame ended.
        """
        self._note_names()
        reached = self._loads.reached(at)
        for base, uses in reached.attributes:
            for value in self._values(base):
                self._attributes(value, uses)
        for place, use in reached.items:
            self._note_item(place, use)
        for symbol in self._loads.opaque:
            self._note_opaque(self._values(symbol))
        for call in reached.calls:
            self._note_call(call)
            for function in self._values(call.base):
                if not is_inert(function):
                    self._note_call_of(function, call)

    def note_special(self, argument: str, uses: Mapping[str, Use]) -> None:
        """Note the lookup of a special method, which no instruction loads."""
        name = self._code.co_name
        for value in self._variable(argument):
            for kind in type(value).__mro__:
                if getattr(kind.__dict__.get(name), "__code__", None) is self._code:
                    self._attributes(value, uses)
                    break

    def _note_names(self) -> None:
        reads, loads = self._reads, self._loads
        if (self._code, id(self._globals)) not in reads.noted:
            reads.noted.add((self._code, id(self._globals)))
            raise_uses(reads.of_globals(self._globals), loads.globals)
            inside = {(self._code, name): use for name, use in loads.variables.items()}
            raise_uses(reads.variables, inside)

    def _attributes(self, value: object, uses: Mapping[str, Use]) -> None:
        """Note attributes of a value: attribute -> use, of the code."""
        own = own_uses(value, uses) if has_attributes(value) else None
        if not own:
            return
        kind = type(value)
        self.of_tensors |= issubclass(kind, Tensor)
        raise_uses(self._reads.owner(value).names, own)
        inside = own if kind in _OF_TORCH else attributes_of(value) or ()
        others = {name: use for name, use in own.items() if name not in inside}
        if others:  # its class has them
            raise_uses(self._reads.owner(kind).names, others)

    def _note_item(self, place: Symbol, use: Use) -> None:
        (key,) = place.parts
        settled = self._loads.is_settled(key)
        if settled and not any(isinstance(v, _CONTAINERS) for v in self._values(place.base)):
            return
        holders, told = self._values(place.base), self._loads.tells(key)
        if place.key == MEMBER:  # a list is searched
            self._note_keys((v for v in holders if isinstance(v, (list, deque))), (), False)
            holders = [v for v in holders if not isinstance(v, (list, deque))]
        self._note_keys(holders, self._values(key), told, use)

    def _note_keys(
        self, holders: Iterable[object], keys: Iterable[object], told: bool, use: Use = Use.READ
    ) -> None:
        """Note items of containers; every item, unless the keys are all `told`."""
        known = [k for k in keys if is_key(k)]
        told, whole = told and bool(known), self._reads.whole
        for value in holders:
            if id(value) in whole and use is Use.READ:
                continue
            if value is sys.modules or value is self._globals:
                self._note_entries(cast(Any, value), known or cast(Any, value), use)
            elif isinstance(value, _CONTAINERS):
                if not told:
                    whole.add(id(value))
                    if use is Use.READ:
                        continue
                found = known if told else [*known, *keys_of(value)]
                if isinstance(value, (list, deque)):  # `history[-1]`
                    found = [k + len(value) if type(k) is int and k < 0 else k for k in found]
                raise_uses(self._reads.items, dict.fromkeys([(id(value), k) for k in found], use))

    def _note_call(self, call: Symbol) -> None:
        """Note an import, or a call whose shape tells that it reads its arguments."""
        base = call.base
        if call.kind == "module":
            self._note_entries(sys.modules, self._module_names(call))
        if base is not None and base.kind == "attribute" and base.key == "__getattribute__":
            self._note_getattr(*self._of_getattr((), call))
        if base is not None and base.kind == "attribute" and base.key in SETTERS:
            count = len(call.parts) - SETTERS[base.key]  # of `super()`, or `object` and an object
            objects = [v for part in call.parts[:count] for v in self._values(part)]
            self._note_setattr(objects, *self._names(call.parts[count] if count >= 0 else UNKNOWN))
        if base is not None and base.kind == "call" and self._is_made_by_c(base):
            self._note_opaque(self._arguments_of(call))

    def _note_call_of(self, function: object, call: Symbol) -> None:
        """Note the possible reads of a call's arguments by a function that is called."""
        if type(function) is types.FunctionType and not reads_attributes(function):
            if function is importlib.import_module:
                self._note_entries(sys.modules, self._arguments_of(call)[:1])
            return
        function, given = taken_apart(function)
        if function is __import__:
            self._note_entries(sys.modules, self._arguments_of(call)[:1])
        elif is_of_dict(function):
            self._note_of_dict(function, *self._of_dict(given, call))
        elif function is setattr or function is delattr:
            self._note_setattr(*self._of_getattr(given, call))
        asks = function is type or function is isinstance
        # Torch's optimizers ask for the type of a number in the texts of errors alone.
        if asks and call.parts and not self._code.co_filename.startswith(_OPTIMIZERS):
            for value in self._values(call.parts[0]):
                if issubclass(type(value), StandIn):
                    cast(StandIn, value).asked(function)
        elif is_getattr(function):
            objects, names, told = self._of_getattr(given, call)
            self._note_getattr(objects, names, told)
            if not given:
                self._note_untold(names, call.parts[:1])
        elif isinstance(function, operator.attrgetter):
            self._note_getter(function, [*given, *self._arguments_of(call)])
            self._note_untold(names_of(function), call.parts)
        elif reads_attributes(function):
            values = [*given, *self._arguments_of(call)]
            for _ in range(2 if is_format(function) else 0):  # `"{0.layer.scale}".format(model)`
                values += [v for o in values for v in attribute_values(o) if has_attributes(v)]
            self._note_opaque(values)
        elif hands_on(function):
            arguments = [*given, *self._arguments_of(call)]
            if any(map(reads_attributes, arguments)):  # `map(attrgetter("scale"), layers)`
                self._note_opaque(part for value in arguments for part in elements(value))
            for getter in arguments:
                if isinstance(getter, operator.attrgetter):
                    self._note_untold(names_of(getter), call.parts)
            for value in filter(callable, arguments):
                method, held = taken_apart(value)
                if is_of_dict(method):  # `map(table.get, keys)`
                    self._note_of_dict(method, held or arguments, [], False)
                elif method is setattr or method is delattr:
                    self._note_setattr(held or arguments, [], False)

    def _of_dict(
        self, given: tuple[object, ...], call: Symbol
    ) -> tuple[Sequence[object], Sequence[object], bool]:
        """Return the dicts whose method is called, the method's first arguments, and whether there
        are no others."""
        holders, rest = given[:1], call.parts
        kinds = (type, types.ModuleType)
        if not given and rest and isinstance(next(iter(self._values(rest[0])), None), kinds):
            rest = rest[1:]  # of `dict.get(table, key)`
        if not given:
            holders, rest = self._values(rest[0]) if rest else (), rest[1:]
        if len(given) > 1 or not rest:
            return holders, given[1:2], True
        return holders, self._values(rest[0]), self._loads.tells(rest[0])

    def _note_of_dict(
        self, method: Any, holders: Iterable[object], keys: Sequence[object], told: bool
    ) -> None:
        named = method.__name__ in ITEM_METHODS
        if named or method.__name__ in READ_WHOLE:
            self._note_keys(holders, keys if named else (), told and named)
        elif method.__name__ in CHANGE:
            namespaces = [v for v in holders if v is self._globals or v is sys.modules]
            self._note_keys(namespaces, (), False)

    def _note_entries(
        self, namespace: dict[str, Any], names: Iterable[object], use: Use = Use.READ
    ) -> None:
        known = [name for name in list(names) if type(name) is str]
        raise_uses(self._reads.of_globals(namespace), dict.fromkeys(known, use))

    def _note_setattr(self, objects: Iterable[object], names: list[str], told: bool) -> None:
        """Note a store to an attribute by name; all attributes count as read if it is not known."""
        for value in filter(has_attributes, objects):
            self.of_tensors |= isinstance(value, Tensor)
            owner = self._reads.owner(value)
            owner.opaque |= not (told and names)
            raise_uses(owner.names, own_uses(value, dict.fromkeys(names, Use.NONE)))

    def _arguments_of(self, call: Symbol) -> list[object]:
        return [value for part in call.parts for value in self._values(part)]

    def _is_made_by_c(self, call: Symbol) -> bool:
        """Return whether a call makes an instance of a C class that may read any attribute."""
        made = [v for v in self._values(call.base) if isinstance(v, type) and is_called_by_c(v)]
        named = all(map(self._loads.tells, call.parts))
        return any(v is not operator.attrgetter or not named for v in made)

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
        objects = list(given[:1]) or [v for part in call.parts[:1] for v in self._values(part)]
        if len(given) > 1:
            return objects, [n for n in given[1:2] if type(n) is str], True
        parts = call.parts[1 - len(given) :]
        names, told = self._names(parts[0]) if parts else ([], False)
        return objects, names, told

    def _note_getattr(self, objects: Iterable[object], names: list[str], told: bool) -> None:
        for value in filter(has_attributes, objects):
            uses = own_uses(value, dict.fromkeys(names, Use.READ))
            if uses or not (told and names) or "__dict__" in names:
                self.of_tensors |= isinstance(value, Tensor)
                owner = self._reads.owner(value)
                owner.opaque |= not names or "__dict__" in names
                owner.asked |= not told
                raise_uses(owner.names, uses)

    def _note_untold(self, names: Iterable[str], objects: Iterable[Symbol]) -> None:
        """Note names that are read of objects that cannot all be found: of any object."""
        if not (all(map(self._loads.tells, objects)) or is_installed(self._code.co_filename)):
            self._reads.loose.update(names)

    def _note_getter(self, getter: operator.attrgetter[Any], objects: list[object]) -> None:
        for path in paths_of(getter):
            reached = objects
            for name in path.split("."):
                self._note_getattr(reached, [name], True)
                reached = [found for value in reached for found in peek(value, name)]

    def _note_opaque(self, values: Iterable[object]) -> None:
        for value in filter(has_attributes, values):
            # Functions of `operator` and others mostly compute with a bare tensor.
            if has_contents(value) or not isinstance(value, Tensor):
                self.of_tensors |= isinstance(value, Tensor)
                self._reads.owner(value).opaque = True

    # Values of symbols.

    def _values(self, symbol: Symbol | None) -> list[object]:
        """Return the values that a symbol may have had. Runs no user code."""
        if symbol is None:
            return []
        known = self._known.get(id(symbol))
        if known is not None:
            return known
        kind = symbol.kind
        found: list[object] = []
        if kind == "variable":
            found = self._variable(symbol.key)
        elif kind == "global":
            found = global_values(self._globals, symbol.key)
            if symbol.key in self._names_of_class:
                found = [self._names_of_class[symbol.key], *found]
        elif kind == "constant":
            found = [symbol.key]
        elif kind != "unknown":
            found = self._find(symbol)
            if self._following and not self._loads.is_settled(symbol):
                return found
        self._known[id(symbol)] = found
        return found

    def _find(self, symbol: Symbol) -> list[object]:
        kind = symbol.kind
        found: list[object] = list(self._results.get(symbol.offset, ())) if self._results else []
        if kind == "attribute":
            for value in self._values(symbol.base):
                found += peek(value, symbol.key)
        elif kind == "namespace":
            found += namespaces(self._values(symbol.base))
        elif kind in ("item", "element"):
            keys = [v for part in symbol.parts for v in self._values(part)]
            inside = self._values(symbol.base)
            found += self._put_into(symbol.base)
            found += [v for o in inside for v in items(o, keys)]
            if symbol.base and symbol.base.kind in _MADE:  # its values are known by their items
                found += inside
        elif kind in ("parts", "either"):
            found += [v for part in symbol.parts for v in self._values(part)]
        elif kind == "call":
            found += self._returned(symbol)
        elif kind == "module":
            found += self._module(symbol)
        return found if len(found) <= MOST else found[:MOST]

    def _variable(self, name: str) -> list[object]:
        """Return a variable's values: at the call, at the end, and those assigned in between."""
        if name in self._variables:
            return self._variables[name]
        found = self._variables[name] = [
            values[name] for values in (self._arguments, self._locals) if name in values
        ]
        loads = self._loads
        if name not in loads.assigned or (found and name in loads.once):
            return found
        if not found and name not in loads.cleared and name not in loads.free:
            return found  # no assignment to it ran
        seen = {id(v) for v in found}
        assigned = loads.assigned[name]
        again = not all(map(loads.is_settled, assigned))
        before = -1
        self._following += 1
        while before < len(found) < MOST and (before < 0 or again):
            before = len(found)
            for symbol in assigned:
                for value in self._values(symbol):
                    if id(value) not in seen and (has_contents(value) or type(value) in (str, int)):
                        seen.add(id(value))
                        found.append(value)
        self._following -= 1
        return found

    def _returned(self, call: Symbol) -> list[object]:
        """Return the possible results of a call; for unread code, the arguments and their items."""
        found: list[object] = []
        for called in self._values(call.base):
            if type(called) is types.FunctionType and not is_machinery(called.__code__.co_filename):
                continue  # its results were seen
            function, given = taken_apart(called)
            if is_getattr(function):
                objects, names, _ = self._of_getattr(given, call)
                found += [v for o in objects for n in names for v in peek(o, n)]
                found += [v for o in objects for v in attribute_values(o)] if not names else []
                found += [v for default in call.parts[2:] for v in self._values(default)]
            elif function is globals:
                found.append(self._globals)
            elif function is vars:
                found += namespaces([*given, *self._arguments_of(call)])
            elif function is operator.attrgetter:
                names = [v for v in self._arguments_of(call) if type(v) is str]
                found += [operator.attrgetter(*names)] if names else []
            elif function is type and len(call.parts) == 1:
                found += map(type, self._values(call.parts[0]))
            elif isinstance(function, weakref.ref):
                found.append(cast(Any, weakref.ref.__call__(function)))
            elif isinstance(function, operator.attrgetter):
                arguments = [*given, *self._arguments_of(call)]
                found += [v for o in arguments for v in attribute_values(o) if has_contents(v)]
            elif isinstance(function, type) and is_called_by_c(function):
                found += filter(has_contents, self._arguments_of(call))
                if function is functools.partial:
                    found += self._partials(call)
            elif is_of_dict(function) and cast(Any, function).__name__ in ITEM_METHODS:
                holders, keys, _ = self._of_dict(given, call)
                values = [*self._arguments_of(call), *(v for o in holders for v in items(o, keys))]
                found += filter(has_contents, values)
            elif is_unread(called):
                arguments = [*given, *self._arguments_of(call)]
                found += [v for v in arguments if has_contents(v)]
                found += [v for v in map(elements, arguments) for v in v if has_contents(v)]
                found += [v for part in call.parts for v in self._put_into(part) if has_contents(v)]
        if call.base and call.base.kind == "call" and self._is_made_by_c(call.base):
            arguments = self._arguments_of(call)  # of an `itemgetter("k")`
            found += [
                v
                for o in arguments
                for v in (*attribute_values(o), *elements(o))
                if has_contents(v)
            ]
        return found

    def _put_into(self, container: Symbol | None) -> list[object]:
        """Return values that the code put into a container. They may be out of it by the end."""
        place = without_offset(container) if container and self._loads.grown else None
        if place is None or place in self._putting:
            return []
        self._putting.add(place)
        found = [v for symbol in self._loads.grown.get(place, ()) for v in self._values(symbol)]
        self._putting.discard(place)
        return found

    def _partials(self, call: Symbol) -> list[object]:
        """Return the partials that a call may have made of functions, with their first arguments
        as far as they are known."""
        functions, *rest = [self._values(part) for part in call.parts] or [[]]
        given = [found[0] for found in itertools.takewhile(len, rest)]
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
        found = map(sys.modules.get, self._module_names(symbol))
        return [module for module in found if module is not None]


_NONE: Mapping[int, list[object]] = {}
_NO_NAMES: Mapping[str, object] = {}
_OF_TORCH = (Tensor, nn.Parameter)
_OPTIMIZERS = f"{TORCH}optim"
_CONTAINERS = (dict, list, deque, types.MappingProxyType)
_MADE = ("call", "parts", "either")
"""Kinds of symbols for containers that the code itself makes."""
