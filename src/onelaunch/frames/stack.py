"""Symbols for the values on the operand stack of bytecode, and their uses.

`self.opt.step` is the attribute `step` of the attribute `opt` of the variable `self`, and of
nothing else that has a `step`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from onelaunch.identity import id

Kind = Literal[
    "variable",  # key: its name; its values are both assigned and observed
    "global",  # key: its name
    "constant",  # key: the value
    "attribute",  # key of base
    "namespace",  # the `__dict__` of base
    "item",  # base[other]; key: MEMBER for `other in base`
    "element",  # a value from an iteration over base
    "module",  # key: an imported module
    "call",  # base(*parts)
    "parts",  # a tuple or list of parts
    "either",  # any of the parts
    "unknown",
]


class Symbol(NamedTuple):
    """A value on the stack of a function's code."""

    kind: Kind
    base: Symbol | None = None
    key: Any = None
    parts: tuple[Symbol, ...] = ()
    offset: int = -1
    """Offset of the instruction that gives the value, directly or by Python code that it calls."""


class Unique(Symbol):
    """A symbol whose equals, in the same function, are the same object: a fast key of dicts."""

    __slots__ = ()
    __hash__, __eq__, __ne__ = object.__hash__, object.__eq__, object.__ne__  # type: ignore


UNKNOWN = Symbol("unknown")
SETTERS = {"__setattr__": 2, "__delattr__": 1}
"""Method that stores to, or deletes, an attribute by name -> number of its arguments."""
_SHAPED = ("__getattribute__", *SETTERS)
MEMBER = "in"
"""Key of the item that `other in base` looks for."""
ITERATED = ".0"
"""Name of the argument of a comprehension or generator expression: an iterator."""


class Use(IntEnum):
    """A use of the value that a place held before the call. A greater use is a stronger use."""

    NONE = 0
    """Not used: the place is stored first, or only stored."""
    GROWS = 1
    """Only counted, ``n += 1``, or appended to: the value leads to its own successor alone."""
    MIXED = 2
    """Both, in different functions: one counts, and another sets to 0."""
    ITEMS = 3
    """Only its items are read and stored, by known keys: ``d["n"] += 1``."""
    READ = 4


class Load(NamedTuple):
    """A load of a place, or a store."""

    place: Symbol
    """An attribute, an item, a global or a free variable."""
    use: Use = Use.READ
    stores: bool = False


class Reached(NamedTuple):
    """The part of a function's loads and calls that a frame may have reached."""

    variables: list[tuple[str, dict[str, Use], list[tuple[Symbol, list[Symbol]]]]]
    """(variable that is never assigned, attribute -> use, called attributes, with the calls)."""
    attributes: list[tuple[Symbol, dict[str, Use]]]
    """(another object, attribute -> use)."""
    items: list[tuple[Symbol, Use]]
    """(item of a container, use)."""
    shaped: list[Symbol]
    """Imports, and calls whose shape tells that they read their arguments."""
    callees: dict[Symbol, list[Symbol]]
    """callee -> its calls."""
    named_attributes: list[tuple[Symbol, dict[str, Use]]]
    named_callees: dict[Symbol, list[Symbol]]
    """Calls of callees that global names lead to, by attributes alone."""
    named_offsets: set[int]
    """Offsets of the instructions that load these."""


