"""Padding by torch: arguments grown to the size of a bucket, results cut back to the call's size.

Where the device can, a recording pads by itself (`driver/cuda/ragged.py`); `strategy` decides.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.spec import contiguous_stride
from onelaunch.call.tree import Flat, Tree
from onelaunch.capture.checks import give_marks
from onelaunch.driver.rows import first_rows, grow
from onelaunch.errors import ArgumentError
from onelaunch.padding.taint.hidden import Hiding
from onelaunch.sizes.buckets import Buckets, Key, Number, Sizes
from onelaunch.sizes.dims import PaddedDims, SizeLink, Varying
from onelaunch.sizes.ragged import Ragged


class BucketedCall(NamedTuple):
    """A call, as buckets see it. `padded`: for each tensor its padding, or None."""

    flat: Flat
    sizes: Sizes
    padded: tuple[PaddedDims | None, ...]

    def each(self, change: Callable[[Tensor, PaddedDims | None], Tensor]) -> list[Tensor]:
        """Return each tensor changed; one that occurs twice is changed once."""
        return each_once(self.flat.tensors, self.padded, change)

    def along(self, place: int) -> list[int | None]:
        """Return for each tensor the dimension that follows bucketed dimension number `place`."""
        return [None if how is None else how.dim_of(place) for how in self.padded]

    def size_text(self, place: int) -> str:
        """Return the expression of a size of the call, by its `args` and `kwargs`."""
        dims = zip(self.flat.paths, self.along(place), strict=True)
        return next(f"{path}.shape[{dim}]" for path, dim in dims if dim is not None)

    def grown(self, bucket: Sizes) -> Flat:
        found = self.each(lambda t, how: t if how is None else pad(t, how, bucket))
        return self.flat._replace(tensors=found)

    def resized(self, sizes: Sizes) -> list[Tensor]:
        """Return examples of the tensors for other sizes; see `resized`."""
        pairs = zip(self.flat.tensors, self.padded, strict=True)
        return [t if how is None else resized(t, how, sizes) for t, how in pairs]


def parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters; empty if the signature is unknown."""
    return tuple(p.name for p in _signature(fn) or () if p.kind in _POSITIONAL)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _signature(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        called = fn.forward if isinstance(fn, torch.nn.Module) else fn
        return list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # a callable of C
        return None


def check_named(buckets: Buckets, fn: Callable[..., Any], name: str) -> None:
    """Refuse buckets that name arguments beyond the known signature of `fn`."""
    found = _signature(fn)
    kinds = {p.kind for p in found or ()}
    several = found is None or inspect.Parameter.VAR_POSITIONAL in kinds
    others = found is None or inspect.Parameter.VAR_KEYWORD in kinds
    names = [p.name for p in found or () if not p.kind.name.startswith("VAR_")]
    count = len(parameters(fn))
    for option, stated in (("dims", buckets.dims), ("pad", buckets.pad)):
        for key in stated:
            if isinstance(key, int):
                known = several or 0 <= key < count
            elif "[" in key:
                known = key.startswith(("args[", "kwargs["))
            else:
                known = others or key in names
            if not known:
                what = f"`{name}` has no argument {key!r}, which {option} names"
                why = f"its parameters are {', '.join(names) or 'not known'}"
                close = [] if "[" in str(key) else difflib.get_close_matches(str(key), names, 1)
                fix = f"{option}={{{close[0]!r}: ...}}" if close else None
                fix = fix or "the name of a parameter, a position from 0, or \"args[0]['x']\""
                raise ArgumentError("OL401", what, why=why, fix=fix)


def check_outputs(buckets: Buckets, results: Sequence[Tensor]) -> None:
    """Refuse buckets that name results, or dimensions of results, that do not exist."""
    fix = "outputs={0: 0}: the dimension of each tensor in the result, by its number from 0"
    for number, dims in buckets.outputs.items():
        if not 0 <= number < len(results):
            what = f"outputs names result {number}, of {len(results)} that there are"
            raise ArgumentError("OL401", what, fix=fix)
        shape = list(results[number].shape)
        for dim in dims:
            if dim is not None and dim >= len(shape):
                what = f"outputs names dimension {dim} of result {number}, which is {shape}"
                raise ArgumentError("OL401", what, fix=fix)


def bucketed_call(buckets: Buckets, flat: Flat, names: Sequence[str]) -> BucketedCall:
    """Return the sizes of a call, and the dimensions in which each of its tensors is padded. A
    tensor without stated dimensions is padded if it has the bucketed dimension at the common size.
    A dimension of size 1 is broadcast, and left as it is. Raises `ArgumentError`: OL402, the
    arguments do not agree on a size; OL401, one cannot hold the value that fills its padding."""
    stated = [_stated(buckets.dims, path, names) for path in flat.paths]
    fills = [_stated(buckets.pad, path, names) for path in flat.paths]
    _check_fills(flat, fills)
    sizes: list[int] = []
    grown: list[list[tuple[int, int, Number | None]]] = [[] for _ in flat.tensors]
    for place in range(len(buckets.sizes)):
        default = buckets.dim[place] if buckets.dim else None
        found = [
            _dims_of(t, default if given is None else given[place])
            for t, given in zip(flat.tensors, stated, strict=True)
        ]
        name = buckets.names[place] if isinstance(buckets, Ragged) else f"dimension {default}"
        size = _common(flat, stated, found, name)
        sizes.append(size)
        for t, dims, fill, own in zip(flat.tensors, found, fills, grown, strict=True):
            value = None if fill is None else fill[place]
            own += [(dim, place, value) for dim in dims if t.shape[dim] == size]
    padded = tuple(map(_padding, grown))
    if isinstance(buckets, Ragged):
        padded = _naming(buckets, flat, names, tuple(sizes), padded)
    return BucketedCall(flat, tuple(sizes), padded)


def _padding(own: Sequence[tuple[int, int, Number | None]]) -> PaddedDims | None:
    if not own:
        return None
    dims, places, fill = zip(*own, strict=True)
    return PaddedDims(dims, places, fill)


def _naming(
    buckets: Ragged,
    flat: Flat,
    names: Sequence[str],
    sizes: Sizes,
    padded: Sequence[PaddedDims | None],
) -> tuple[PaddedDims | None, ...]:
    """Return the padding with that of arguments that name rows: the last row of the bucket."""
    bucket = buckets.choose(sizes)
    found = list(padded)
    for number, (path, t, how) in enumerate(zip(flat.paths, flat.tensors, padded, strict=True)):
        rows = _stated(buckets.index, path, names)
        if rows is None or how is None:
            continue
        if t.dtype not in (torch.int32, torch.int64):
            what = f"`{path}` is {t.dtype}, and names rows of {buckets.names[rows]}"
            raise ArgumentError("OL401", what, fix="an index of torch.int64")
        last = None if bucket is None else bucket[rows] - 1
        found[number] = PaddedDims(how.dims, how.places, (last,) * len(how.dims), rows)
    return tuple(found)


def _check_fills(flat: Flat, fills: Sequence[tuple[Number | None, ...] | None]) -> None:
    for path, t, values in zip(flat.paths, flat.tensors, fills, strict=True):
        for value in values or ():
            if value is not None and not _holds(t.dtype, value):
                what = f"pad fills `{path}`, which is {t.dtype}, with {value!r:.40}"
                raise ArgumentError("OL401", what, fix=f"a number that {t.dtype} can hold")


@functools.lru_cache(1024)
def _holds(dtype: torch.dtype, value: Number) -> bool:
    """Return whether a tensor of this type can hold a number, except for rounding."""
    if dtype == torch.bool:
        return value in (0, 1)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # torch takes no others
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max


def _dims_of(t: Tensor, given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the given dimensions that a tensor has."""
    dims = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    return tuple(dim for dim in dims if dim < t.dim())


def _common(
    flat: Flat, stated: Sequence[object], dims: Sequence[tuple[int, ...]], name: str
) -> int:
    """Return the size that all arguments agree on."""
    named = [
        (path, t.shape[dim], given is not None)
        for path, t, own, given in zip(flat.paths, flat.tensors, dims, stated, strict=True)
        for dim in own
    ]
    if not named:
        fix = 'name the dimension of each argument: Buckets(..., dims={"x": 0})'
        raise ArgumentError("OL402", f"no argument has the bucketed {name}", fix=fix)
    lead = next((n for n in named if n[2]), None) or next((n for n in named if n[1] != 1), named[0])
    for path, size, given in named:
        if size != lead[1] and (given or size != 1):
            what = f"`{lead[0]}` has {lead[1]} rows and `{path}` {size}"
            fix = f'if it is not padded: Buckets(..., dims={{"{path}": None}})'
            raise ArgumentError("OL402", what, fix=fix)
    return lead[1]


def _stated(mapping: Mapping[Key, Any], path: str, names: Sequence[str]) -> Any:
    """Return the option for an argument, by path, position, parameter or keyword."""
    if not mapping:
        return None
    if path in mapping:
        return mapping[path]
    root, _, rest = path.partition("[")
    step = rest.partition("]")[0]
    if root == "kwargs":
        name = step.strip("'\"")
        if name in mapping:
            return mapping[name]
        return mapping.get(names.index(name)) if name in names else None
    position = int(step)
    if position in mapping:
        return mapping[position]
    return mapping.get(names[position]) if position < len(names) else None


def dense_stride(t: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of another shape, as an elementwise operation on `t`
    would. The order of its dimensions is that of `t`."""
    if t.is_contiguous():
        return contiguous_stride(shape)
    channels_last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
    return contiguous_stride(shape, [0, 2, 3, 1] if channels_last else _outer_first(t))


def _outer_first(t: Tensor) -> list[int]:
    """Return the dimensions in the order that an elementwise operation gives its result. An
    expanded dimension, of stride 0, keeps its place: `TensorIteratorBase::reorder_dimensions`,
    https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/TensorIterator.cpp"""
    order = list(reversed(range(t.dim())))
    for last in range(1, len(order)):
        place = last
        for i in reversed(range(last)):
            mine, other = order[place], order[i]
            if not t.stride(mine) or not t.stride(other):
                continue
            if t.stride(other) < t.stride(mine):
                break
            if t.stride(other) > t.stride(mine) or t.shape[other] > t.shape[mine]:
                order[i], order[place] = mine, other
                place = i
    return order[::-1]


def bucket_shape(t: Tensor, padded: PaddedDims, bucket: Sizes) -> list[int]:
    shape = list(t.shape)
    for dim, place in zip(padded.dims, padded.places, strict=True):
        shape[dim] = bucket[place]
    return shape


def pad(t: Tensor, padded: PaddedDims, bucket: Sizes) -> Tensor:
    """Return `t` with rows added up to the size of the bucket; `t` itself if it has that size. The
    result is new memory, dense in the order of the dimensions of `t`. Under autograd nothing flows
    back from the added rows."""
    shape = bucket_shape(t, padded, bucket)
    if shape == list(t.shape):
        return t
    if torch.is_grad_enabled() and t.requires_grad:
        return _appended(t, padded, bucket)
    with as_made(t), torch.no_grad():
        made = t.new_empty(0).new_empty_strided(shape, dense_stride(t, shape))
        grow(made, t, padded.dims, padded.fill)
    return made


def as_made(t: Tensor) -> AbstractContextManager[object]:
    """Return a context in which new tensors are inference tensors if `t` is one. A call of a
    bucket's own size then has the signature of padded calls."""
    inference = t.is_inference()
    same = torch.is_inference_mode_enabled() == inference
    return nullcontext() if same else torch.inference_mode(inference)


def _appended(t: Tensor, padded: PaddedDims, bucket: Sizes) -> Tensor:
    for dim, place, value in zip(padded.dims, padded.places, padded.fill, strict=True):
        size = bucket[place]
        if t.shape[dim] == size:
            continue
        row = t.detach().narrow(dim, t.shape[dim] - 1, 1)
        row = row if value is None else torch.full_like(row, value)
        shape = list(t.shape)
        shape[dim] = size - t.shape[dim]
        t = torch.cat([t, row.expand(shape)], dim)
    return t


def each_once(
    tensors: Sequence[Tensor],
    padded: Sequence[PaddedDims | None],
    change: Callable[[Tensor, PaddedDims | None], Tensor],
) -> list[Tensor]:
    """Return each tensor changed; a tensor that occurs twice is changed once."""
    made: dict[tuple[int, PaddedDims | None], Tensor] = {}
    for t, how in zip(tensors, padded, strict=True):
        if (id(t), how) not in made:
            made[id(t), how] = new = change(t, how)
            give_marks([new], [t])
    return [made[id(t), how] for t, how in zip(tensors, padded, strict=True)]


def resized(t: Tensor, padded: PaddedDims, sizes: Sizes) -> Tensor:
    """Return an example of another size: the rows of `t`, repeated from the first. Those that name
    rows name rows of that size."""
    shape = bucket_shape(t, padded, sizes)
    made = t.detach()
    for dim in padded.dims:
        rows = torch.arange(shape[dim], device=t.device) % max(t.shape[dim], 1)
        made = made.index_select(dim, rows)
    if padded.rows is not None:
        made = below(made, t, padded.dims[-1], sizes[padded.rows])
    with as_made(t), torch.no_grad():
        return made.new_empty(0).new_empty_strided(shape, dense_stride(t, shape)).copy_(made)


def below(made: Tensor, given: Tensor, dim: int, rows: int) -> Tensor:
    """Return indices below `rows`, ascending along `dim` if the given ones ascend."""
    made = made.remainder(rows)
    ascend = given.dim() > dim and bool((given.diff(dim=dim) >= 0).all())
    return made.sort(dim).values if ascend else made


def varying(t: Tensor, padded: PaddedDims) -> Varying | None:
    """Return how the driver must grow an argument to `t`; None if it cannot."""
    pairs = sorted(zip(padded.dims, padded.fill, strict=True), key=lambda pair: pair[0])
    values = {value for _, value in pairs if value is not None}
    if not t.is_contiguous() or len(pairs) > 2 or len(values) > 1 or t.itemsize > 8:
        return None
    dims, fill = zip(*pairs, strict=True)
    return Varying(tuple(t.shape), t.dtype, dims, fill)


@dataclass(slots=True)
class Proof:
    """The proven cut of results at a bucket's size to a real size."""

    follows: list[tuple[SizeLink, ...]] = field(default_factory=list)
    """The dimensions that follow the sizes, for each tensor of the result."""
    written: tuple[int, ...] = ()  # the padded arguments that the callable writes into
    tree: Tree | None = None  # the tree of the result
    hiding: Hiding | None = None
    """The numbers that hide padding, which each call checks; None if there are none."""
    masks: list[Tensor] = field(default_factory=list)
    """Tensors that the callable keeps, whose values were taken for constants."""
    lasting: str | None = None
    """A lasting trace of a call, which must not run twice; None if it leaves no trace."""


def cut_shape(shape: Sequence[int], follows: Sequence[SizeLink], sizes: Sizes) -> list[int]:
    found = list(shape)
    for f in follows:
        found[f.dim] = f.scale * sizes[f.place] + f.more
    return found


def cut(t: Tensor, follows: Sequence[SizeLink], sizes: Sizes) -> Tensor:
    """Return the real rows of a result, laid out as in eager; `t` itself if all are real."""
    shape = cut_shape(t.shape, follows, sizes)
    if shape == list(t.shape):
        return t
    made = t.new_empty(0).new_empty_strided(shape, dense_stride(t, shape))
    return made.copy_(first_rows(t, shape))
