"""State that the caller replaces between calls, such as the context of a step in a global.

Each call finds a content that is built alike: a tensor of the same layout, or an object with such
tensors and equal numbers. A recording takes the tensors as inputs, and is guarded by the build. An
empty dict is a memo: calls of a step fill it, and so do their replays.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.containers import composites_in, is_ordinary, parts_of
from onelaunch.call.spec import TensorSpec, has_strides
from onelaunch.call.tree import Constant, Flat
from onelaunch.frames.peek import attributes_of
from onelaunch.identity import id
from onelaunch.state.parts import Kept, build_slot, flat_content, item_slot, parts_of_slot
from onelaunch.state.slots import Slot, is_leaf


class ReplacedSlot(NamedTuple):
    """A slot whose content the caller replaces between calls.

    Attributes:
        kept: the objects that all contents have.
    """

    slot: Slot
    kept: Kept

    def inputs(self) -> list[Slot]:
        """Return the slots of the tensors in the present content."""
        value = self.slot.read()
        if isinstance(value, Tensor):
            return [self.slot]
        return parts_of_slot(self.slot, value, self.kept)

    def nbytes(self) -> int:
        return sum(t.nbytes for t in flat_content(self.slot.read(), self.kept).tensors)

    def objects(self, value: object) -> list[object]:
        """Return the containers and objects that differ from one content to the next."""
        return [part for part in composites_in([value]) if id(part) not in self.kept]


def replaced_alike(
    slot: Slot, before: object, written: Callable[[Tensor], bool]
) -> ReplacedSlot | None:
    """Return the slot as one that the caller replaces, if its content is built like another one.

    Args:
        before: the content that it had.
        written: whether a recording writes to a tensor, which is then no input but memory.
    """
    now = slot.read()
    if not (_holds_any(slot) and _is_whole(before) and _is_whole(now)):
        return None
    inside = {id(part) for part in composites_in([before])}
    kept = {id(part): Constant(part) for part in composites_in([now]) if id(part) in inside}
    kept.pop(id(now), None)
    replaced = ReplacedSlot(slot, kept)
    old, new = flat_content(before, kept), flat_content(now, kept)
    if old.tree != new.tree or not all(map(_is_free, (*old.tensors, *new.tensors))):
        return None
    alike = [*map(TensorSpec.of, old.tensors)] == [*map(TensorSpec.of, new.tensors)]
    return replaced if alike and not any(map(written, old.tensors)) else None


def _holds_any(slot: Slot) -> bool:
    """Return whether another content can be put into a slot, and back."""
    if slot.kind == "contents":
        return isinstance(slot.holder, contextvars.ContextVar)
    fits = isinstance(slot.holder, dict | list) and not isinstance(slot.owner, type)
    return slot.kind == "cell" or (slot.kind == "item" and fits)


def _is_whole(value: object) -> bool:
    """Return whether a content can be taken apart."""
    return isinstance(value, Tensor) or parts_of(value) is not None or is_ordinary(type(value))


def _is_free(t: Tensor) -> bool:
    """Return whether a tensor has only values, or a graph: no gradient of its own, and no parts."""
    parameter = isinstance(t, torch.nn.Parameter) or (t.requires_grad and is_leaf(t))
    return has_strides(t) and not parameter


class Staged:
    """The contents that a run finds in place of the caller's.

    Args:
        replaced: the slots, which hold the caller's contents now.
        held: all slots that the callable reaches, with their contents.

    Attributes:
        changed: ids of the slots whose contents cannot be replaced. The run changed such a
            content, stored or returned it, or another slot leads to a part of it.
        gone: ids of the caller's objects that the next call has others for, and of their dicts.
    """

    def __init__(
        self, replaced: Sequence[ReplacedSlot], held: Iterable[tuple[Slot, object]]
    ) -> None:
        self._originals = [(b, b.slot.read()) for b in replaced]
        self._staged: list[tuple[Any, Flat]] = []
        self._empty: dict[int, Slot] = {}
        """id of an empty dict -> the slot that holds it: a memo that the run may fill."""
        self.changed: set[tuple[int, object]] = set()
        self.gone: set[int] = set()
        owners: dict[int, tuple[int, object]] = {}
        """id of an object or tensor -> id of the slot that leads to it."""
        for b, value in self._originals:
            objects = b.objects(value)
            attributes = [a for o in objects if (a := attributes_of(o)) is not None]
            self.gone |= {*map(id, objects), *map(id, attributes)}
            for part in objects:
                if owners.setdefault(id(part), b.slot.id) != b.slot.id:
                    self.changed |= {b.slot.id, owners[id(part)]}
            owners.update((id(t), b.slot.id) for t in flat_content(value, b.kept).tensors)
        own = {b.slot.id for b in replaced}
        for slot, value in held if owners else ():
            owner = owners.get(id(value))
            if owner is not None and slot.id not in own and id(slot.holder) not in self.gone:
                self.changed.add(owner)

    def begin(self) -> None:
        """Note the contents for the run, which the slots hold now."""
        contents = [(b, b.slot.read()) for b, _ in self._originals]
        self._empty = {id(v): b.slot for b, v in contents if type(v) is dict and not v}
        self._staged = [(value, flat_content(value, b.kept)) for b, value in contents]

    def put_back(self) -> None:
        for (b, original), (staged, flat) in zip(self._originals, self._staged, strict=False):
            if b.slot.read() is not staged:
                self.changed.add(b.slot.id)
                continue
            if id(staged) in self._empty and all(isinstance(v, Tensor) for v in staged.values()):
                continue
            now = flat_content(staged, b.kept)
            same = all(t is was for t, was in zip(now.tensors, flat.tensors, strict=False))
            if now.tree != flat.tree or not same:
                self.changed.add(b.slot.id)
            b.slot.write(original)

    def at_call(self, slot: Slot) -> Slot:
        """Return the slot of the same item in the memo of a later call, if the run put it there."""
        whole = self._empty.get(id(slot.holder))
        return slot if whole is None else item_slot(whole, slot)

    def note_handed_on(self, values: Iterable[object]) -> None:
        """Note the contents that the run returned or stored: eager has the caller's object there,
        and a replay would have a copy."""
        handed = {id(part) for part in composites_in(values)}
        for (b, _), (staged, _) in zip(self._originals, self._staged, strict=False):
            if any(id(part) in handed for part in b.objects(staged)):
                self.changed.add(b.slot.id)

    def guards(self) -> list[tuple[Slot, object]]:
        """Return the checks of the builds of contents without tensors: no input checks them."""
        return [
            (build_slot(b.slot, value, b.kept), True)
            for b, value in self._originals
            if not flat_content(value, b.kept).tensors
        ]
