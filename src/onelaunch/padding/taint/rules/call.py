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
"""The highest number that may stand for minus infinity; each call is checked where it does."""

GAP = 1000.0
"""A difference of scores whose exponential is 0 in every type: exp(-746) is, in float64."""

Planes = Callable[[Any], Tensor]
"""A function from an input to its plane; all false for an untainted input."""


@dataclass(slots=True)
class TaintedCall:
    """An operation that ran, with facts about its inputs.

    Attributes:
        name: the overload: ``add.Tensor``.
        zero: the plane where a tensor is 0 at every call, whatever the padding holds.
        low: the plane where it is minus infinity or stands for it, at every call.
        padded: the plane of elements that depend on padding.
        hides: called with a tensor, the plane of its low elements that padding must not outweigh,
            and the dimensions along which they are compared.
        unknown: the plane where a value may differ from call to call. A rule gets these planes
            (`taint is call.unknown`), or the `padded` planes.
        value: a tensor's values, on the device of the planes.
        real: the shape of a tensor in the unpadded run; None if unknown.
        real_results: the shapes of the results there; empty if unknown.
        rows: the plane where a value names a real row, at every call.
        spare: the plane where padding names a row that is not real.
        named: real and padded size of the dimension whose rows a tensor names; None if unknown.
        beyond: see `beyond`.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    zero: Planes
    low: Planes
    padded: Planes
    hides: Callable[[Tensor, Tensor, Sequence[int]], None]
    unknown: Planes
    value: Callable[[Any], Tensor]
    real: Callable[[Tensor], torch.Size | None]
    real_results: tuple[torch.Size, ...]
    rows: Planes
    spare: Planes
    named: Callable[[Any], tuple[int, int] | None]
    beyond: Callable[[torch.Size, torch.Size, torch.device], Tensor]

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


def more(call: TaintedCall, taint: Planes, t: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the plane of `t` with constants that only the padded run has along `dims`. Constants
    above a diagonal are an example, which no padded row makes."""
    plane, real = taint(t), call.real(t)
    if taint is call.unknown or real is None or all(real[d] == t.shape[d] for d in dims):
        return plane
    along = torch.Size(real[d] if d in dims else n for d, n in enumerate(t.shape))
    outside = call.beyond(t.shape, along, plane.device)
    return plane | (outside & ~call.unknown(t))


def hidden(call: TaintedCall, t: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the plane of elements that count for nothing beside others along these dimensions."""
    low = call.low(t)
    low = low & ~_outweighed(call, low, call.value(t), dims)
    hide(call, t, low, more(call, call.padded, t, dims), dims)
    return low


def _outweighed(call: TaintedCall, low: Tensor, value: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the plane of numbers that are not far below the others of this run: each call would
    fail the check. Of a sum only half counts, as in the check."""
    if not value.is_floating_point() or not bool((low & value.isfinite()).any()):
        return torch.zeros_like(low)
    highest = torch.where(low, -torch.inf, value.nan_to_num(torch.inf))
    half = torch.where(call.unknown(call.args[0]), value / 2, value)
    hides = torch.where(low & value.isfinite(), half, -torch.inf)
    for dim in dims:
        highest, hides = highest.amax(dim, keepdim=True), hides.amax(dim, keepdim=True)
    return low & (highest <= hides + GAP) & value.isfinite()


def hide(call: TaintedCall, t: Tensor, low: Tensor, plane: Tensor, dims: Sequence[int]) -> None:
    """Note where the low elements of `t` alone keep a row from depending on padding."""
    low, plane = torch.broadcast_tensors(low, plane)
    saved = any_over(plane, dims) & ~any_over(plane & ~low, dims) & any_over(~low, dims)
    needed = low & plane & saved
    if bool(needed.any()):
        call.hides(t, needed, dims)


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


def beyond(
    shape: torch.Size, real: torch.Size, device: torch.device, front: bool = False
) -> Tensor:
    """Return the plane of a tensor that is true beyond its real size: behind the real elements, or
    in front of them."""
    plane = torch.ones(shape, dtype=torch.bool, device=device)
    if len(shape) == len(real):
        starts = [max(m - n, 0) if front else 0 for m, n in zip(shape, real, strict=True)]
        plane[tuple(slice(i, i + n) for i, n in zip(starts, real, strict=True))] = False
    return plane


def same_size(call: TaintedCall, t: Tensor, first: int = 0) -> bool:
    """Return whether the dimensions of `t` from `first` on are those of the unpadded run."""
    real = call.real(t)
    return real is not None and real[first:] == t.shape[first:]


def everywhere(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint everything: the input's size matters for each element of the result."""
    return [torch.ones(r.shape, dtype=torch.bool, device="cpu") for r in call.results]
