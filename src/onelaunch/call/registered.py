"""`register`: the classes of arguments that are taken apart from the first call on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.utils import _pytree as pytree

from onelaunch.call.containers import BY_ATTRIBUTES, is_ordinary
from onelaunch.errors import ArgumentError, describe_type

T = TypeVar("T")


def register(
    cls: type[T],
    flatten: Callable[[T], tuple[Iterable[Any], Any]] | None = None,
    unflatten: Callable[[Iterable[Any], Any], T] | None = None,
) -> type[T]:
    """Take the instances of a class apart among arguments, so that each call may bring another.

    Its parts are then compared with a recording as arguments are: tensors by sizes, strides and
    dtypes, numbers by value. An instance of an unregistered class is compared by identity.
    `ol.graph` takes it apart only after its object was gone by the next call, or from the ninth new
    object on. Named tuples, dataclasses, and classes known to `torch.utils._pytree`, as TensorDict,
    need no registration.

    Args:
        cls: the class itself, without its subclasses.
        flatten: the children of an instance, which may hold tensors, and the rest of it, its
            context. By default the children are the attributes, and objects in attributes are taken
            apart too.
        unflatten: an instance made of children and context. Both functions are registered with
            torch's pytree, so that `torch.func`, `torch.compile` and `torch.export` know the class.

    Returns:
        `cls`, so that ``@ol.register`` decorates a class.

    Raises:
        ArgumentError: OL401, one function without the other; functions for a class that has some;
            or no functions for a class whose instances are more than their attributes: with
            `__slots__` or `__del__`, a list's subclass, a module.

    A capture passes the callable another instance. The callable may write to its tensors in place.
    If it changes the instance otherwise, a class with functions is refused (OL105), and a class
    without is compared by identity again.

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
            "OL401", f"expected a class, got {describe_type(cls)}", fix="ol.register(Batch)"
        )
    name = cls.__name__
    functions = f"ol.register({name}, flatten, unflatten)"
    if (flatten is None) is not (unflatten is None):
        raise ArgumentError("OL401", "one function without the other", fix=functions)
    if flatten is not None and unflatten is not None:
        if cls in pytree.SUPPORTED_NODES:
            what = f"{name} is registered with torch's pytree already"
            raise ArgumentError("OL401", what, fix="register a class once")
        pytree.register_pytree_node(cls, lambda value: _listed(*flatten(value)), unflatten)
    elif is_ordinary(cls):
        BY_ATTRIBUTES.add(cls)
    elif cls not in pytree.SUPPORTED_NODES and not dataclasses.is_dataclass(cls):
        raise ArgumentError("OL401", f"attributes are not the whole of a {name}", fix=functions)
    return cls


def _listed(children: Iterable[Any], context: Any) -> tuple[list[Any], Any]:
    """Return children and context as torch's pytree asks for them."""
    return list(children), context
