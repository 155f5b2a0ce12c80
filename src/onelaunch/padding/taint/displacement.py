"""Displacement: the check that an operation picks the same elements as in the unpadded run.

Padding lies behind the real rows of an argument. After a `cat`, or a reshape that puts a dimension
in front, it lies between real rows. There an index means another element than in the unpadded run.
So each operation that picks elements by index is repeated on element numbers, for both runs. The
real elements of the padded tensor are numbered in the unpadded tensor's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.driver.aten import leaves, mapped, tensors
from onelaunch.driver.rows import first_rows

if TYPE_CHECKING:
    from onelaunch.padding.taint.rules.call import TaintedCall

_PADDING, _CONSTANT = -1, 0
"""The numbers of padding, which the unpadded run does not have, and of constants."""

_DATA: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("index", "_unsafe_index", "index_select", "gather", "take"), (0,)),
    "index_put": (0, 2),
}
"""Operation with tensors of indices -> positions of its other tensor arguments, the data."""

MOVES = frozenset(
    {
        *("select", "slice", "split", "split_with_sizes", "unbind", "unfold", "diagonal"),
        *("as_strided", "constant_pad_nd", "select_scatter", "slice_scatter", "diagonal_scatter"),
        *("select_copy", "slice_copy", "unfold_copy", "diagonal_copy", *_DATA),
    }
)
"""Operations that pick elements by index. Others keep the order of elements, or their rule demands
an unchanged size."""


class Holds(Enum):
    """The elements that a result holds, compared with the unpadded run's result."""

    SAME = 0
    PADDING = 1
    """The same elements, or padding in place of some. Taint follows readers of padding, but a write
    into it misses real elements."""
    OTHERS = 2


class Picked(NamedTuple):
    """A call of one of `MOVES` in the unpadded run. `args`: with data tensors without memory, and
    copies of index tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def picked(packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked | None:
    """Return the record of an operation in the unpadded run; None if it does not pick elements."""
    if packet not in MOVES:
        return None
    return Picked(_changed(packet, args, lambda t: t.to("meta"), Tensor.clone), kwargs)


def _changed(
    packet: str,
    args: Sequence[Any],
    data: Callable[[Tensor], Tensor],
    indices: Callable[[Tensor], Tensor],
) -> tuple[Any, ...]:
    """Return the arguments of an operation with its tensors changed: the data, and the indices."""
    known = _DATA.get(packet, range(len(args)))

    def changed(place: int, value: Any) -> Any:
        change = data if place in known else indices
        return mapped(value, lambda v: change(v) if isinstance(v, Tensor) else v)

    return tuple(changed(place, value) for place, value in enumerate(args))


def displaced(
    call: TaintedCall, real: Picked, same_numbers: bool, results: int
) -> list[Holds] | None:
    """Return the elements that each result holds; None if nothing can be displaced.
    `same_numbers`: True if its numbers are the same in both runs. `results`: how many there are."""
    args, unknown, packet = call.args, call.unknown, call.packet
    data = _DATA.get(packet, range(len(args)))
    places = tensors([a for i, a in enumerate(args) if i not in data])
    inputs = tensors([a for i, a in enumerate(args) if i in data])
    shapes = [t.shape for t in tensors([a for i, a in enumerate(real.args) if i in data])]
    if len(shapes) != len(inputs) or any(bool(unknown(t).any()) for t in places):
        return None
    for t in places:
        call.value(t)  # the numbers below are moved by these
    planes = [call.padded(t) for t in inputs]
    device = planes[0].device
    behind = list(map(_behind, planes, shapes))
    if not places and all(behind) and _keeps_padding_behind(packet, args, real.args):
        return None
    numbers: list[Tensor] = []
    constants = False
    for k, (t, plane, shape) in enumerate(zip(inputs, planes, shapes, strict=True)):
        if behind[k]:
            numbers.append(_in_place(plane, shape, k))
        elif (count := int((~plane).sum())) == shape.numel():
            numbers.append(_in_order(plane, k))
        elif _behind(plane | ~unknown(t), shape):
            constants = True
            numbers.append(_in_place(plane, shape, k))
        else:  # which elements are the real ones is unknown; constants would show in the values
            return None if count > shape.numel() else [Holds.OTHERS] * results
    unpadded = [_numbered(shape, k, device) for k, shape in enumerate(shapes)]
    try:
        after = _run(call, args, call.kwargs, numbers)
        before = _run(call, real.args, real.kwargs, unpadded)
    except (RuntimeError, IndexError, ValueError):
        return None
    found = [_held(a, b, same_numbers) for a, b in zip(after, before, strict=False)]
    if constants and Holds.OTHERS in found:
        return None
    return found + [Holds.PADDING] * (results - len(found))  # more rows, each a result


def _keeps_padding_behind(packet: str, args: tuple[Any, ...], real: tuple[Any, ...]) -> bool:
    """Return whether padding stays behind: both runs use the same indices, from the start."""
    if packet in ("split", "split_with_sizes", "unbind"):
        return False
    mine, theirs = ([v for v in leaves(a) if isinstance(v, int)] for a in (args[1:], real[1:]))
    numbers = packet in ("select", "slice", "select_scatter", "slice_scatter", "select_copy")
    return mine == theirs and (not numbers or all(n >= 0 for n in mine))


def _run(
    call: TaintedCall, args: Sequence[Any], kwargs: dict[str, Any], numbers: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Run the operation on element numbers in place of its data."""
    rest, device = iter(numbers), numbers[0].device
    given = _changed(call.packet, args, lambda t: next(rest), lambda t: t.detach().to(device))
    if call.packet == "constant_pad_nd":
        given = (*given[:2], _CONSTANT)
    found = call.func(*given, **kwargs)
    return found if isinstance(found, (list, tuple)) else [found]