@dataclass(slots=True, eq=False)
class Loads:
    """The loads and stores in one function's code of places outside its frame."""

    places: dict[Symbol, Use] = field(default_factory=dict)
    """place -> use, without the places of the next three mappings, for which a name is enough."""
    globals: dict[str, Use] = field(default_factory=dict)
    variables: dict[str, Use] = field(default_factory=dict)
    arguments: dict[str, dict[str, Use]] = field(default_factory=dict)
    """variable that is never assigned -> attribute -> use."""
    assigned: dict[str, list[Symbol]] = field(default_factory=dict)
    """variable -> the values that it is assigned."""
    calls: list[Symbol] = field(default_factory=list)
    """Calls, and imports."""
    opaque: list[Symbol] = field(default_factory=list)
    """Objects that may be read by any attribute: `vars(o)`."""
    free: frozenset[str] = frozenset()
    """Names of free variables, whose cells are places."""
    cleared: frozenset[str] = frozenset()
    """Variables that may have lost their value by the end."""
    inside: frozenset[str] = frozenset()
    """Variables that functions inside may assign."""
    grown: dict[Symbol, list[Symbol]] = field(default_factory=dict)
    """container, without offsets -> values that its methods put into it."""
    once: frozenset[str] = frozenset()
    """Variables that are assigned once at most: at the end they have the assigned value."""
    offsets: list[int] = field(default_factory=list)
    loose: set[str] = field(default_factory=set)
    """Attributes of objects that cannot all be found afterwards, as of `queue.pop()`."""
    begins: dict[Symbol, int] = field(default_factory=dict)
    """place -> offset of the first instruction that loads or stores it."""
    backward: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) of each jump to an earlier instruction, in their order."""
    sure: list[tuple[int, Symbol]] = field(default_factory=list)
    """(offset, place) of the stores that no jump skips, and that no return comes before."""
    _reached: dict[int, Reached] = field(default_factory=dict)
    _settled: dict[Symbol, bool] = field(default_factory=dict)
    _told: dict[Symbol, bool] = field(default_factory=dict)
    _places: dict[Symbol, Symbol] = field(default_factory=dict)

    def reached(self, offset: int) -> Reached:
        """Return the part that a frame may have reached that ended at an offset."""
        reached = self._reached.get(offset)
        if reached is None:
            last = offset  # the last one that may have run
            for source, target in self.backward:
                if target <= last < source:
                    last = source
            reached = self._reached[offset] = self._until(last)
        return reached

    def _until(self, last: int) -> Reached:
        reached = Reached([], [], [], [], {}, [], {}, set())
        attributes: dict[Symbol, dict[str, Use]] = {}
        for place, use in self.places.items():
            if self.begins[place] > last:
                continue
            if place.kind == "attribute" and place.base is not None:
                attributes.setdefault(place.base, {})[place.key] = use
            elif place.kind == "item":
                reached.items.append((place, use))
        for base, uses in attributes.items():
            named = _is_of_module(base)
            (reached.named_attributes if named else reached.attributes).append((base, uses))
        for call in self.calls:
            if call.offset > last:
                continue
            base = call.base
            if base is not None:
                callees = reached.named_callees if _is_of_module(base) else reached.callees
                callees.setdefault(base, []).append(call)
            if base is None or base.kind == "call" or base.key in _SHAPED:
                reached.shaped.append(call)
        for symbol in (*(base for base, _ in reached.named_attributes), *reached.named_callees):
            reached.named_offsets.update(_offsets(symbol))
        for name, uses in self.arguments.items():
            called = [s for s in reached.callees if s.kind == "attribute" and _is(s.base, name)]
            methods = [(symbol, reached.callees.pop(symbol)) for symbol in called]
            reached.variables.append((name, uses, methods))
        return reached

    def is_fixed(self, symbol: Symbol) -> bool:
        """Return whether a symbol is a variable that this code never assigns."""
        return symbol.kind == "variable" and symbol.key not in self.assigned

    def is_settled(self, symbol: Symbol) -> bool:
        """Return whether no variable that is assigned leads to a symbol's values."""
        settled = self._settled.get(symbol)
        if settled is None and self.grown and symbol.kind in ("call", "item", "element"):
            settled = self._settled[symbol] = False
        if settled is None:
            inside = symbol.parts if symbol.base is None else (symbol.base, *symbol.parts)
            assigned = symbol.kind == "variable" and symbol.key in self.assigned
            settled = self._settled[symbol] = not assigned and all(map(self.is_settled, inside))
        return settled

    def tells(self, symbol: Symbol) -> bool:
        """Return whether all values of a symbol can be found when the function has run."""
        told = self._told.get(symbol)
        if told is None:
            told = self._told[symbol] = self._tells(symbol, frozenset())
        return told

    def _tells(self, symbol: Symbol, within: frozenset[str]) -> bool:
        """Return `tells`. `within` are variables whose values are being looked for."""
        kind, base = symbol.kind, symbol.base
        if kind in ("unknown", "call"):
            return False
        if kind == "variable":
            name = symbol.key
            if name == ITERATED or name in self.inside:
                return False
            if name in self.once or name in within:
                return True
            return all(self._tells(s, within | {name}) for s in self.assigned.get(name, ()))
        if kind in ("item", "element") and base is not None and self._changes(base):
            return False
        return (base is None or self._tells(base, within)) and (
            kind == "module" or all(self._tells(part, within) for part in symbol.parts)
        )

    def _changes(self, container: Symbol) -> bool:
        """Return whether a variable holds a container that the code made, and may change."""
        assigned = self.assigned.get(container.key, ()) if container.kind == "variable" else ()
        return any(
            s.kind in ("unknown", "call") or (s.kind == "parts" and not s.parts) for s in assigned
        )

    def place(self, symbol: Symbol) -> Symbol:
        """Return a symbol without offsets, as a key of `grown`."""
        bare = self._places.get(symbol)
        if bare is None:
            bare = self._places[symbol] = without_offset(symbol)
        return bare

    def instruction(self, offset: int) -> int:
        """Return the start of the instruction around an offset, caches included."""
        return self.offsets[bisect_right(self.offsets, offset) - 1]


