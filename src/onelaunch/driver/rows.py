"""Padding and cutting of a tensor by torch's own operations, for buckets and the tape."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Number = int | float | bool


def grow(
    grown: Tensor,
    t: Tensor,
    dims: Sequence[int],
    fill: Sequence[Number | None],
    repeats: bool = True,
) -> None:
    """Write `t` to the first rows of the larger `grown`, which may differ in `dims`. `fill`: for
    each the value of the added rows; if both of two dimensions grow, the later goes first.
    `repeats`: where `fill` is None, repeat the last real row; else added rows stay as they are."""
    first_rows(grown, t.shape).copy_(t)
    for place, (dim, value) in enumerate(zip(dims, fill, strict=True)):
        if t.shape[dim] == grown.shape[dim]:
            continue
        real = t.shape[dim]
        part = grown
        for later in dims[place + 1 :]:
            part = part.narrow(later, 0, t.shape[later])
        rest = part.narrow(dim, real, grown.shape[dim] - real)
        if value is not None:
            rest.fill_(value)
        elif repeats:
            rest.copy_(part.narrow(dim, real - 1, 1).expand_as(rest))


def first_rows(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Narrow `t` to this shape, from the first element on."""
    for dim, size in enumerate(shape):
        if size != t.shape[dim]:
            t = t.narrow(dim, 0, size)
    return t
