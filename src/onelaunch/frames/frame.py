"""A function that has run: its loads, noted of the objects that its variables held."""

from __future__ import annotations

import importlib
import operator
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from onelaunch.frames.callees import (
    CHANGE,
    ITEM_METHODS,
    READ_WHOLE,
    hands_on,
    is_format,
    is_getattr,
    is_inert,
    is_of_dict,
    names_of,
    paths_of,
    reads_attributes,
    taken_apart,
)
from onelaunch.frames.named import FixedVariable, KnownUses, Named, reads_nothing
from onelaunch.frames.origins import is_installed
from onelaunch.frames.peek import (
    attribute_values,
    attributes_of,
    elements,
    facts_of_type,
    has_attributes,
    has_contents,
    is_key,
    own_uses,
    peek,
)
from onelaunch.frames.reads import Reads, StandIn, raise_uses
from onelaunch.frames.stack import MEMBER, SETTERS, UNKNOWN, Symbol, Use
from onelaunch.frames.values import Values
from onelaunch.identity import id
from onelaunch.source import TORCH


class RanFrame(Values):
    """A function that has run, whose loads are noted."""

    reads_tensor_attributes = False
    """True if it read what hangs on tensors, as no other frame may do."""

    def note(self, at: int) -> None:
        """Note all loads and stores of the function's code.

        Args:
            at: the offset of the instruction where the frame ended.
        """
        reached, named = self._loads.reached(at), self._facts.named.get(at)
        # Code of a module may have given what its names did not.
        told = bool(self._results) and not reached.named_offsets.isdisjoint(self._results)
        if told or named is None or not named.is_current(self._globals):
            self._note_names()
            follow, special = not (told or self._facts.of_class), self._facts.special
            named = Named(reached, self._loads, self._globals, follow, special)
            if not told:
                self._facts.named[at] = named
            for value, uses in named.objects:
                self._attributes(value, uses)
        for variable in named.variables:
            self._note_variable(variable)
        for base, known in named.attributes:
            for value in self._values(base):
                self._note_known(value, known)
        for place, use in reached.items:
            self._note_item(place, use)
        for symbol in self._loads.opaque:
            self._note_opaque(self._values(symbol))
        for call in reached.shaped:
            self._note_call(call)
        for callee, calls in named.callees.items():
            self._note_callee(self._values(callee), calls)
        if self._facts.special is not None:
            self._note_special(self._facts.special)

    def _note_variable(self, variable: FixedVariable) -> None:
        """Note the loads from a variable that is never assigned, and the calls of its methods."""
        name, values = variable.name, self._locals
        if name in self._arguments or (self._results and variable.methods):
            for value in self._variable(name):
                self._attributes(value, variable.uses)
            for callee, calls in variable.methods:
                self._note_callee(self._values(callee), calls)
        elif name in values:
            self._note_known(values[name], variable)
            for function, calls in variable.readers(values[name]):
                for call in calls:
                    self._note_call_of(function, call)

    def _note_known(self, value: object, uses: KnownUses) -> None:
        if not uses.note_alike(value, self._reads):
            self._attributes(value, uses.uses)
            uses.learn(value)

    def _note_callee(self, functions: Iterable[object], calls: list[Symbol]) -> None:
        for function in functions:
            if not reads_nothing(function, calls):
                for call in calls:
                    self._note_call_of(function, call)

    def _note_special(self, special: FixedVariable) -> None:
        """Note the lookup of a special method, which no instruction loads."""
        name = self._code.co_name
        for value in self._variable(special.name):
            for kind in type(value).__mro__:
                if getattr(kind.__dict__.get(name), "__code__", None) is self._code:
                    self._note_known(value, special)
                    break

    def _note_names(self) -> None:
        reads, loads = self._reads, self._loads
        count = len(reads.noted)
        reads.noted.add((self._code, id(self._globals)))
        if len(reads.noted) > count:
            raise_uses(reads.of_globals(self._globals), loads.globals)
            inside = {(self._code, name): use for name, use in loads.variables.items()}
            raise_uses(reads.variables, inside)

    def _attributes(self, value: object, uses: Mapping[str, Use]) -> None:
        """Note attributes of a value: attribute -> use, of the code."""
        kind, facts = type(value), facts_of_type(value)
        if facts.tensor:
            uses = own_uses(value, uses)
        if not (uses and has_attributes(value)):
            return
        self.reads_tensor_attributes |= facts.tensor
        inside = uses if kind in _TENSOR_TYPES else attributes_of(value) or _NO_NAMES
        note_attributes(self._reads, value, uses, inside)
        for name in facts.getters.keys() & uses.keys() if facts.getters else ():
            self._note_getter(facts.getters[name], [value])

    def _note_item(self, place: Symbol, use: Use) -> None:
        (key,) = place.parts
        holders = [v for v in self._values(place.base) if issubclass(type(v), _CONTAINERS)]
        if not holders:
            return
        told = self._loads.tells(key)
        if place.key == MEMBER:  # a list is searched
            self._note_keys((v for v in holders if issubclass(type(v), (list, deque))), (), False)
            holders = [v for v in holders if not issubclass(type(v), (list, deque))]
        self._note_keys(holders, self._values(key), told, use)

    def _note_keys(
        self, holders: Iterable[Any], keys: Iterable[object], told: bool, use: Use = Use.READ
    ) -> None:
        """Note items of containers; every item, unless the keys are all `told`."""
        plain = [k for k in keys if is_key(k)]
        told, whole = told and bool(plain), self._reads.whole
        for value in holders:
            if id(value) in whole and use is Use.READ:
                continue
            if value is sys.modules or value is self._globals:
                self._note_entries(value, plain or value, use)
            elif issubclass(type(value), _CONTAINERS):
                if not told:
                    whole.add(id(value))
                    if use is Use.READ:
                        continue
                listed = issubclass(type(value), (list, deque))
                places = list(plain)
                if not told:
                    places += range(len(value)) if listed else filter(is_key, list(value))
                if listed:  # `history[-1]`
                    places = [k + len(value) if type(k) is int and k < 0 else k for k in places]
                raise_uses(self._reads.items, dict.fromkeys([(id(value), k) for k in places], use))

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
                self._note_untold(names, self._given(call)[:1])
        elif isinstance(function, operator.attrgetter):
            self._note_getter(function, [*given, *self._arguments_of(call)])
            self._note_untold(names_of(function), self._given(call))
        elif reads_attributes(function):
            values = [*given, *self._arguments_of(call)]
            for _ in range(2 if is_format(function) else 0):  # `"{0.layer.scale}".format(model)`
                values += [v for o in values for v in attribute_values(o) if has_attributes(v)]
            self._note_opaque(values)
        elif hands_on(function):
            arguments = [*given, *self._arguments_of(call)]
            functions = [v for v in arguments if not is_inert(v)]
            if any(map(reads_attributes, functions)):  # `map(attrgetter("scale"), layers)`
                self._note_opaque(part for value in arguments for part in elements(value))
            for value in functions:
                if isinstance(value, operator.attrgetter):
                    self._note_untold(names_of(value), call.parts)
                method, held = taken_apart(value)
                if is_of_dict(method):  # `map(table.get, keys)`
                    self._note_of_dict(method, held or arguments, [], False)
                elif method is setattr or method is delattr:
                    self._note_setattr(held or arguments, [], False)

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
        words = [name for name in list(names) if type(name) is str]
        raise_uses(self._reads.of_globals(namespace), dict.fromkeys(words, use))

    def _note_setattr(self, objects: Iterable[object], names: list[str], told: bool) -> None:
        """Note a store to an attribute by name; all attributes count as read if it is not known."""
        for value in filter(has_attributes, objects):
            self.reads_tensor_attributes |= facts_of_type(value).tensor
            owner = self._reads.owner(value)
            owner.opaque |= not (told and names)
            raise_uses(owner.names, own_uses(value, dict.fromkeys(names, Use.NONE)))

    def _note_getattr(self, objects: Iterable[object], names: list[str], told: bool) -> None:
        for value in filter(has_attributes, objects):
            uses = own_uses(value, dict.fromkeys(names, Use.READ))
            if uses or not (told and names) or "__dict__" in names:
                self.reads_tensor_attributes |= facts_of_type(value).tensor
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
                reached = [v for value in reached for v in peek(value, name)]

    def _note_opaque(self, values: Iterable[object]) -> None:
        for value in filter(has_attributes, values):
            # Functions of `operator` and others mostly compute with a bare tensor.
            if has_contents(value) or not facts_of_type(value).tensor:
                self.reads_tensor_attributes |= facts_of_type(value).tensor
                self._reads.owner(value).opaque = True


def note_attributes(
    reads: Reads, value: object, uses: Mapping[str, Use], inside: Mapping[str, object]
) -> None:
    """Note attributes of a value: attribute -> use. Its class has those that are not `inside`."""
    raise_uses(reads.owner(value).names, uses)
    if not uses.keys() <= inside.keys():
        others = {name: use for name, use in uses.items() if name not in inside}
        raise_uses(reads.owner(type(value)).names, others)


_NO_NAMES: Mapping[str, object] = {}
_TENSOR_TYPES = (Tensor, nn.Parameter)
_OPTIMIZERS = f"{TORCH}optim"
_CONTAINERS = (dict, list, deque, types.MappingProxyType)