def summed_up(summary: Loads, loads: Iterable[Load]) -> Loads:
    """Fill in each place once, with its strongest use. Equal symbols become the same object, so
    that its values are looked up once."""
    uniques: dict[Symbol, Unique] = {}
    same: dict[int, Unique] = {}
    """id of a symbol -> the equal symbol."""

    def unique(symbol: Symbol) -> Unique:
        one = same.get(id(symbol))
        if one is None:
            one = same[id(symbol)] = of_unique(symbol)
        return one

    def of_unique(symbol: Symbol) -> Unique:
        base = None if symbol.base is None else unique(symbol.base)
        parts = tuple(map(unique, symbol.parts))
        bare = Symbol(symbol.kind, base, symbol.key, parts, symbol.offset)
        return uniques.get(bare) or uniques.setdefault(bare, Unique(*bare))

    for load in loads:
        place = of_unique(load.place._replace(offset=-1))  # whose id may be another's later
        base = place.base
        uses: dict[Any, Use] = summary.places
        if place.kind == "global":
            uses = summary.globals
        elif place.kind == "variable":
            uses = summary.variables
        elif place.kind == "attribute" and base is not None and summary.is_fixed(base):
            uses = summary.arguments.setdefault(base.key, {})
        key = place if uses is summary.places else place.key
        if uses is summary.places:
            begins = load.place.offset
            summary.begins[place] = min(begins, summary.begins.get(place, begins))
        use = Use.NONE if load.stores else load.use
        uses[key] = max(use, uses.get(key, Use.NONE))
    summary.assigned = {
        name: [unique(s) for s in symbols] for name, symbols in summary.assigned.items()
    }
    summary.grown = {place: [unique(s) for s in put] for place, put in summary.grown.items()}
    for place in summary.places:
        if place.kind == "attribute" and place.base is not None and not summary.tells(place.base):
            summary.loose.add(place.key)
    summary.calls = list({unique(s): None for s in summary.calls})
    summary.opaque = list({unique(s): None for s in summary.opaque})
    return summary


def _is_of_module(symbol: Symbol) -> bool:
    """Return whether a global name leads to an object, by attributes alone."""
    of = symbol.base if symbol.kind == "attribute" else None
    return symbol.kind == "global" if of is None else _is_of_module(of)


def _offsets(symbol: Symbol | None) -> Iterator[int]:
    while symbol is not None:
        yield symbol.offset
        symbol = symbol.base


def _is(symbol: Symbol | None, name: str) -> bool:
    return symbol is not None and symbol.kind == "variable" and symbol.key == name


def without_offset(place: Symbol) -> Symbol:
    base = place.base and without_offset(place.base)
    return Symbol(place.kind, base, place.key, tuple(map(without_offset, place.parts)))
