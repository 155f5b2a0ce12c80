"""The attributes of modules, as a walk finds them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from onelaunch.frames.peek import attributes_of
from onelaunch.frames.reads import ObjectReads
from onelaunch.frames.stack import Use
from onelaunch.state.slots import Slot, new_slot


class Attributes(NamedTuple):
    """Attributes of a module that need no slots of their own.

    Attributes:
        holder: the module's `__dict__`.
        values: attribute -> value.
    """

    name: str
    module: nn.Module
    holder: dict[str, object]
    values: dict[str, object]
    via: Slot | None

    def slot(self, key: str) -> Slot:
        return new_slot(("item", self.holder, key, f"{self.name}{key}", self.module, self.via))

    def slots(self) -> Iterator[tuple[Slot, object]]:
        return ((self.slot(key), value) for key, value in self.values.items())


class SplitAttributes(NamedTuple):
    """The attributes of a class's modules, by their uses.

    Attributes:
        keys: all attributes of the module that it was made for, in order.
        reads: the reads of that module.
        others: attribute -> use, neither a mere read nor none.
    """

    keys: list[str]
    reads: ObjectReads | None
    read: list[str]
    untouched: list[str]
    others: Mapping[str, Use | None]

    def fits(self, keys: list[str], reads: ObjectReads | None) -> bool:
        """Return whether it holds for another module of the class."""
        mine = self.reads
        return self.keys == keys and (
            mine is reads or (mine is not None and reads is not None and mine.is_like(reads))
        )


def is_bare(*containers: object) -> bool:
    """Return whether empty containers have no attributes."""
    return not (gc.get_referents(*containers) and any(map(attributes_of, containers)))
