"""What the Python code of a callable's runs was seen to read."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.graph import Node

from onelaunch.frames.stack import Use


@dataclass(slots=True)
class Owner:
    """An object of which attributes were loaded or stored."""

    ref: Callable[[], object]
    names: dict[str, Use] = field(default_factory=dict[str, Use])
    """Attribute -> what becomes of what it held."""
    opaque: bool = False
    """Whether any attribute may have been read."""


@dataclass(slots=True)
class Reads:
    """What the Python code of a callable's runs was seen to read. Keeps nothing alive, but for
    objects that have slots alone."""

    owners: dict[int, Owner] = field(default_factory=dict[int, Owner])
    globals: dict[int, tuple[dict[str, Any], dict[str, Use]]] = field(
        default_factory=dict[int, tuple[dict[str, Any], dict[str, Use]]]
    )
    """id -> the globals of a module, and those loaded, as in `Owner.names`."""
    variables: dict[tuple[types.CodeType, str], Use] = field(
        default_factory=dict[tuple[types.CodeType, str], Use]
    )
    """Variables of functions around a function, as in `Owner.names`."""
    items: dict[tuple[int, object], Use] = field(default_factory=dict[tuple[int, object], Use])
    """(id of a container, key), as in `Owner.names`."""
    codes: set[types.CodeType] = field(default_factory=set[types.CodeType])
    """All that ran."""
    backward: bool = False
    """Whether a backward ran inside."""
    takes_functions: str | None = None
    """An operator that was called which takes functions; see `watching.HigherOrder`."""
    noted: set[tuple[types.CodeType, int]] = field(default_factory=set[tuple[types.CodeType, int]])
    """Code, and id of globals, whose loads of globals and of variables around it are known."""
    kinds: weakref.WeakKeyDictionary[type | types.CodeType, Owner] = field(
        default_factory=weakref.WeakKeyDictionary[type | types.CodeType, Owner]
    )
    """class, or code -> what was read of its instances, or functions, which tells of one that came
    after the run."""

    def copy(self) -> Reads:
        """What is known, without what is gone; a run adds to it."""
        return Reads(
            {
                key: Owner(owner.ref, dict(owner.names), owner.opaque)
                for key, owner in self.owners.items()
                if owner.ref() is not None
            },
            {key: (namespace, dict(names)) for key, (namespace, names) in self.globals.items()},
            dict(self.variables),
            dict(self.items),
            set(self.codes),
            self.backward,
            self.takes_functions,
            set(self.noted),
            self.kinds.copy(),
        )

    def of_globals(self, namespace: dict[str, Any]) -> dict[str, Use]:
        """The globals of a module that were loaded."""
        return self.globals.setdefault(id(namespace), (namespace, {}))[1]

    def owner(self, value: object) -> Owner:
        """The entry of an object, made if there is none."""
        found = self.owners.get(id(value))
        if found is None or found.ref() is not value:
            found = self.owners[id(value)] = Owner(_reference(value))
        return found

    def of(self, value: object) -> Owner | None:
        """What was read of an object, or None."""
        found = self.owners.get(id(value))
        return found if found is not None and found.ref() is value else None

    def expected(self, value: object) -> Owner | None:
        """What a run will read of an object: as of others of its class, if no run has met it."""
        found = self.of(value)
        return found if found or isinstance(value, _APART) else self.kinds.get(_kind(value))

    def settle(self) -> None:
        """Sum up, after a run, what was read of the instances of each class; and let go of what
        is held here alone, an object or a graph that the run made."""
        for owner in self.owners.values():
            value = owner.ref()
            if value is None or isinstance(value, _APART):
                continue
            kind = self.kinds.setdefault(_kind(value), Owner(_gone))
            raise_uses(kind.names, owner.names)
            kind.opaque |= owner.opaque
        value, count = None, -1
        ours = [k for k, owner in self.owners.items() if isinstance(owner.ref, functools.partial)]
        while len(ours) != count:  # one that held another may have gone
            count = len(ours)
            for key in ours:
                value = self.owners[key].ref()
                # A node belongs to the graph of its run, which may last until a backward has run.
                if isinstance(value, Node) or sys.getrefcount(value) <= _OURS_ALONE:
                    del self.owners[key]
            ours = [key for key in ours if key in self.owners]

    def exceeds(self, other: Reads, containers: set[int]) -> bool:
        """Whether more was read than is known in `other`, of what is still there; of items those
        that are in these containers."""
        if self.codes - other.codes or _exceed(self.variables, other.variables):
            return True
        if _exceed({k: use for k, use in self.items.items() if k[0] in containers}, other.items):
            return True
        for key, (_, names) in self.globals.items():
            if _exceed(names, other.globals[key][1] if key in other.globals else {}):
                return True
        for owner in self.owners.values():
            value = owner.ref()
            known = None if value is None else other.of(value)
            if value is not None and (
                known is None or owner.opaque > known.opaque or _exceed(owner.names, known.names)
            ):
                return True
        return False

    def living(self) -> list[object]:
        """The objects of which something was read, and which are still there."""
        found = [owner.ref() for owner in self.owners.values()]
        return [value for value in found if value is not None]


def _exceed(uses: Mapping[Any, Use], known: Mapping[Any, Use]) -> bool:
    return any(use > known.get(place, -1) for place, use in uses.items())


def raise_uses(known: dict[Any, Use], uses: Mapping[Any, Use]) -> None:
    """Note uses of places beside those that are known."""
    for place, use in uses.items():
        if use > known.get(place, -1):
            known[place] = use


def _reference(value: object) -> Callable[[], object]:
    """Refers to an object weakly; where that cannot be, for good, but for what a run made; see
    `Reads.settle`."""
    try:
        return weakref.ref(value)
    except TypeError:
        return functools.partial(_itself, value)


_APART = (type, types.ModuleType)
"""Of these what is read of one says nothing of another."""


def _kind(value: object) -> type | types.CodeType:
    """What one object has in common with others of which the same is read."""
    return value.__code__ if isinstance(value, types.FunctionType) else type(value)


_OURS_ALONE = 3
"""References to an object that a partial, a variable and `sys.getrefcount` itself hold."""


def _gone() -> None:
    return None


def _itself(value: object) -> object:
    return value