def _behind(padded: Tensor, real: torch.Size) -> bool:
    """Return whether everything beyond the real size is padding, so that the rest is in place."""
    if padded.dim() != len(real) or any(n > m for n, m in zip(real, padded.shape, strict=True)):
        return False
    inside = padded.clone()
    first_rows(inside, real).fill_(True)
    return bool(inside.all())


def _numbered(shape: torch.Size, place: int, device: torch.device) -> Tensor:
    """Return the numbers of an argument's elements, in their order, from 1."""
    first = (place << 40) + 1
    return torch.arange(first, first + shape.numel(), device=device).reshape(shape)


def _in_place(padded: Tensor, real: torch.Size, place: int) -> Tensor:
    """Return the numbers of real elements, which have the same places as in the unpadded run."""
    numbers = torch.full(padded.shape, _PADDING, device=padded.device)
    first_rows(numbers, real).copy_(_numbered(real, place, padded.device))
    return torch.where(padded, _PADDING, numbers)


def _in_order(padded: Tensor, place: int) -> Tensor:
    """Return the numbers of the real elements: everything but padding."""
    numbers = (~padded).flatten().cumsum(0).reshape(padded.shape) + (place << 40)
    return torch.where(padded, _PADDING, numbers)


def _held(after: Tensor, before: Tensor, same_numbers: bool) -> Holds:
    if _alike(after, before, same_numbers, exact=True):
        return Holds.SAME
    return Holds.PADDING if _alike(after, before, same_numbers, exact=False) else Holds.OTHERS


def _alike(after: Tensor, before: Tensor, same_numbers: bool, exact: bool) -> bool:
    """Return whether the same elements are in the same order. They are compared one by one, or row
    by row, as rows of padding may hold constants. With the same numbers an operation may take more
    at the end. `exact`: True if padding in the place of another element is a difference."""
    kept = after[after != _PADDING]
    if kept.shape == before.flatten().shape and torch.equal(kept, before.flatten()):
        return True
    if after.dim() != before.dim():
        return False
    if same_numbers and _equal(after[tuple(map(slice, before.shape))], before, exact):
        return True
    for dim in range(after.dim()):
        if after.shape[dim] != before.shape[dim]:
            after = _rows(after, dim)
    return _equal(after, before, exact)


def _equal(after: Tensor, before: Tensor, exact: bool) -> bool:
    if after.shape != before.shape:
        return False
    same = after == before
    return bool(same.all() if exact else (same | (after == _PADDING)).all())


def _rows(t: Tensor, dim: int) -> Tensor:
    """Return the rows along `dim` that are not padding."""
    rows = t.movedim(dim, 0).reshape(t.shape[dim], -1)
    kept = (rows > 0).any(1) | (rows == _CONSTANT).all(1)
    return t.index_select(dim, kept.nonzero().flatten())
