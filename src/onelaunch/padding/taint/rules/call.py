"""One tainted operation, as a propagation rule gets it.

A *plane* is a bool tensor of a tensor's shape: true for the elements with a property. A rule maps
the planes of an operation's inputs to planes of its results; where it is unsure it taints more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAST = -1e4
"""A score so low that its softmax beside others is exactly 0: exp(-104) underflows in float32."""

Planes = Callable[[Any], Tensor]
"""A function from an input to its plane; all false for an untainted input."""


@dataclass(slots=True)
class TaintedCall:
    """An operation that ran, with facts about its inputs.

    Attributes:
        name: of the overload: ``add.Tensor``.
        zero: the plane where a tensor is 0 at every call, whatever the padding holds.
        low: the plane where it is so low that a softmax gives 0, at every call.
        unknown: the plane where a value may differ from call to call. A rule gets these planes
            (`taint is call.unknown`), or the planes of what depends on padding.
        value: a tensor's values, on the device of the planes.
        real: the shape of a tensor in the unpadded run; None if unknown.
        real_results: the shapes of the results there; empty if unknown.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    zero: Planes
    low: Planes
    unknown: Planes
    value: Callable[[Any], Tensor]
    real: Callable[[Tensor], torch.Size | None]
    real_results: tuple[torch.Size, ...] = ()

    def argument(self, name: str, default: Any = None) -> Any:
        return argument_of(self.func, self.args, self.kwargs, name, default)


def argument_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None
) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return default


Rule = Callable[[TaintedCall, Planes], list[Tensor]]


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
    """Return a reduced plane in the shape of a result, with or without the reduced dimensions."""
    if plane.numel() == math.prod(shape):
        return plane.reshape(shape)
    if plane.dim() == len(shape):  # topk keeps some of the dimension
        return plane.broadcast_to(shape)
    return plane.any().broadcast_to(shape)


def each(plane: Tensor, results: Sequence[Tensor]) -> list[Tensor]:
    return [fitted(plane, r.shape) for r in results]


def beyond(shape: torch.Size, real: torch.Size, device: torch.device) -> Tensor:
    """Return the plane of a tensor that is true beyond its real size."""
    plane = torch.ones(shape, dtype=torch.bool, device=device)
    if len(shape) == len(real):
        plane[tuple(slice(0, n) for n in real)] = False
    return plane


def same_size(call: TaintedCall, t: Tensor, first: int = 0) -> bool:
    """Return whether the dimensions of `t` from `first` on are those of the unpadded run."""
    real = call.real(t)
    return real is not None and real[first:] == t.shape[first:]


def everywhere(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint everything: the input's size matters for each element of the result."""
    return [torch.ones(r.shape, dtype=torch.bool, device="cpu") for r in call.results]
