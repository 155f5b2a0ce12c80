"""Counts that torch's own code would read: in ``torch.tensor([count])`` and ``x[:, count] = y``.

There a count is a number of the device too, so that one recording writes each token of a cache to
its place. See `counts`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from onelaunch.capture.counts import Count, Counts
from onelaunch.driver.function_modes import UnnoticedMode, call


class CountedPlaces(UnnoticedMode):
    """A mode that brings counts to the device where torch would take their values."""

    concerns = frozenset({torch.tensor, Tensor.__setitem__})

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function of torch's, with counts on the device; see `UnnoticedMode`."""
        if func is torch.tensor:
            made = self._tensor(*args, **kwargs)
            if made is not None:
                return made
            return call(func, types, (_plain(args[0]), *args[1:]), kwargs)
        place = _place_of(args[0], args[1])
        if place is None or not self._put(place, args[0], args[2]):
            call(func, types, args, kwargs)
        return None

    def _tensor(
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> Tensor | None:
        """Return a tensor of counts on the device; None if it is of others, or elsewhere."""
        items = list(_items(data))
        if device is None or options or not items or any(type(i) is not Count for i in items):
            return None
        if torch.empty(0, device=device).device != self._counts.device:
            return None
        made = torch.stack([self._on_device(item) for item in items])
        return made.reshape(_shape(data)).to(dtype or torch.int64)

    def _on_device(self, count: Count) -> Tensor:
        """Return the device's tensor for a count; the first attempt, which has none, is repeated
        with it."""
        made = self._counts.tensor(count)
        return torch.full((), count.value, device=self._counts.device) if made is None else made

    def _put(self, place: _Place, x: Tensor, value: Any) -> bool:
        """Do ``x[index] = value`` by a number of the device; return False if it cannot."""
        count, dim = place.first, place.dim
        most = x.shape[dim] - place.rows
        if x.device != self._counts.device or not 0 <= count.value <= most:
            return False
        rows = x[place.others]
        dim = place.seen_dim
        shape = [*rows.shape]
        shape[dim : dim + 1] = [place.rows] if place.sliced else []
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=x.dtype, device=x.device)
        if value.device != x.device or value.dim() > len(shape):
            return False
        count.follower.bound(operator.ge, -count.offset, True)
        count.follower.bound(operator.le, most - count.offset, True)
        given = value.expand(shape).to(x.dtype)
        at = self._on_device(count) + torch.arange(place.rows, device=x.device)
        rows.index_copy_(dim, at, given if place.sliced else given.unsqueeze(dim))
        return True


class _Place(NamedTuple):
    """A place in a tensor that begins at a count.

    Attributes:
        first: the count.
        rows: the length of the slice.
        sliced: False if the place is the count alone, so that its dimension goes.
        dim: the dimension of the tensor that it is in.
        others: the index with all of that dimension.
        seen_dim: the same dimension of ``x[others]``.
    """

    first: Count
    rows: int
    sliced: bool
    dim: int
    others: tuple[Any, ...]
    seen_dim: int


def _place_of(x: Tensor, index: Any) -> _Place | None:
    """Return the place of an index with one count in it, beside numbers, slices and the like."""
    parts = list(cast(tuple[Any, ...], index)) if isinstance(index, tuple) else [index]
    spans = [_span(part) for part in parts]
    if sum(span is not None for span in spans) != 1:
        return None
    if any(span is None and not _is_basic(part) for span, part in zip(spans, parts, strict=True)):
        return None
    where = next(i for i, span in enumerate(spans) if span is not None)
    span = spans[where]
    assert span is not None
    hidden = x.dim() - sum(part is not None and part is not ... for part in parts)
    dim = seen = 0
    for part in parts[:where]:
        taken = hidden if part is ... else int(part is not None)
        dim += taken
        seen += taken if part is ... else int(type(part) is not int)
    others = (*parts[:where], slice(None), *parts[where + 1 :])
    return _Place(*span, dim, others, seen) if dim < x.dim() else None


def _span(part: Any) -> tuple[Count, int, bool] | None:
    """Return the count that a part of an index begins at, its length, and whether it is a slice."""
    if type(part) is Count:
        return part, 1, False
    if type(part) is not slice or part.step is not None:
        return None
    start, stop = part.start, part.stop
    if type(start) is not Count or type(stop) is not Count or start.follower is not stop.follower:
        return None
    return (start, stop.offset - start.offset, True) if stop.offset > start.offset else None


def _is_basic(part: Any) -> bool:
    if type(part) is slice:
        return all(i is None or type(i) is int for i in (part.start, part.stop, part.step))
    return part is None or part is ... or type(part) is int


def _items(data: Any) -> Iterator[Any]:
    if type(data) in (list, tuple):
        for item in data:
            yield from _items(item)
    else:
        yield data


def _plain(data: Any) -> Any:
    """Return the data with the value of each count: torch does not take a count for a number."""
    if type(data) in (list, tuple):
        return [_plain(item) for item in data]
    return data.fixed() if type(data) is Count else data


def _shape(data: Any) -> list[int]:
    return [len(data), *_shape(data[0])] if type(data) in (list, tuple) else []
