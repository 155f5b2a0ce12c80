"""Tensors that stand for others: those of torch.distributed, for this process's part, and of
transforms."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

_KINDS = (
    ("torch.distributed.tensor", "DTensor", "_local_tensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "elem"),
)
"""(module, class, attribute that holds the memory): a DTensor's part in this process, and the
result of a collective, written by the time it is read."""


def local(t: Tensor) -> Tensor:
    """Return the plain tensor that `t` stands for; of any other tensor, itself. 0.1 us."""
    if type(t) is Tensor or type(t) is Parameter:
        return t
    attribute = _memory_attribute(type(t))
    return t if attribute is None else getattr(t, attribute)


def is_wrapper_subclass(kind: type) -> bool:
    """Return whether operations on this class become others, on the tensors they stand for."""
    return _memory_attribute(kind) is not None


def is_wrapped(t: Tensor) -> bool:
    """Return whether a tensor is a transform's wrapper without memory, a batch of gradients say.
    `is_grads_batched=True` makes wrappers of a kind that functorch no longer has."""
    return _functorch.is_functorch_wrapped_tensor(t) or _functorch.is_legacy_batchedtensor(t)


_functorch: Any = cast(Any, torch._C)._functorch


def _memory_attribute(kind: type) -> str | None:
    for module, name, attribute in _KINDS:
        # Nothing is an instance of a class whose module was not imported.
        found: Any = getattr(sys.modules.get(module), name, None)
        if found is not None and issubclass(kind, found):
            return attribute
    return None
