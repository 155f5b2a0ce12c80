"""Elements that move with the size: whether an operation takes the same ones as at the real size.

Padding lies behind the real rows of an argument; behind a `cat`, or a reshape that puts a dimension
in front, it lies between them, and the same place is another element than at the real size. So each
operation that picks elements by place is done again on their numbers, in either run: the real ones
of the padded tensor are numbered in their order, which is that of the tensor at the real size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.driver.aten import leaves, tensors

_PADDING, _CONSTANT = -1, 0
"""The numbers of what the run at the real size has not, and of what comes from no tensor."""

_DATA: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("index", "_unsafe_index", "index_select", "gather", "take"), (0,)),
    "index_put": (0, 2),
}
"""Operations that are told places by tensors: which of their arguments are the others."""

MOVES = frozenset(
    {
        *("select", "slice", "split", "split_with_sizes", "unbind", "unfold", "diagonal"),
        *("as_strided", "constant_pad_nd", "select_scatter", "slice_scatter", "diagonal_scatter"),
        *("select_copy", "slice_copy", "unfold_copy", "diagonal_copy", *_DATA),
    }
)
"""Operations that pick elements by their places. Others keep the order of elements, or a flow says
that they need their size to be what it is."""


class Holds(Enum):
    """Elements of a result, beside those that it holds at the real size."""

    SAME = 0
    PADDING = 1
    """The same where it reads real ones, and padding in the place of others: what reads it is
    followed, and what writes into it misses the real ones."""
    OTHERS = 2


class Picked(NamedTuple):
    """A call of one of `MOVES` at the real size, without the memory of its tensors.

    Attributes:
        args, kwargs: a tensor of data as its shape, one of places as a copy.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def picked(packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked | None:
    """What to keep of an operation at the real size; None of those that pick nothing."""
    if packet not in MOVES:
        return None
    data = _DATA.get(packet)
    kept = [
        _each(value, _shape if data is None or i in data else _copy) for i, value in enumerate(args)
    ]
    return Picked(tuple(kept), kwargs)


def _shape(t: Tensor) -> torch.Size:
    return t.shape


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone()


def displaced(
    func: Any,
    packet: str,
    args: tuple[Any, ...],
    real: Picked,
    kwargs: dict[str, Any],
    padded: Callable[[Any], Tensor],
    unsure: Callable[[Any], Tensor],
    told: bool,
    results: int,
) -> list[Holds] | None:
    """Say what each result holds; None where it cannot be otherwise than at the real size.

    Args:
        padded: which elements of a tensor are padding.
        unsure: which of them may differ from call to call.
        told: whether its numbers are the same in either run.
        results: how many there are.
    """
    data = _DATA.get(packet)
    places = [] if data is None else tensors([a for i, a in enumerate(args) if i not in data])
    inputs = tensors([a for i, a in enumerate(args) if data is None or i in data])
    shapes = list(_shapes(real.args))
    if len(shapes) != len(inputs) or any(bool(unsure(t).any()) for t in places):
        return None
    planes = [padded(t) for t in inputs]
    device = planes[0].device
    behind = list(map(_behind, planes, shapes))
    if not places and all(behind) and _plain(packet, args, real.args):
        return None
    numbers: list[Tensor] = []
    constants = False
    for k, (t, plane, shape) in enumerate(zip(inputs, planes, shapes, strict=True)):
        if behind[k]:
            numbers.append(_in_place(plane, shape, k))
        elif (count := int((~plane).sum())) == shape.numel():
            numbers.append(_in_order(plane, k))
        elif _behind(plane | ~unsure(t), shape):
            constants = True
            numbers.append(_in_place(plane, shape, k))
        else:  # values show what becomes of constants, but not which elements are the real ones
            return None if count > shape.numel() else [Holds.OTHERS] * results
    grown = iter(numbers)
    rest = iter([_counted(shape, k, device) for k, shape in enumerate(shapes)])
    try:
        after = _run(func, packet, args, kwargs, lambda t: next(grown), device)
        before = _run(func, packet, real.args, real.kwargs, lambda t: next(rest), device)
    except (RuntimeError, IndexError, ValueError):
        return None
    found = [_held(a, b, told) for a, b in zip(after, before, strict=False)]
    if constants and Holds.OTHERS in found:
        return None
    return found + [Holds.PADDING] * (results - len(found))  # more rows, each a result


def _plain(packet: str, args: tuple[Any, ...], real: tuple[Any, ...]) -> bool:
    """Whether padding that is behind stays behind: the same places in either run, from the start
    on."""
    if packet in ("split", "split_with_sizes", "unbind"):
        return False
    mine, theirs = ([v for v in leaves(a) if isinstance(v, int)] for a in (args[1:], real[1:]))
    numbers = packet in ("select", "slice", "select_scatter", "slice_scatter", "select_copy")
    return mine == theirs and (not numbers or all(n >= 0 for n in mine))


def _run(
    func: Any,
    packet: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: Callable[[Any], Tensor],
    device: torch.device,
) -> Sequence[Tensor]:
    data = _DATA.get(packet)
    given = [
        _each(value, number if data is None or i in data else lambda t: t.detach().to(device))
        for i, value in enumerate(args)
    ]
    if packet == "constant_pad_nd":
        given = [*given[:2], _CONSTANT]
    found = func(*given, **kwargs)
    return found if isinstance(found, (list, tuple)) else [found]


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with its tensors, or the shapes that stand for them, changed."""
    if isinstance(value, (Tensor, torch.Size)):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_each(v, change) for v in value]
    return value


def _shapes(value: Any) -> Iterator[torch.Size]:
    if isinstance(value, torch.Size):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _shapes(v)


def _behind(padded: Tensor, real: torch.Size) -> bool:
    """Whether all beyond the real size is padding, and so the rest is in its place."""
    if padded.dim() != len(real) or any(n > m for n, m in zip(real, padded.shape, strict=True)):
        return False
    inside = padded.clone()
    inside[_first(real)] = True
    return bool(inside.all())


def _first(shape: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def _counted(shape: torch.Size, place: int, device: torch.device) -> Tensor:
    """Every element of an argument numbered, in their order, from 1 on."""
    first = (place << 40) + 1
    return torch.arange(first, first + shape.numel(), device=device).reshape(shape)


def _in_place(padded: Tensor, real: torch.Size, place: int) -> Tensor:
    """`_counted` of the real elements, which are where they are at the real size."""
    numbers = torch.full(padded.shape, _PADDING, device=padded.device)
    numbers[_first(real)] = _counted(real, place, padded.device)
    return torch.where(padded, _PADDING, numbers)


def _in_order(padded: Tensor, place: int) -> Tensor:
    """`_counted` of the real elements, which are all that are no padding."""
    numbers = (~padded).flatten().cumsum(0).reshape(padded.shape) + (place << 40)
    return torch.where(padded, _PADDING, numbers)


def _held(after: Tensor, before: Tensor, told: bool) -> Holds:
    if _alike(after, before, told, exact=True):
        return Holds.SAME
    return Holds.PADDING if _alike(after, before, told, exact=False) else Holds.OTHERS


def _alike(after: Tensor, before: Tensor, told: bool, exact: bool) -> bool:
    """Whether the same elements are in the same order: one by one, or row by row, where rows of
    padding hold constants too. Told the same numbers, an operation may take more at the end.

    Args:
        exact: whether padding in the place of another element is a difference.
    """
    kept = after[after != _PADDING]
    if kept.shape == before.flatten().shape and torch.equal(kept, before.flatten()):
        return True
    if after.dim() != before.dim():
        return False
    if told and _equal(after[_first(before.shape)], before, exact):
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
    """The rows along `dim` without those of padding."""
    rows = t.movedim(dim, 0).reshape(t.shape[dim], -1)
    kept = (rows > 0).any(1) | (rows == _CONSTANT).all(1)
    return t.index_select(dim, kept.nonzero().flatten())
