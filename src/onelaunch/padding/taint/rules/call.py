"""What is known of one operation, and of the memory it reads.

A *plane* is a bool tensor of the shape of a tensor: which of its elements something is true of. A
flow takes the planes of an operation's inputs to those of its outputs, and errs to the side of
spreading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAST = -1e4
"""A score so far below others that its softmax is exactly 0: exp(-104) underflows in float32."""

See = Callable[[Any], Tensor]
"""The plane of an input; all false for what is not a tensor of any interest."""


@dataclass(slots=True)
class TaintedCall:
    """One operation that ran, with what is known of its inputs.

    Attributes:
        name: of the overload: ``add.Tensor``.
        zero: where a tensor is 0 at every call, whatever the padding holds.
        low: where it is so low that a softmax gives 0, at every call.
        unknown: where a value may differ from call to call; the planes that a flow is given are
            these (`see is call.unknown`), or those of what depends on padding.
        value: a tensor's values, on the device of the planes.
        real: the shape of a tensor in the run at the real size; None if that is not known.
        real_results: the shapes of the results there; none if that is not known.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    zero: See
    low: See
    unknown: See
    value: See
    real: Callable[[Tensor], torch.Size | None]
    real_results: tuple[torch.Size, ...] = ()

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if index < len(self.args):
                    return self.args[index]
                return self.kwargs.get(name, argument.default_value)
        return default


Flow = Callable[[TaintedCall, See], list[Tensor]]


def dims_of(call: TaintedCall, t: Tensor) -> list[int]:
    dim = call.argument("dim")
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(t.dim()))
    listed: list[int] = [dim] if isinstance(dim, int) else list(dim)
    return [d % max(t.dim(), 1) for d in listed] if t.dim() else []


def any_over(plane: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        plane = plane.any(dim, keepdim=True)
    return plane


def fitted(plane: Tensor, shape: torch.Size) -> Tensor:
    """A reduced plane in the shape of a result, with or without the reduced dimensions."""
    if plane.numel() == math.prod(shape):
        return plane.reshape(shape)
    if plane.dim() == len(shape):  # topk keeps some of the dimension
        return plane.broadcast_to(shape)
    return plane.any().broadcast_to(shape)


def each(plane: Tensor, results: Sequence[Tensor]) -> list[Tensor]:
    return [fitted(plane, r.shape) for r in results]


def beyond(shape: torch.Size, real: torch.Size, device: torch.device) -> Tensor:
    """Where a tensor that grew with the size lies beyond its real size."""
    plane = torch.ones(shape, dtype=torch.bool, device=device)
    if len(shape) == len(real):
        plane[tuple(slice(0, n) for n in real)] = False
    return plane


def same_size(call: TaintedCall, t: Tensor, first: int = 0) -> bool:
    """Whether the dimensions of `t` from `first` on are those of the run at the real size."""
    real = call.real(t)
    return real is not None and real[first:] == t.shape[first:]


def everywhere(call: TaintedCall, see: See) -> list[Tensor]:
    """It matters what size the input has: nothing of a result is as it would be."""
    return [torch.ones(r.shape, dtype=torch.bool, device="cpu") for r in call.results]
