"""The contents of the state before a run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.call.tree import is_plain
from onelaunch.call.wrappers import is_memory
from onelaunch.frames.stack import Use
from onelaunch.identity import id
from onelaunch.state.dependencies import bases, classed, ordered
from onelaunch.state.host_values import key_of
from onelaunch.state.slots import (
    MISSING,
    Facts,
    Kind,
    description_id,
    facts_of,
    gradient_of,
    text_of_facts,
)
from onelaunch.state.walk import StateWalk
from onelaunch.watch.operations import has_memory

_BY_IDENTITY = (OrderedDict, Tensor, torch.nn.Module)
_IDENTITY_TYPES = frozenset({type, dict, OrderedDict, list, set, FunctionType})
"""Types of nearly all values that are not plain, for speed; the first with their subclasses."""
COMPARED_BY_VALUE = frozenset(
    {bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class ContentsBefore:
    """The contents of the state before a run, as comparable values. Keeps nothing alive.

    Args:
        walked: the state.
        values: whether host tensors are compared by their values, too.
    """

    def __init__(self, walked: StateWalk, values: bool) -> None:
        self._values = values
        self._held: dict[object, object] = {}
        self._pending: list[Mapping[object, object]] = []
        """Contents that `by_id` does not have yet."""
        self._leaf_attributes: list[tuple[int, dict[str, object]]] = []
        """(id of a module's `__dict__`, its leaf attributes), likewise."""
        self._described: list[tuple[tuple[int, object], Kind, Facts | None]] = []
        """(id and kind of a slot, facts of its tensor): `by_id` makes descriptions of them."""
        self.without_hooks: set[int] = set()
        """ids of the empty dicts of hooks that the run leaves empty."""
        self._hooks_of_modules: list[object] = []
        """The dicts themselves, until the run ends."""
        self._shapes: list[tuple[tuple[int, Any], Any, object]] = []
        """(key in `by_id`, container, length or keys) of containers, until the run ends."""
        self.add(walked)

    def add(self, walked: StateWalk) -> None:
        """Add the contents of a walk, before `finish`."""
        if walked.noted is None:
            walked.noted = _contents(walked)
        self._pending += [walked.noted, _further_contents(walked, self._values)]
        self._leaf_attributes += [
            (at, attributes.values) for at, attributes in walked.leaf_attributes.items()
        ]
        used, slots = walked.used, walked.slots
        read = ((key, slots[key]) for key in walked.tensor_slots if used.get(key) is Use.READ)
        self._described.extend((key, s.kind, facts_of(t)) for key, (s, t) in read if is_memory(t))
        self._shapes += _shapes_in(walked)
        self._hooks_of_modules += walked.hooks
        self.without_hooks.update(map(id, walked.hooks))

    @property
    def by_id(self) -> dict[object, object]:
        """id of a slot -> its content before the run: a plain value, or the id of an object. Also
        the lengths and orders of containers that the run leaves as they are."""
        for contents in self._pending:
            self._held.update(contents)
        for at, values in self._leaf_attributes:
            self._held.update(((at, key), content_of(value)) for key, value in values.items())
        for key, kind, facts in self._described:
            self._held[description_id(key, kind)] = content_of(text_of_facts(facts))
        for noted in (self._pending, self._leaf_attributes, self._described):
            noted.clear()
        return self._held

    def finish(self) -> None:
        """Keep the lengths and orders of the containers that the run has left as they were."""
        shapes = self._shapes
        self._pending.append({k: then for k, of, then in shapes if then == content_of(k[1](of))})
        self.without_hooks -= {id(hooks) for hooks in self._hooks_of_modules if hooks}
        self._hooks_of_modules.clear()
        self._shapes.clear()

    def differ(self, slots: Iterable[tuple[Any, object]]) -> bool:
        """Return whether a slot, given by id and content, held another content before the run. A
        slot that was unknown then counts as unchanged, except for gradients, which were None."""
        held = self.by_id
        return any(
            held[key] != content_of(value)
            if key in held
            else (key[1] is gradient_of and value is not MISSING)
            or (key[1] is len and value and key[0] in self.without_hooks)
            for key, value in slots
        )


def _contents(walked: StateWalk) -> dict[object, object]:
    """Return id of a slot -> its content."""
    kinds = {type(value) for _, value in walked.slots.values()}
    by_identity = {k for k in kinds if k in _IDENTITY_TYPES or issubclass(k, _BY_IDENTITY)}
    return {
        key: id(value) if type(value) in by_identity else content_of(value)
        for key, (_, value) in walked.slots.items()
    }


def _further_contents(walked: StateWalk, values: bool) -> dict[object, object]:
    """Return the contents of slots beside those of the walk: the classes of objects, and the bases
    of classes. With `values`, those of host tensors too."""
    objects = classed(walked, [value for _, value in walked.slots.values()])
    held: dict[object, object] = {(id(value), type): id(type(value)) for value in objects}
    held.update((slot.id, content_of(order)) for slot, order in bases(walked))
    for _, t in walked.tensors() if values else ():
        if has_memory(t) and t.device.type == "cpu":
            key = key_of(t)
            held[id(t), key] = content_of(key(t))
    return held


def _shapes_in(walked: StateWalk) -> list[tuple[tuple[int, Any], Any, object]]:
    """Return the lengths of containers, and the keys of dicts in their order, each with the reader
    in the key."""
    containers = walked.contents.containers.items()
    shapes: list[tuple[tuple[int, Any], Any]]
    shapes = [((key, len), inside) for key, (inside, _, _) in containers]
    shapes += [((id(inside), tuple), inside) for _, inside in ordered(walked, ())]
    return [(key, inside, content_of(key[1](inside))) for key, inside in shapes]


def content_of(value: object) -> object:
    """Return a comparable form of a slot's content: a plain value, or an object's id. A tuple has
    that of each part: the keys of a dict, in order, are a new tuple at each read."""
    kind = type(value)
    if kind in COMPARED_BY_VALUE:
        return kind, value
    if kind is tuple:
        return tuple(map(content_of, cast(tuple[object, ...], value)))
    if kind in _IDENTITY_TYPES:
        return id(value)
    return (kind, repr(value)) if is_plain(value) else id(value)
