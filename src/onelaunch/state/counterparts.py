"""Counterparts: the objects of a new request in place of an earlier one's, part by part."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor

from onelaunch.call.containers import is_ordinary
from onelaunch.call.spec import TensorSpec
from onelaunch.call.tree import is_plain
from onelaunch.call.wrappers import is_compound
from onelaunch.identity import id
from onelaunch.state.parts import SlotPart
from onelaunch.state.slots import Slot


class Unlike(Exception):
    """The error for two objects that are not built alike."""


def ids_in(value: Any) -> Iterator[int]:
    """Return the ids of the objects that the counterpart of a value or slot depends on."""
    yield id(value)
    if isinstance(value, tuple):
        for part in cast(tuple[Any, ...], value):
            yield from ids_in(part)
    elif isinstance(value, types.MethodType):
        yield from ids_in(value.__self__)
    elif isinstance(value, SlotPart):
        yield from ids_in(value.whole)


class Counterparts:
    """A map from each part of some objects to the same part of other objects.

    Plain values may differ: a guard compares them.

    Args:
        pairs: (object, its counterpart).

    Raises:
        Unlike: a pair differs in a class, a length, a name, or the layout of a tensor.
    """

    def __init__(self, pairs: Iterable[tuple[object, object]]) -> None:
        self._pairs: dict[int, tuple[object, object]] = {}
        self._taken: dict[int, object] = {}
        for old, new in pairs:
            self._pair(old, new)
        self.replaced = frozenset(i for i, (old, new) in self._pairs.items() if old is not new)
        """ids of the parts whose counterpart is another object."""

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        pairs = self._pairs.values()
        return [
            (old, new)
            for old, new in pairs
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old is not new
        ]

    def of(self, value: Any) -> Any:
        """Return the counterpart of a value, or the value itself if it is no part."""
        pair = self._pairs.get(id(value))
        if pair is not None:
            return pair[1]
        kind: type = type(value)
        if kind is tuple:
            parts = tuple(map(self.of, cast(tuple[Any, ...], value)))
            return value if all(map(operator.is_, parts, value)) else parts
        if kind is types.MethodType:
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        return value.at(self.slot) if isinstance(value, SlotPart) else value

    def slot(self, slot: Slot) -> Slot:
        via = None if slot.via is None else self.slot(slot.via)
        return Slot(
            slot.kind, self.of(slot.holder), self.of(slot.key), slot.name, self.of(slot.owner), via
        )

    def _pair(self, old: Any, new: Any) -> None:
        if is_plain(old) and is_plain(new):
            return
        pair = self._pairs.get(id(old))
        if pair is not None and pair[1] is new:
            return
        if (
            pair is not None
            or self._taken.get(id(new), old) is not old
            or type(old) is not type(new)
        ):
            raise Unlike
        self._pairs[id(old)] = old, new
        self._taken[id(new)] = old
        if old is new:
            return
        if isinstance(old, Tensor):
            if is_compound(old) or TensorSpec.of(old) != TensorSpec.of(new):
                raise Unlike
        elif type(old) in (list, tuple):
            self._pair_all(old, new)
        elif type(old) is dict:
            if list(old) != list(new):
                raise Unlike
            self._pair_all(list(old.values()), list(new.values()))
        elif is_ordinary(type(old)):
            self._pair(vars(old), vars(new))
        else:
            raise Unlike

    def _pair_all(self, old: Any, new: Any) -> None:
        if len(old) != len(new):
            raise Unlike
        for a, b in zip(old, new, strict=True):
            self._pair(a, b)
