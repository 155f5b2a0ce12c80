"""Reads of a tensor by the host, seen at the Python function: `item`, `tolist`, `numpy`, printing.
Reads by operations in C++ come to `driver.refusals` instead, by way of `watch.admission`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.function_modes import UnnoticedMode, call
from onelaunch.driver.refusals import BY_LIST, CHECKED, READS, SHOWN_LATER, SHOWS
from onelaunch.frames.origins import library_calls

FACTORIES: tuple[Any, ...] = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
"""Functions that make a tensor of numbers, without the dispatcher."""

_LIST_FACTORIES = frozenset({*FACTORIES, Tensor.new})
"""Functions that read the tensors in a list without the dispatcher."""
_JOINED = "torch.stack([a, b]), which joins tensors on the device"


class HostReads(UnnoticedMode):
    """A mode that passes every read by the host to `refuse`. It also passes every index that is a
    list: torch makes a tensor on the device without the dispatcher. `refuse`: raises; called with a
    code, the event, the tensor and the code to write instead."""

    concerns = frozenset(
        {*READS, *CHECKED, *_LIST_FACTORIES, Tensor.__getitem__, Tensor.__setitem__}
    )

    def __init__(
        self,
        owns: Callable[[Tensor], bool],
        refuse: Callable[[str, str, Tensor, str | None], object],
        note: Callable[[Tensor], object] = lambda t: None,
    ) -> None:
        super().__init__()
        self._owns = owns  # tells whether a tensor's memory is the device's
        self._refuse = refuse
        self._note = note  # called with any other tensor that is read
        self.assigning = 0
        """Number of ``x[i] = number`` under way; torch makes a host tensor of the number."""
        self.calling: Any = None
        """The function of torch's that is under way, if it reads an argument inside."""

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function of torch's, unless it reads on the host; see `UnnoticedMode`."""
        if func is Tensor.__repr__ and is_asked_for_class():
            return type(args[0]).__name__
        read = READS.get(func)
        if read is not None and isinstance(args[0], Tensor):
            self.read(args[0], read)
        if func in _LIST_FACTORIES:
            for t in _listed((*args, *kwargs.values())):
                self.read(t, f"`{func.__name__}` of a list of tensors", _JOINED)
        indexing = func in (Tensor.__getitem__, Tensor.__setitem__)
        parts = parts_of(args[1]) if indexing else ()
        if indexing:
            for t in _listed(parts or args[1]):
                self.read(t, "an index that is a list of tensors", _JOINED)
        if func in CHECKED if not indexing else _selects(args[1]):
            self.calling = func
            try:
                return call(func, types, args, kwargs)
            finally:
                self.calling = None
        if any(map(is_places, parts)) and args[0].device.type != "cpu" and self._owns(args[0]):
            what = "an index that is a list is copied to the device"
            self._refuse("OL103", what, args[0], BY_LIST)
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            self.assigning += 1
            try:
                return call(func, types, args, kwargs)
            finally:
                self.assigning -= 1
        return call(func, types, args, kwargs)

    def read(self, t: Tensor, how: str, fix: str | None = None) -> None:
        """Count a tensor as read by the host."""
        if self._owns(t):
            fix = SHOWN_LATER if how in SHOWS else fix
            self._refuse("OL101", f"the host reads a tensor in a capture: {how}", t, fix)
        self._note(t)


def _listed(values: Any) -> Iterator[Tensor]:
    """List the tensors in sequences among values, however deep, without the values themselves."""
    for value in values if isinstance(values, Sequence) else ():
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            yield from (part for part in value if isinstance(part, Tensor))
            yield from _listed(value)


def is_asked_for_class() -> bool:
    """Return whether a tensor is printed by a library that looks for the name of a class in it."""
    return next(library_calls(), None) in _ASKS_CLASS


_ASKS_CLASS = frozenset({("torchao/kernel/intmm.py", "safe_int_mm")})
"""(file, function): `"FakeTensor" in input.__repr__()`, at each product of torchao's in int8."""


def parts_of(index: Any) -> tuple[Any, ...]:
    """Return the parts of an index, or None for a short list or array with sequences, slices or
    tensors inside. Torch takes it for a tuple, with a warning that this will end."""
    if isinstance(index, tuple):
        return index  # pyright: ignore[reportUnknownVariableType]
    if not _is_sequence(index) or len(index) >= _LONG:
        return (index,)
    tuple_like = any(
        isinstance(part, Tensor | slice | EllipsisType | None) or _is_sequence(part)
        for part in index
    )
    return () if tuple_like else (index,)


def is_places(part: Any) -> bool:
    """Return whether a part of an index is a list or array of numbers, perhaps nested."""
    kind = getattr(getattr(part, "dtype", None), "kind", None)
    if kind is not None:
        return _is_sequence(part) and len(part) > 0 and kind in "iub"
    return _is_sequence(part) and len(part) > 0 and all(map(_is_place, part))


def _is_place(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.device.type == "cpu" and not part.is_floating_point()
    return is_places(part) or (hasattr(part, "__index__") and not _is_sequence(part))


_LONG = 32  # the length of a list that is never taken for a tuple


def _is_sequence(value: Any) -> bool:
    if isinstance(value, Tensor) or not hasattr(value, "__array__"):
        return isinstance(value, list | tuple | range)
    return getattr(value, "ndim", 0) > 0


def _selects(index: Any) -> bool:
    """Return whether an index has an integer tensor that torch reads, to make a view."""
    return any(
        isinstance(part, Tensor)
        and not part.dim()
        and not part.is_floating_point()
        and part.dtype not in (torch.bool, torch.uint8)
        for part in parts_of(index)
    )
