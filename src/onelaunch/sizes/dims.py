"""Dimensions whose size varies from call to call."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PaddedDims(NamedTuple):
    """The padding of a tensor to a bucket's size."""

    dims: tuple[int, ...]  # the dimensions that grow
    places: tuple[int, ...]  # for each, the number of the bucketed dimension that it follows
    fill: tuple[int | float | bool | None, ...]
    """The value of the added rows, for each dimension; None repeats the last real row."""
    rows: int | None = None  # the bucketed dimension whose rows its values name, or None

    def dim_of(self, place: int) -> int | None:
        """Return the first dimension that follows bucketed dimension number `place`, or None."""
        return next((d for d, p in zip(self.dims, self.places, strict=True) if p == place), None)


class Varying(NamedTuple):
    """A contiguous tensor of a recording whose real sizes, at most its own, vary by launch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int, ...]  # the dimensions that vary, ascending, one or two
    fill: tuple[int | float | bool | None, ...]
    """The value of the added rows, for each dimension; None repeats the last real row. Rows beyond
    the real size of both dimensions get the second fill."""


class SizeLink(NamedTuple):
    """A dimension of a result with size ``scale * size + more``, where `size` is that of bucketed
    dimension number `place`."""

    dim: int
    place: int
    scale: int
    more: int
