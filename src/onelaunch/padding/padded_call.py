"""The call paths of a bucket's recording.

Arguments are padded before, results cut after. Where the bucket's proof rests on values, each call
checks these: masks that the callable keeps, or numbers that hide padding. The recording then has
one result more, which says whether the numbers suffice; see `taint/hidden.py`. The host waits for
it, and runs the call eagerly otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.identity import Identities
from onelaunch.call.spec import has_strides
from onelaunch.call.tree import Flat, Tree, flatten, flatten_call, unflatten, unique
from onelaunch.driver.overlaps import Overlaps
from onelaunch.driver.rows import first_rows
from onelaunch.driver.select import select
from onelaunch.errors import CaptureError, GraphError
from onelaunch.padding.attention import CUDNNS
from onelaunch.padding.compare import moved_view
from onelaunch.padding.pad import BucketedCall, PaddedDims, Proof, bucketed_call, cut
from onelaunch.padding.taint.hidden import Hiding, HidingChecks
from onelaunch.padding.taint.shadow import storage_of
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
            call = bucketed_call(self._buckets, flat, self._names)
        except GraphError:
            return MISS
        if call.padded != self._padded or self._buckets.choose(call.sizes) != self._bucket:
            return MISS
        grown = call.grown(self._bucket).tensors
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
            storage_of(g): (g, t)
            for g, t in zip(grown, given, strict=True)
            if g is not t and has_strides(g)
        }
        for number, (t, follows) in enumerate(zip(parts.tensors, self._proof.follows, strict=True)):
            if id(t) in real:  # a tensor may be in several places
                continue
            fixed = not follows and has_strides(t)  # a view that follows the size is refused
            copied = copies.get(storage_of(t)) if fixed else None
            real[id(t)] = cut(t, follows, sizes) if copied is None else _view(number, t, *copied)
        return unflatten(parts.tree, [real[id(t)] for t in parts.tensors])


def _view(number: int, t: Tensor, copy: Tensor, real: Tensor) -> Tensor:
    """Return the view of an argument in place of the same view of its padded copy. Raises
    `CaptureError`: OL140, the argument and its copy have different layouts."""
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


def reader(call: BucketedCall) -> Callable[..., Sizes]:
    """Return a function that reads the sizes of a call of the same form, 0.1 us each."""
    sizes = ", ".join(map(call.size_text, range(len(call.sizes))))
    return eval(f"lambda args, kwargs: ({sizes},)")


SCORES = (
    "a score of `{}` is not far above the number that hides padding",
    'mask with float("-inf"); such calls run eagerly',
)
MASKS = (
    "a mask that `{}` keeps was changed in place since its bucket was recorded",
    "`reset()` after such a change, or pass the mask; such calls run eagerly",
)
"""The event, with a place for the name of the callable, and the code to write instead."""
_FIX = 'mask with float("-inf"), which needs no check'
_WITHOUT_CUDNN = (
    "torch.backends.cuda.enable_cudnn_sdp(False) before the first call: only cuDNN's attention "
    "applies a boolean mask by this number"
)


def refuse_unchecked(proof: Proof, compiled: bool) -> None:
    """Refuse a proof that rests on numbers that hide padding, where no call can check them."""
    assert proof.hiding is not None
    if not (compiled or proof.lasting):
        return
    what = f"a number, {proof.hiding.shown}, hides padding, as far as scores are above it"
    why = f"a call where they are not would run again, and it {proof.lasting}"
    why = "no operation of compiled code can be checked" if compiled else why
    fix = _WITHOUT_CUDNN if proof.hiding.number in CUDNNS else _FIX
    raise CaptureError("OL140", what, why=why, fix=fix)


class CheckedRun:
    """A callable for a capture, with a second result: a 0-dim bool, whether the numbers suffice."""

    def __init__(self, fn: Callable[..., Any], hiding: Hiding, device: torch.device) -> None:
        self._fn, self._hiding, self._device = fn, hiding, device

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        with HidingChecks(self._hiding) as checks:
            result = self._fn(*args, **kwargs)
            holds = checks.outcome(self._device)
        if not checks.complete:
            what = f"a number, {self._hiding.shown}, hides padding by other operations than in the"
            raise CaptureError("OL140", f"{what} runs of the proof", fix=_FIX)
        return result, holds


def steady(call: CallPath, masks: Sequence[Tensor], otherwise: CallPath) -> CallPath:
    """Return the call path where a proof took masks of the callable for constants. `otherwise`: the
    path after a mask was changed in place."""
    known = [(t, t._version, t.detach().clone()) for t in masks if not t.is_inference()]

    def path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for number, (t, version, values) in enumerate(known):
            if t._version != version:
                if not torch.equal(t, values):
                    return otherwise(args, kwargs)
                known[number] = (t, t._version, values)
        return call(args, kwargs)

    return path


def checked(call: CallPath, otherwise: CallPath) -> CallPath:
    """Return the call path of a recording with a check, for which it waits. `call`: returns the
    result and the check. `otherwise`: the path where the check fails."""

    def path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = call(args, kwargs)
        if found is MISS:
            return MISS
        result, holds = found
        return result if bool(holds) else otherwise(args, kwargs)

    return path
