"""Symbols for the values on the stack of a function's code, and what the code does with them.

`self.opt.step` is the attribute `step` of the attribute `opt` of the variable `self`, and of
nothing else that has a `step`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple, cast

Kind = Literal[
    "variable",  # key: its name; of the values that are assigned, and of those observed
    "global",  # key: its name
    "constant",  # key: the value
    "attribute",  # key of base
    "namespace",  # the `__dict__` of base
    "item",  # base[other]
    "element",  # something that iterating over base gives
    "module",  # key: an imported module
    "call",  # base(*parts)
    "parts",  # a tuple or list of parts
    "either",  # one of the parts
    "unknown",
]


class Symbol(NamedTuple):
    """A value that code has on its stack."""

    kind: Kind
    base: Symbol | None = None
    key: Any = None
    parts: tuple[Symbol, ...] = ()
    offset: int = -1
    """Of the instruction that gives it, in which Python code may run that returns it."""


UNKNOWN = Symbol("unknown")


class Use(IntEnum):
    """What becomes of what a place held before the call; the greater says more."""

    NONE = 0
    """Nothing: it is stored there first, or stored alone."""
    GROWS = 1
    """It is a term of the number that is stored there next, ``n += 1``, or a list that grows."""
    ITEMS = 2
    """Items of it are read and stored, and each is known: ``d["n"] += 1``."""
    READ = 3


class Load(NamedTuple):
    """One read of a place, or a store."""

    place: Symbol
    """An attribute, an item, a global, or a free variable."""
    use: Use = Use.READ
    stores: bool = False


@dataclass(slots=True)
class Loads:
    """What one function's code does with places outside of its own frame."""

    places: dict[Symbol, Use] = field(default_factory=dict[Symbol, Use])
    """All but the next three kinds, which their names alone tell."""
    globals: dict[str, Use] = field(default_factory=dict[str, Use])
    variables: dict[str, Use] = field(default_factory=dict[str, Use])
    """Of functions around it."""
    arguments: dict[str, dict[str, Use]] = field(default_factory=dict[str, dict[str, Use]])
    """Variable to which nothing is assigned -> attributes of it."""
    assigned: dict[str, list[Symbol]] = field(default_factory=dict[str, list[Symbol]])
    calls: list[Symbol] = field(default_factory=list[Symbol])
    opaque: list[Symbol] = field(default_factory=list[Symbol])
    """Objects any of whose attributes may be read: `vars(o)`."""
    free: frozenset[str] = frozenset()
    """The variables of functions around it, whose cells are places."""
    gone: frozenset[str] = frozenset()
    """Variables that may be without a value at the end though they had one."""
    offsets: list[int] = field(default_factory=list[int])
    """Where each instruction begins."""
    begins: dict[Symbol, int] = field(default_factory=dict[Symbol, int])
    """place -> the first instruction that loads or stores it."""
    backward: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Each jump to an earlier instruction, from where and to where, in their order."""

    def reached(self, offset: int) -> int:
        """The last instruction that may have run in a frame that ends at one."""
        last = offset
        for source, target in self.backward:
            if target <= last < source:
                last = source
        return last

    def instruction(self, offset: int) -> int:
        """Where the instruction begins in which a frame is; its caches are part of it."""
        return self.offsets[bisect_right(self.offsets, offset) - 1]


def summed(found: Loads, loads: Iterable[Load]) -> Loads:
    """Each place once, with the most that becomes of it, and equal symbols as one object: what they
    stood for is looked up once then."""
    known: dict[Symbol, Symbol] = {}

    def one(symbol: Symbol) -> Symbol:
        base = None if symbol.base is None else one(symbol.base)
        parts = tuple(map(one, symbol.parts))
        return known.setdefault(symbol, symbol._replace(base=base, parts=parts))

    for load in loads:
        place = one(load.place._replace(offset=-1))
        base = place.base
        uses: dict[Any, Use] = found.places
        if place.kind == "global":
            uses = found.globals
        elif place.kind == "variable":
            uses = found.variables
        elif place.kind == "attribute" and _is_argument(base, found):
            uses = found.arguments.setdefault(cast(Symbol, base).key, {})
        key = place if uses is found.places else place.key
        if uses is found.places:
            begins = load.place.offset
            found.begins[place] = min(begins, found.begins.get(place, begins))
        use = Use.NONE if load.stores else load.use
        uses[key] = max(use, uses.get(key, Use.NONE))
    found.assigned = {name: [one(s) for s in symbols] for name, symbols in found.assigned.items()}
    found.calls = list({one(s): None for s in found.calls})
    found.opaque = list({one(s): None for s in found.opaque})
    return found


def _is_argument(base: Symbol | None, found: Loads) -> bool:
    return base is not None and base.kind == "variable" and base.key not in found.assigned


def bare(place: Symbol) -> Symbol:
    """A place without where in the code it is."""
    base = place.base and bare(place.base)
    return place._replace(base=base, parts=tuple(map(bare, place.parts)), offset=-1)
