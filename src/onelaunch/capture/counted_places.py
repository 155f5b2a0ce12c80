"""Numbers that the callable moves on, as torch's functions get them.

Torch would take a stand-in for a float. In a sum, in ``torch.tensor([count])`` and in
``x[:, count] = y`` the device has the number as a tensor, so that one recording writes each token
of a cache to its place. Other functions get its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from onelaunch.capture.followed import EXACT
from onelaunch.capture.number import Node, Number, node_of
from onelaunch.capture.numbers import NumberStandIns
from onelaunch.driver.aten import leaves, mapped
from onelaunch.driver.function_modes import UnnoticedMode, call

_FOLLOWED = {
    getattr(of, name)
    for of in (torch, Tensor)
    for name in (
        *("add", "sub", "mul", "add_", "sub_", "mul_", "__rsub__"),
        *("lt", "le", "gt", "ge", "eq", "ne", "__eq__", "__ne__"),
    )
    if hasattr(of, name)
}
"""Torch's functions of a tensor and a number that the device may have, too."""


_WIDE = (torch.int64, torch.float32, torch.float64)


class _Every(frozenset[Any]):
    def __contains__(self, function: object) -> bool:
        return True


class CountedPlaces(UnnoticedMode):
    """A mode that brings numbers to the device where torch would take their values."""

    concerns = _Every()

    def __init__(self, numbers: NumberStandIns) -> None:
        super().__init__()
        self._numbers = numbers
        self._filled: dict[object, Tensor] = {}

    def on_device(self, node: Node) -> Tensor:
        """Return the device's tensor of a number, made once for each stream. A kernel fills it with
        the number as a scalar, which each call writes there."""
        numbers = self._numbers
        numbers.entered_as_tensor = True
        stream = torch.get_device_module(numbers.device).current_stream()
        key = node.term, stream, torch.is_inference_mode_enabled()
        if key not in self._filled:
            fits = -EXACT <= Number(node) <= EXACT  # in each call that the recording serves
            scalar: Any = numbers.as_float(node) if fits else node.plain()
            dtype = torch.float64 if fits else torch.int64
            filled = torch.full((), scalar, dtype=dtype, device=numbers.device)
            self._filled[key] = filled.to(torch.int64)
        return self._filled[key]

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function of torch's, with numbers on the device; see `UnnoticedMode`."""
        if func is torch.tensor:
            tensor = self._tensor(*args, **kwargs)
            if tensor is not None:
                return tensor
        elif func is Tensor.__setitem__:
            place = _place_of(args[0], args[1])
            if place is not None and self._put(place, args[0], args[2]):
                return None
        elif func in _FOLLOWED and len(args) == 2 and not kwargs:
            operand = self._operand(*args)
            if operand is not None:
                return call(func, types, (args[0], operand), kwargs)
        if any(_plain(value) is not value for value in leaves((args, kwargs))):
            args, kwargs = mapped(args, _plain), mapped(kwargs, _plain)
        return call(func, types, args, kwargs)

    def _operand(self, t: Any, number: Any) -> Tensor | None:
        """Return a number as a tensor of the device, for an operation with `t` that keeps its
        dtype. Kernels round a tensor to half precision, but not a number."""
        node = _counted(number)
        if node is None or not isinstance(t, Tensor) or t.device != self._numbers.device:
            return None
        wide = t.dtype in _WIDE or (t.dtype == torch.int32 and t.dim() > 0)
        return self.on_device(node) if wide else None

    def _tensor(
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> Tensor | None:
        """Return a tensor of numbers on the device; None if it has others, or is elsewhere."""
        nodes = [_counted(item) for item in _items(data)]
        if device is None or options or not nodes or None in nodes:
            return None
        if torch.empty(0, device=device).device != self._numbers.device:
            return None
        stacked = torch.stack([self.on_device(node) for node in nodes if node is not None])
        return stacked.reshape(_shape(data)).to(dtype or torch.int64)

    def _put(self, place: _Place, x: Tensor, value: Any) -> bool:
        """Do ``x[index] = value`` by a number of the device; return False if it cannot."""
        first, dim = place.first, place.dim
        most = x.shape[dim] - place.rows
        # Each call that is served has to be within the tensor.
        if x.device != self._numbers.device or not 0 <= first <= most:
            return False
        rows = x[place.others]
        dim = place.seen_dim
        shape = [*rows.shape]
        shape[dim : dim + 1] = [place.rows] if place.sliced else []
        if not isinstance(value, Tensor):
            value = torch.full((), _plain(value), dtype=x.dtype, device=x.device)
        if value.device != x.device or value.dim() > len(shape):
            return False
        given = value.expand(shape).to(x.dtype)
        at = self.on_device(first.node) + torch.arange(place.rows, device=x.device)
        rows.index_copy_(dim, at, given if place.sliced else given.unsqueeze(dim))
        return True


class _Place(NamedTuple):
    """A place in a tensor that begins at a number which is moved on."""

    first: Number
    rows: int  # the length of the slice
    sliced: bool  # False if the place is the number alone, so that its dimension goes
    dim: int  # the dimension of the tensor that it is in
    others: tuple[Any, ...]  # the index with all of that dimension
    seen_dim: int  # the same dimension of ``x[others]``


def _place_of(x: Tensor, index: Any) -> _Place | None:
    """Return the place of an index with one number that is moved on, beside slices and the like."""
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


def _span(part: Any) -> tuple[Number, int, bool] | None:
    """Return an index's number, its length, and whether that is a slice's."""
    if _counted(part) is not None:
        return part, 1, False
    if type(part) is not slice or part.step is not None:
        return None
    start, stop = _counted(part.start), _counted(part.stop)
    if start is None or stop is None or not start.moves_with(stop):
        return None
    rows = stop.value - start.value
    return (part.start, int(rows), True) if rows > 0 else None


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


def _counted(value: Any) -> Node | None:
    node = node_of(value)
    return None if node is None or node.moved is None else node


def _plain(value: Any) -> Any:
    if type(value) is slice:
        parts = value.start, value.stop, value.step
        plain = tuple(map(_plain, parts))
        same = all(a is b for a, b in zip(parts, plain, strict=True))
        return value if same else slice(*plain)
    node = _counted(value)
    return value if node is None else node.plain()


def _shape(data: Any) -> list[int]:
    return [len(data), *_shape(data[0])] if type(data) in (list, tuple) else []
