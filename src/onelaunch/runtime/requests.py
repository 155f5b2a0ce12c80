"""Objects that a request makes anew and passes to the callable, such as a decoder's cache.

`next_request.py` hands recordings on from one request's objects to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from onelaunch.call.containers import is_ordinary, objects_in
from onelaunch.call.tree import Constant, Tree, call_constants, flatten, unique
from onelaunch.capture.callee import Callee


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


class Requests:
    """The requests that a callable has served, each with objects of its own.

    Attributes:
        displaced: objects whose recordings another request has taken over: they get new recordings.
            Two requests that alternate would otherwise change places at each call.
    """

    def __init__(self) -> None:
        self.displaced = Objects()
        self._served: set[type] = set()
        """Classes of objects that took recordings over."""
        self._parts = Objects()
        """The objects that requests brought, and the objects inside."""

    def brings_new_object(self, objects: Sequence[object]) -> bool:
        """Return whether this is the first call with objects of classes that took recordings over.
        If no recording fits, as for a prompt before its tokens, it is worth no warm-up: the next
        request brings another object."""
        return all(type(value) in self._served for value in objects) and not any(
            value in self._parts for value in objects
        )

    def begin(self, objects: Sequence[object], callee: Callee) -> None:
        """Note a call with these objects, and forget the reads of other requests' objects."""
        parts = objects_in(objects)
        mine = {id(part) for part in parts}
        callee.forget(part for part in self._parts if id(part) not in mine)
        for part in parts:
            self._parts.add(part)

    def displace(self, objects: Sequence[object]) -> None:
        """Note objects whose recordings others have taken over."""
        for value in objects:
            self.displaced.add(value)
            self._served.add(type(value))


def requests_in(tree: Tree) -> list[object]:
    """Return the objects among a call's arguments that another request could replace."""
    return [constant.value for _, constant in call_constants(tree) if is_request(constant)]


def tensors_in(requests: Iterable[object]) -> list[Tensor]:
    """Return the tensors inside objects, each once."""
    return unique(flatten(list(requests), objects=True).tensors)


def is_request(constant: Constant) -> bool:
    """Return whether a constant is an object that another request could replace."""
    value = constant.value
    return constant.by_identity and is_ordinary(type(value)) and hasattr(type(value), "__weakref__")
