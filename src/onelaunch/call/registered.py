"""`register`: the classes of arguments that are taken apart from the first call on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.utils import _pytree as pytree

from onelaunch.call.containers import BY_ATTRIBUTES, is_ordinary
from onelaunch.errors import ArgumentError, kind_of

T = TypeVar("T")


def register(
    cls: type[T],
    flatten: Callable[[T], tuple[Iterable[Any], Any]] | None = None,
    unflatten: Callable[[Iterable[Any], Any], T] | None = None,
) -> type[T]:
    """Take the instances of a class apart among arguments, so that each call may bring another.

    What is in them is then compared with a recording as arguments are: tensors by their sizes and
    the like, numbers by value. An object of a class that is not registered is compared by
    identity; `ol.graph` takes the like apart as well, but only from the ninth new object on. Named
    tuples, dataclasses, and what is registered with `torch.utils._pytree` need no registration.

    Args:
        cls: the class itself, without its subclasses.
        flatten: the children of an instance, which may hold tensors, and the rest of it, its
            context. By default the children are the attributes, and the objects in these are taken
            apart too.
        unflatten: an instance made of children and context. Both functions are registered with
            torch's pytree, so that `torch.func`, `torch.compile` and `torch.export` know the class.

    Returns:
        `cls`, so that ``@ol.register`` decorates a class.

    Raises:
        ArgumentError: OL401, one function without the other; functions for a class that has some;
            or no functions for a class of which attributes are not the whole: one with
            `__slots__` or `__del__`, a list's subclass, a module.

    A capture passes the callable another instance. If the callable changes the instance that it
    gets, other than its tensors in place, then those of a class with functions are refused (OL105),
    and those of a class without are compared by identity again.

    Example:
        >>> import torch, onelaunch as ol
        >>> @ol.register
        ... class Batch:
        ...     def __init__(self, x, scale):
        ...         self.x, self.scale = x, scale
        >>> fast = ol.graph(lambda batch: batch.x * batch.scale)
        >>> [fast(Batch(torch.full((), float(i)), 2)).item() for i in range(5)]
        [0.0, 2.0, 4.0, 6.0, 8.0]
        >>> len(fast.recordings)
        1
    """
    if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            "OL401", f"expected a class, got {kind_of(cls)}", fix="ol.register(Batch)"
        )
    name = cls.__name__
    functions = f"ol.register({name}, flatten, unflatten)"
    if (flatten is None) is not (unflatten is None):
        raise ArgumentError("OL401", "one function without the other", fix=functions)
    if flatten is not None and unflatten is not None:
        if cls in pytree.SUPPORTED_NODES:
            what = f"{name} is registered with torch's pytree already"
            raise ArgumentError("OL401", what, fix="register a class once")
        pytree.register_pytree_node(cls, _listing(flatten), unflatten)
    elif is_ordinary(cls):
        BY_ATTRIBUTES.add(cls)
    elif cls not in pytree.SUPPORTED_NODES and not dataclasses.is_dataclass(cls):
        raise ArgumentError("OL401", f"attributes are not the whole of a {name}", fix=functions)
    return cls


def _listing(
    flatten: Callable[[T], tuple[Iterable[Any], Any]],
) -> Callable[[T], tuple[list[Any], Any]]:
    """Return a function of which torch's pytree gets the list of children that it asks for."""

    def listed(value: T) -> tuple[list[Any], Any]:
        children, context = flatten(value)
        return list(children), context

    return listed
