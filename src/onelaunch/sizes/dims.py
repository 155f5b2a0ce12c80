"""Dimensions whose size varies from call to call."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PaddedDims(NamedTuple):
    """The padding of a tensor to a bucket's size.

    Attributes:
        dims: the dimensions that grow.
        places: for each dimension, the number of the bucketed dimension that it follows.
        fill: for each dimension, the value of the added rows; None repeats the last real row.
        rows: the bucketed dimension whose rows its values name; None for other values.
    """

    dims: tuple[int, ...]
    places: tuple[int, ...]
    fill: tuple[int | float | bool | None, ...]
    rows: int | None = None

    def dim_of(self, place: int) -> int | None:
        """Return the first dimension that follows bucketed dimension number `place`, or None."""
        return next((d for d, p in zip(self.dims, self.places, strict=True) if p == place), None)


class Varying(NamedTuple):
    """A contiguous tensor of a recording whose real sizes, at most its own, vary by launch.

    Attributes:
        shape, dtype: shape and dtype of the recording's tensor.
        dims: the dimensions that vary, ascending, one or two.
        fill: for each dimension, the value of the added rows; None repeats the last real row. Rows
            beyond the real size of both dimensions get the second fill.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int, ...]
    fill: tuple[int | float | bool | None, ...]


class SizeLink(NamedTuple):
    """A dimension of a result with size ``scale * size + more``, where `size` is that of bucketed
    dimension number `place`."""

    dim: int
    place: int
    scale: int
    more: int
