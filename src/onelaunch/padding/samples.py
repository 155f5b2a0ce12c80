"""Samples: the arguments of a proof's runs, from the caller's rows or random."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.driver.rows import first_rows, grow
from onelaunch.driver.select import computing
from onelaunch.padding.pad import (
    BucketedCall,
    below,
    bucket_shape,
    dense_stride,
    each_once,
    resized,
)
from onelaunch.sizes.buckets import Sizes
from onelaunch.sizes.dims import PaddedDims

_LARGE = 1e4  # floats from here on hide scores or stand for infinity, and are not replaced


class Samples:
    """A set of arguments at a real size, and the same grown to a bucket with other rows. `random`:
    True to replace floats by random numbers in their range: zeros, ones and equal rows then hide
    nothing. Integers and booleans stay, as random indices may be out of bounds. A mask of 0 and 1
    stays too. `positive`: True to make the random numbers positive."""

    def __init__(
        self, call: BucketedCall, bucket: Sizes, random: bool, positive: bool = False
    ) -> None:
        self._padded = call.padded
        seeds = itertools.count()

        def made(t: Tensor, how: PaddedDims | None) -> Tensor:
            whole = t.detach().clone() if how is None else resized(t, how, bucket)
            seed = next(seeds)
            return drawn(whole, seed, positive) if random and not _is_mask(whole, how) else whole

        self._whole = call.each(made)

    def real(self, sizes: Sizes) -> list[Tensor]:
        """Return new tensors of these sizes, no larger than the bucket; one for a tensor that
        occurs twice."""
        return each_once(self._whole, self._padded, functools.partial(_cut, sizes=sizes))

    def grown(self, real: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors at the size of the bucket, beginning with `real`, unpadded ones
        too."""
        made = each_once(self._whole, self._padded, lambda t, how: t.clone())
        for whole, t, how in zip(made, real, self._padded, strict=True):
            if how is not None:
                grow(whole, t, how.dims, how.fill, repeats=False)
        return made


def _cut(whole: Tensor, how: PaddedDims | None, sizes: Sizes) -> Tensor:
    if how is None:
        return whole.clone()
    shape = bucket_shape(whole, how, sizes)
    made = whole.new_empty(0).new_empty_strided(shape, dense_stride(whole, shape))
    made.copy_(first_rows(whole, shape))
    if how.rows is not None:
        made.copy_(below(made, made, how.dims[-1], sizes[how.rows]))
    return made


def _is_mask(t: Tensor, how: PaddedDims | None) -> bool:
    """Return whether it is a mask of elements: 1, or 0 as its padding may be."""
    if how is None or all(value is None for value in how.fill):
        return False
    return bool(((t == 0) | (t == 1)).all() & (t == 1).any())


def drawn(t: Tensor, seed: int, positive: bool = False) -> Tensor:
    """Return random numbers in the range of `t`'s, with its layout, or `t` itself without floats.
    They are positive if `t` has no negative numbers. Infinite or very large numbers stay."""
    if t.layout is not torch.strided or not t.numel():
        return t
    if t.is_complex():
        parts = torch.view_as_real(t.resolve_conj())
        return torch.view_as_complex(drawn(parts, seed, positive).contiguous())
    if not t.is_floating_point():
        return t
    wide = t.detach().to(torch.float64 if t.dtype == torch.float64 else torch.float32)
    replaced = wide.isfinite() & (wide.abs() < _LARGE)
    values = torch.where(replaced, wide, 0)
    low, high = float(values.min()), float(values.max())
    if positive:
        high = max(high, -low)
        low = 0.0
    if low >= 0:
        low, high = (low if low > high / 4 and low < high else high / 4), high
    elif high <= 0:
        low, high = low, (high if high < low / 4 and low < high else low / 4)
    if low == high:  # zeros
        low, high = 0.25, 1.0
    place = computing(t.device)
    generator = torch.Generator(place).manual_seed(seed)
    random = torch.rand(t.shape, generator=generator, device=place, dtype=wide.dtype)
    made = torch.where(replaced, (low + (high - low) * random).to(t.device), wide)
    return torch.empty_like(t).copy_(made)


def unknown(outside: Tensor, small: Tensor, how: PaddedDims) -> Tensor:
    """Return the plane of elements that differ in other calls: all but constant fills."""
    where = torch.ones_like(outside)
    for dim, value in zip(how.dims, how.fill, strict=True):
        if value is not None:
            real = small.shape[dim]
            where.narrow(dim, real, where.shape[dim] - real).fill_(False)
    return where
