"""Tensors that stand for others: those of torch.distributed, for this process's part; those made of
several tensors, as quantised weights are; and those of transforms."""

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
result of a collective, written by the time it is read."""
_JAGGED = "torch.nested._internal.nested_tensor"
"""The module of nested tensors, which are known by their layout."""


def local(t: Tensor) -> Tensor:
    """Return the plain tensor that `t` stands for; of any other tensor, itself. 0.1 us."""
    if type(t) is Tensor or type(t) is Parameter:
        return t
    attribute = _memory_attribute(type(t))
    return t if attribute is None else getattr(t, attribute)


def is_compound(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor made of several others, without memory of its own: a
    weight that torchao quantised has its integers and their scales. Code that looks at memory
    treats it as an object with tensors among its attributes."""
    kind = type(value)
    return kind is not Tensor and kind is not Parameter and _is_compound_class(kind)


def is_memory(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor with memory, its own or the one that it stands for."""
    return isinstance(value, Tensor) and not is_compound(value)


def inner_names(t: Any) -> list[str]:
    """Return the names of the attributes that hold the tensors of a compound one."""
    return list(t.__tensor_flatten__()[0])


def parts(t: Tensor) -> Iterator[Tensor]:
    """Iterate over the tensors that hold a tensor's memory: itself, or those that it stands for."""
    if is_compound(t):
        for name in inner_names(t):
            yield from parts(getattr(t, name))
    else:
        yield local(t)


def is_wrapper_subclass(kind: type) -> bool:
    """Return whether operations on this class become others, on the tensors they stand for."""
    return hasattr(kind, "__tensor_flatten__") and kind.__module__ != _JAGGED


def is_wrapped(t: Tensor) -> bool:
    """Return whether a tensor is a transform's wrapper without memory, a batch of gradients say.
    `is_grads_batched=True` makes wrappers of a kind that functorch no longer has."""
    return _functorch.is_functorch_wrapped_tensor(t) or _functorch.is_legacy_batchedtensor(t)


_functorch: Any = cast(Any, torch._C)._functorch


def _is_compound_class(kind: type) -> bool:
    """Return whether a class is of tensors made of several. 0.1 us for one that is not."""
    wraps = issubclass(kind, Tensor) and is_wrapper_subclass(kind)
    return wraps and _memory_attribute(kind) is None


def _memory_attribute(kind: type) -> str | None:
    for module, name, attribute in _KINDS:
        # Nothing is an instance of a class whose module was not imported.
        found: Any = getattr(sys.modules.get(module), name, None)
        if found is not None and issubclass(kind, found):
            return attribute
    return None
