"""The call path of a bucket's recording: arguments are padded before, results cut after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onelaunch.call.identity import Identities
from onelaunch.call.spec import has_strides
from onelaunch.call.tree import Flat, Tree, flatten, flatten_call, unflatten, unique
from onelaunch.driver.overlaps import Overlaps
from onelaunch.driver.rows import first_rows
from onelaunch.driver.select import select
from onelaunch.errors import CaptureError, GraphError
from onelaunch.padding.compare import moved_view
from onelaunch.padding.pad import PaddedDims, Proof, Request, cut, padded, request
from onelaunch.replay.call_path import MISS, CallPath
from onelaunch.sizes.buckets import Buckets, Sizes


@dataclass(slots=True, eq=False)
class PaddedCall:
    """The call path of a bucket: it pads the arguments, runs, and returns the real rows."""

    _exact: CallPath
    _buckets: Buckets
    _names: Sequence[str]
    _padded: tuple[PaddedDims | None, ...]
    _tree: Tree
    _bucket: Sizes
    _proof: Proof

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat = flatten_call(args, kwargs)
        if flat.tree != self._tree:
            return MISS
        try:
            call = request(self._buckets, flat, self._names)
        except GraphError:
            return MISS
        if call.padded != self._padded or self._buckets.choose(call.sizes) != self._bucket:
            return MISS
        grown = padded(call, flat, self._bucket).tensors
        some, named = unflatten(flat.tree, list(grown))
        result = self._exact(some, named)
        if result is MISS or call.sizes == self._bucket:
            return result
        refuse_shared(self._proof, flat)
        for index in self._proof.written:
            real = flat.tensors[index]
            real.copy_(first_rows(grown[index], real.shape))
        return self._cut(result, call.sizes, flat.tensors, grown)

    def _cut(
        self, result: Any, sizes: Sizes, given: Sequence[Tensor], grown: Sequence[Tensor]
    ) -> Any:
        parts = flatten(result, "result", objects=True, number=Identities().note)
        real = {id(g): t for g, t in zip(grown, given, strict=True)}
        copies = {
            g.untyped_storage()._cdata: (g, t)
            for g, t in zip(grown, given, strict=True)
            if g is not t and has_strides(g)
        }
        for number, (t, follows) in enumerate(zip(parts.tensors, self._proof.follows, strict=True)):
            if id(t) in real:  # a tensor may be in several places
                continue
            fixed = not follows and has_strides(t)  # a view that follows the size is refused
            copied = copies.get(t.untyped_storage()._cdata) if fixed else None
            real[id(t)] = cut(t, follows, sizes) if copied is None else _view(number, t, *copied)
        return unflatten(parts.tree, [real[id(t)] for t in parts.tensors])


def _view(number: int, t: Tensor, copy: Tensor, real: Tensor) -> Tensor:
    """Return the view of an argument in place of the same view of its padded copy.

    Raises:
        CaptureError: OL140, the argument and its copy have different layouts.
    """
    if copy.stride() != real.stride():
        raise moved_view(number)
    offset = t.storage_offset() - copy.storage_offset() + real.storage_offset()
    return real.as_strided(t.shape, t.stride(), offset)


def refuse_shared(proof: Proof, flat: Flat) -> None:
    """Refuse written arguments that share memory: their padded copies would share none."""
    if not proof.written:
        return
    driver, _ = select(flat.tensors)
    shared = Overlaps(driver)(*unique(flat.tensors))
    if shared:
        what = f"`{flat.paths[shared[0][0]]}` is written, and shares memory with another argument"
        raise CaptureError("OL140", what, fix="pass a `.clone()`")


def unread(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes:
    """Raise `LookupError`; stands in for `reader` before the first call."""
    raise LookupError("no call was seen yet")


def reader(call: Request, flat: Flat) -> Callable[..., Sizes]:
    """Return a function that reads the sizes of a call of the same form, 0.1 us each."""
    found: list[str] = []
    for place in range(len(call.sizes)):
        for path, how in zip(flat.paths, call.padded, strict=True):
            dim = None if how is None else how.dim_of(place)
            if dim is not None:
                found.append(f"{path}.shape[{dim}]")
                break
    names: dict[str, Any] = {}
    exec(f"def read(args, kwargs): return ({', '.join(found)},)", names)
    return names["read"]
