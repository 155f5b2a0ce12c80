"""Tensors that stand for others: torch.distributed's for this process's part, and transforms'."""

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
"""Module, class, and the attribute that holds the memory: the part of a tensor that this process
has, and what a collective will have written when somebody reads it."""


def local(t: Tensor) -> Tensor:
    """The plain tensor that `t` stands for; any other tensor itself. 0.1 us."""
    if type(t) is Tensor or type(t) is Parameter:
        return t
    attribute = _held_in(type(t))
    return t if attribute is None else getattr(t, attribute)


def is_wrapper_subclass(kind: type) -> bool:
    """Whether operations on tensors of this class become others, on what they stand for."""
    return _held_in(kind) is not None


def is_wrapped(t: Tensor) -> bool:
    """Whether this stands for a tensor of a transform, a batch of gradients say, and has no memory
    of its own. `is_grads_batched=True` makes those of a kind that functorch has no more."""
    return _functorch.is_functorch_wrapped_tensor(t) or _functorch.is_legacy_batchedtensor(t)


_functorch: Any = cast(Any, torch._C)._functorch


def _held_in(kind: type) -> str | None:
    for module, name, attribute in _KINDS:
        # Nothing is an instance of a class whose module nobody imported.
        found: Any = getattr(sys.modules.get(module), name, None)
        if found is not None and issubclass(kind, found):
            return attribute
    return None
