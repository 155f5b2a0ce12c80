"""Tensors that stand for other tensors: DTensors for this process's part, compound tensors (as
quantised weights) for their inner tensors, and the wrappers of transforms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn import Parameter

_KINDS = (
    ("torch.distributed.tensor", "DTensor", "_local_tensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "elem"),
)
"""(module, class, attribute that holds the memory): a DTensor's part in this process, and the
result of a collective."""
_JAGGED = "torch.nested._internal.nested_tensor"
"""The module of nested tensors, which are known by their layout."""


def local(t: Tensor) -> Tensor:
    """Return the plain tensor that `t` stands for, or `t` itself. 0.1 us."""
    if type(t) is Tensor or type(t) is Parameter:
        return t
    attribute = _memory_attribute(type(t))
    return t if attribute is None else getattr(t, attribute)


def is_compound(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a compound tensor: it has inner tensors, and no memory of its own.
    A weight that torchao quantised has integers and scales. Code that looks at memory treats it as
    an object with tensors among its attributes."""
    kind = type(value)
    if kind is Tensor or kind is Parameter or not issubclass(kind, Tensor):
        return False
    return is_wrapper_subclass(kind) and _memory_attribute(kind) is None


def is_memory(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor with memory, its own or its local tensor's."""
    return isinstance(value, Tensor) and not is_compound(value)


def inner_names(t: Any) -> list[str]:
    """Return the attributes with the inner tensors of a compound tensor."""
    return list(t.__tensor_flatten__()[0])


def parts(t: Tensor) -> Iterator[Tensor]:
    """Iterate over the tensors that hold a tensor's memory."""
    if is_compound(t):
        for name in inner_names(t):
            yield from parts(getattr(t, name))
    else:
        yield local(t)


def is_wrapper_subclass(kind: type) -> bool:
    """Return whether operations on a class become operations on inner tensors."""
    return hasattr(kind, "__tensor_flatten__") and kind.__module__ != _JAGGED


def is_wrapped(t: Tensor) -> bool:
    """Return whether a tensor is a transform's wrapper without memory, as a batch of gradients.
    `is_grads_batched=True` makes wrappers of a kind that functorch no longer has."""
    return _functorch.is_functorch_wrapped_tensor(t) or _functorch.is_legacy_batchedtensor(t)


_functorch: Any = cast(Any, torch._C)._functorch


def _memory_attribute(kind: type) -> str | None:
    for module, name, attribute in _KINDS:
        # Nothing is an instance of a class whose module was not imported.
        owner: Any = getattr(sys.modules.get(module), name, None)
        if owner is not None and issubclass(kind, owner):
            return attribute
    return None
