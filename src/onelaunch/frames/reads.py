"""The reads of Python code in a callable's runs."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor
from torch.autograd.graph import Node

from onelaunch.frames.origins import is_installed
from onelaunch.frames.stack import Use
from onelaunch.identity import id


class StandIn:
    """An object in the place of a plain value. Only `type` tells a run the difference."""

    __slots__ = ()

    def asked(self, function: object) -> None:
        """Learn that the run asked `type`, or `isinstance`."""
        raise NotImplementedError

    def fixed(self) -> Any:
        """Return the value, which each call must have from then on."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if not any(name in vars(kind) for kind in self.__class__.__mro__):
            raise AttributeError(name)  # torch looks for `__torch_function__`
        return getattr(self.fixed(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # Without this method NumPy makes an array of objects.
        import numpy as np  # it asks, so it is there

        return np.array(self.fixed(), dtype)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__class__, (self.fixed(),)

    def __pos__(self) -> Self:
        return self


@dataclass(slots=True, eq=False)
class ObjectReads:
    """The reads of one object's attributes."""

    ref: Callable[[], object]
    names: dict[str, Use] = field(default_factory=dict)
    """attribute -> the use of its value from before the call."""
    opaque: bool = False
    """True if any attribute may have been read."""
    asked: bool = False
    """True if attributes were read by unknown names. An untouched attribute may be among them."""

    def is_like(self, other: ObjectReads) -> bool:
        """Return whether the same attributes of another object were read."""
        mine, others = (self.opaque, self.asked), (other.opaque, other.asked)
        return mine == others and self.names == other.names


@dataclass(slots=True, eq=False)
class Reads:
    """The reads of the Python code of a callable's runs. Keeps nothing alive, except objects that
    have only slots."""

    owners: dict[int, ObjectReads] = field(default_factory=dict)
    """id of an object -> the reads of its attributes."""
    globals: dict[int, tuple[dict[str, Any], dict[str, Use]]] = field(default_factory=dict)
    """id of a module's globals -> the globals, and name -> use."""
    variables: dict[tuple[types.CodeType, str], Use] = field(default_factory=dict)
    """(code of a function, free variable) -> use."""
    items: dict[tuple[int, object], Use] = field(default_factory=dict)
    """(id of a container, key) -> use."""
    whole: set[int] = field(default_factory=set)
    """ids of containers with items that were read by keys that are not known."""
    codes: set[types.CodeType] = field(default_factory=set)
    """The code that ran."""
    ended: set[tuple[types.CodeType, int]] = field(default_factory=set)
    """(code, offset of the instruction where a frame of it ended)."""
    backward: bool = False
    """True if a backward ran inside."""
    takes_functions: str | None = None
    """The name of a called operator that takes functions; see `watch.operations.HigherOrder`."""
    noted: set[tuple[types.CodeType, int]] = field(default_factory=set)
    """(code, id of its globals) whose loads of globals and free variables are known."""
    loose: set[str] = field(default_factory=set)
    """Attributes that were read by name, as by `getattr`, of objects that are not all known."""
    kinds: weakref.WeakKeyDictionary[type | types.CodeType, ObjectReads] = field(
        default_factory=weakref.WeakKeyDictionary[type | types.CodeType, ObjectReads]
    )
    """class -> the reads of its instances; code -> the reads of its functions. They are expected of
    objects made after the run too."""

    def copy(self) -> Reads:
        """Return a copy for a run to add to, without the objects that were freed."""
        return Reads(
            {
                key: ObjectReads(owner.ref, dict(owner.names), owner.opaque, owner.asked)
                for key, owner in self.owners.items()
                if owner.ref() is not None
            },
            {key: (namespace, dict(names)) for key, (namespace, names) in self.globals.items()},
            dict(self.variables),
            dict(self.items),
            set(self.whole),
            set(self.codes),
            set(self.ended),
            self.backward,
            self.takes_functions,
            set(self.noted),
            set(self.loose),
            self.kinds.copy(),
        )

    def of_globals(self, namespace: dict[str, Any]) -> dict[str, Use]:
        """Return name -> use for the globals of a module."""
        return self.globals.setdefault(id(namespace), (namespace, {}))[1]

    def owner(self, value: object) -> ObjectReads:
        """Return the entry of an object, which is made if there is none."""
        entry = self.owners.get(id(value))
        if entry is None or entry.ref() is not value:
            entry = self.owners[id(value)] = ObjectReads(_reference(value))
        return entry

    def of(self, value: object) -> ObjectReads | None:
        entry = self.owners.get(id(value))
        return entry if entry is not None and entry.ref() is value else None

    def names(self, names: Set[str]) -> bool:
        """Return whether the user's code that ran names any of these."""
        ours = (code for code in self.codes if not is_installed(code.co_filename))
        return any(not names.isdisjoint(code.co_names) for code in ours)

    def expected(self, value: object) -> ObjectReads | None:
        """Return the expected reads of an object: its own, or its class's if it was not read."""
        entry = self.of(value)
        return entry if entry or isinstance(value, _NOT_ALIKE) else self.kinds.get(_kind(value))

    def forget(self, values: Iterable[object]) -> None:
        """Forget the reads of objects, but not the expected reads of their classes."""
        for value in values:
            if self.of(value) is not None:
                del self.owners[id(value)]

    def sum_up(self) -> None:
        """Sum up the reads of each class's instances, after a run. Drop the objects that only this
        record keeps alive, such as a graph that the run made."""
        for key in [key for key, owner in self.owners.items() if _is_gone(owner.ref())]:
            del self.owners[key]
        for owner in self.owners.values():
            value = owner.ref()
            if value is None or isinstance(value, _NOT_ALIKE):
                continue
            kind = self.kinds.setdefault(_kind(value), ObjectReads(_freed))
            raise_uses(kind.names, owner.names)
            kind.opaque |= owner.opaque
            kind.asked |= owner.asked
        value, count = None, -1  # it refers to nothing
        ours = [k for k, owner in self.owners.items() if isinstance(owner.ref, functools.partial)]
        while len(ours) != count:  # an object that held another may have been dropped
            count = len(ours)
            for key in ours:
                ref = self.owners[key].ref
                # A node belongs to the graph of its run, which may last until a backward has run.
                if isinstance(ref(), Node) or _references(ref) <= _OURS_ALONE:
                    del self.owners[key]
            ours = [key for key in ours if key in self.owners]

    def exceeds(self, other: Reads, held: set[int]) -> bool:
        """Return whether there are reads that `other` does not have.

        Args:
            held: ids of the objects in the state. Items of other containers do not count, nor
                attributes of other tensors, which are the call's.
        """
        if self.codes - other.codes or self.loose - other.loose:
            return True
        if self.backward > other.backward:
            return True
        if self.takes_functions is not None and other.takes_functions is None:
            return True
        if _exceed(self.variables, other.variables):
            return True
        if _exceed({k: use for k, use in self.items.items() if k[0] in held}, other.items):
            return True
        if not held.isdisjoint(self.whole - other.whole):
            return True
        for key, (_, names) in self.globals.items():
            if _exceed(names, other.globals[key][1] if key in other.globals else {}):
                return True
        for owner in self.owners.values():
            value = owner.ref()
            if isinstance(value, Tensor) and id(value) not in held:
                continue
            earlier = None if value is None else other.of(value)
            if value is not None and (
                earlier is None
                or (owner.opaque, owner.asked) > (earlier.opaque, earlier.asked)
                or _exceed(owner.names, earlier.names)
            ):
                return True
        return False

    def follow(self, other: Reads, held: set[int]) -> None:
        """Count a container in the state as read whole if `other`, the reads at other sizes, has
        other keys of it: further sizes have further keys."""
        keyed = {place for place, _ in other.items} & held
        self.whole |= {
            place[0]
            for place, use in self.items.items()
            if use is Use.READ and place[0] in keyed and place not in other.items
        }

    def alive(self) -> list[object]:
        """Return the objects that were read and are alive."""
        values = [owner.ref() for owner in self.owners.values()]
        return [value for value in values if value is not None]


def is_of_globals(entry: Any, namespace: dict[str, Any]) -> bool:
    """Return whether an object is an entry of `Reads.globals` for these globals."""
    return (
        type(entry) is tuple
        and len(entry) == 2
        and entry[0] is namespace
        and type(entry[1]) is dict
        and all(type(use) is Use for use in entry[1].values())
    )


def _exceed(uses: Mapping[Any, Use], before: Mapping[Any, Use]) -> bool:
    return any(use > before.get(place, -1) for place, use in uses.items())


def raise_uses(raised: dict[Any, Use], uses: Mapping[Any, Use]) -> None:
    """Add uses to known uses, keeping the greater use of each place."""
    if not raised:
        raised.update(uses)
        return
    for place, use in uses.items():
        was = raised.get(place)
        if was is not use:
            mixed = was is not None and was + use == Use.GROWS
            if mixed or was is None or use > was:
                raised[place] = Use.MIXED if mixed else use


def _reference(value: object) -> Callable[[], object]:
    """Return a weak reference to an object, or a strong reference, which `Reads.sum_up` may drop,
    where a weak one is not possible."""
    try:
        return weakref.ref(value)
    except TypeError:
        return functools.partial(_itself, value)


_NOT_ALIKE = (type, types.ModuleType)
"""Types whose instances are unrelated: reads of one instance do not predict reads of another."""


def _is_gone(value: object) -> bool:
    """Return whether an object is a weak proxy of a freed object: it can be asked nothing."""
    if type(value) not in weakref.ProxyTypes:
        return False
    try:
        isinstance(value, type)
    except ReferenceError:
        return True
    return False


def _kind(value: object) -> type | types.CodeType:
    """Return the kind of an object. Code reads the same attributes of all objects of a kind."""
    return value.__code__ if isinstance(value, types.FunctionType) else type(value)


def _freed() -> None:
    return None


def _itself(value: object) -> object:
    return value


def _references(ref: Callable[[], object]) -> int:
    value = ref()
    return sys.getrefcount(value)


_OURS_ALONE = _references(functools.partial(_itself, object()))
"""References to an object that a partial alone holds. Python 3.14 counts fewer of its own."""
