"""The objects that a request makes anew and passes to the callable: a decoder's cache."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor

from onelaunch.call.tree import Constant, Container, Tree, can_flatten, flatten, unique


class Objects:
    """A set of objects, by identity, that keeps none of them alive."""

    def __init__(self) -> None:
        self._found: dict[int, weakref.ref[object]] = {}

    def add(self, value: object) -> None:
        key = id(value)
        self._found[key] = weakref.ref(value, lambda _: self._found.pop(key, None))

    def __contains__(self, value: object) -> bool:
        found = self._found.get(id(value))
        return found is not None and found() is value

    def __iter__(self) -> Iterator[object]:
        found = [ref() for ref in list(self._found.values())]
        return (value for value in found if value is not None)


def requests_in(tree: Tree) -> list[object]:
    """Return the objects among a call's arguments whose place another one could take."""
    return list(_requests(tree))


def tensors_in(requests: Iterable[object]) -> list[Tensor]:
    """Return the tensors in such objects, each once."""
    return unique(flatten(list(requests), objects=True).tensors)


def _requests(tree: Tree) -> Iterator[object]:
    if isinstance(tree, Container):
        for child in tree.children:
            yield from _requests(child)
    elif isinstance(tree, Constant) and is_request(tree):
        yield tree.value


def is_request(constant: Constant) -> bool:
    """Return whether a constant is an object whose place another one could take."""
    value = constant.value
    return constant.by_identity and can_flatten(value) and hasattr(type(value), "__weakref__")


def parts_of(requests: Iterable[object]) -> list[object]:
    """Return such objects with the objects inside them."""
    found: dict[int, object] = {}
    waiting: list[Any] = list(requests)
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | tuple):
            waiting += cast(list[Any], value)
        elif isinstance(value, dict):
            waiting += cast(dict[Any, Any], value).values()
        elif id(value) not in found and can_flatten(value) and hasattr(type(value), "__weakref__"):
            found[id(value)] = value
            waiting += vars(value).values()
    return list(found.values())
