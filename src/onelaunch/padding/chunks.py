"""A call above the largest bucket, in chunks of that size, and the proof that it may be cut so."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.tree import Flat, is_plain, unflatten
from onelaunch.capture.callee import Callee
from onelaunch.driver.distance import close, is_inexact
from onelaunch.errors import CaptureError
from onelaunch.padding.dry_run import DryRun
from onelaunch.padding.pad import BucketedCall, Proof
from onelaunch.padding.proof import CallFails, Proving
from onelaunch.padding.samples import Samples
from onelaunch.padding.taint.mode import TaintMode
from onelaunch.padding.taint.trace import Trace
from onelaunch.sizes.buckets import Buckets, Sizes
from onelaunch.sizes.dims import PaddedDims, SizeLink
from onelaunch.state.guard import StateGuard
from onelaunch.state.slots import MISSING

_ELSE = 'overflow="eager", or a larger bucket'
_BY_ITSELF = 'compute each row by itself; or leave out `overflow="chunk"` and the batcher'


class ChunkProofs:
    """The proofs that calls may be cut into chunks, and the refusals, as long as the state is so.
    Each has a key of its caller's. `failures`: whether to keep the refusal of a callable that
    fails. Another call may bring values that it takes."""

    def __init__(self, buckets: Buckets, callee: Callee, failures: bool) -> None:
        self._buckets = buckets
        self._callee = callee
        self._failures = failures
        self.kept: dict[Hashable, tuple[StateGuard, Proof | CaptureError]] = {}

    def of(self, key: Hashable, call: BucketedCall, place: int) -> Proof | CaptureError:
        """Return the proof that calls may be cut along bucketed dimension `place`, or the refusal.
        It is found once for each state."""
        guard, found = self.kept.get(key, (None, None))
        if found is not None and guard is not None and guard.check():
            return found
        flat = call.flat
        driver, device = self._callee.driver_and_device(flat)
        with driver.exclusive():
            reached = self._callee.reached(flat)
            # Of the flags and numbers on which the callable may branch.
            state = reached.walk()
            held = [
                (slot, value) for slot, value in state.all_slots.values() if state.is_read(slot)
            ]
            guard = StateGuard([pair for pair in held if is_plain(pair[1])], [])
            dry_run = DryRun(driver, device, self._callee.eager_form, reached, flat.tree)
            try:
                chunking = _Chunking(dry_run, self._buckets, call, self._buckets.largest)
                found = chunking.proven_along(place)
            except CaptureError as error:
                if isinstance(error, CallFails) and not self._failures:
                    return error
                found = copy.copy(error)  # without the frames, which hold tensors
        self.kept[key] = guard, found
        return found


def chunks(
    call: BucketedCall, place: int, step: int
) -> Iterator[tuple[Sizes, tuple[Any, ...], dict[str, Any]]]:
    """Return the sizes, arguments and keyword arguments of each chunk: `step` rows, or the rest.
    Their tensors are views."""
    size = call.sizes[place]
    for start in range(0, size, step):
        count = min(step, size - start)

        def rows(
            t: Tensor, how: PaddedDims | None, start: int = start, count: int = count
        ) -> Tensor:
            dim = None if how is None else how.dim_of(place)
            return t if dim is None else t.narrow(dim, start, count)

        args, kwargs = unflatten(call.flat.tree, call.each(rows))
        yield (*call.sizes[:place], count, *call.sizes[place + 1 :]), args, kwargs


def joined(parts: Sequence[Flat], proof: Proof, place: int) -> Any:
    """Return the results of all chunks as one; its tensors are new memory."""
    whole: list[Tensor] = []
    made: dict[tuple[int, ...], Tensor] = {}  # a tensor may be in several places
    for number, follows in enumerate(proof.follows):
        dim = next(f.dim for f in follows if f.place == place)
        rows = [part.tensors[number] for part in parts]
        key = tuple(map(id, rows))
        made[key] = made[key] if key in made else torch.cat(rows, dim)
        whole.append(made[key])
    return unflatten(parts[0].tree, whole)


class _Chunking(Proving):
    """The proof that a call may be cut into chunks of the largest bucket. Rows before a cut must
    not depend on rows behind it, which padding shows, nor the reverse."""

    def proven_along(self, place: int) -> Proof:
        """Prove it along the bucketed dimension number `place`. Raises `CaptureError`: OL140,
        naming the operation, its line and the result."""
        for path, how in zip(self.call.flat.paths, self.call.padded, strict=True):
            if how is not None and how.places.count(place) > 1:
                what = f"`{path}` has rows and columns, which cannot be cut into chunks"
                raise CaptureError("OL140", what, fix=_ELSE)
        proof = self.prove()
        if not proof.follows:  # a single bucket with a single size
            proof.follows = self.unpadded()
        for number, follows in enumerate(proof.follows):
            if not any((f.place, f.scale, f.more) == (place, 1, 0) for f in follows):
                what = f"result {number} has no rows of its own for each piece"
                raise CaptureError("OL140", what, fix=_ELSE)
        self.check_chunks(proof, place)
        return proof

    def unpadded(self) -> list[tuple[SizeLink, ...]]:
        """Return the dimensions that follow the sizes, for a bucket that needs no padding."""
        sizes = [self.bucket]
        sizes += [
            tuple(b + (i == place) for i, b in enumerate(self.bucket))
            for place in range(len(self.bucket))
        ]
        for each in sizes:
            self.results[each] = self.real(each, None)
        shapes = {s: [t.shape for t in r.tensors] for s, r in self.results.items()}
        count = len(self.results[self.bucket].tensors)
        return [self.found(i, {s: each[i] for s, each in shapes.items()}) for i in range(count)]

    def check_chunks(self, proof: Proof, place: int) -> None:
        """Refuse if rows depend on earlier rows, or an operation would run once for each chunk."""
        size = max(self.bucket[place], 2)
        half = size // 2
        trace = Trace()
        whole = tuple(size if i == place else b for i, b in enumerate(self.bucket))
        rest = tuple(size - half if i == place else b for i, b in enumerate(self.bucket))
        self.real(rest, trace)
        changed = next((c for c in self.dry_run.found if c.before not in (MISSING, None)), None)
        if changed is not None:
            what = f"the callable changes `{changed.slot.name}`, which it would do for each chunk"
            raise CaptureError("OL140", what, fix=_ELSE)
        inputs = self.inputs(whole)
        self.on, self.fix = "the rows before", _BY_ITSELF
        taint = TaintMode(self.dry_run.device, trace.steps, front=True)
        for t, dim in zip(inputs, self.call.along(place), strict=True):
            if dim is None:
                taint.vary(t)
                continue
            before = torch.zeros(t.shape, dtype=torch.bool, device="cpu")
            before.narrow(dim, 0, half).fill_(True)
            taint.mark(t, before, torch.ones_like(before))
        result = self.real(whole, taint, inputs)
        repeated = taint.changed() or taint.random
        if repeated is not None:
            raise self.refusal("the callable", repeated, "being cut into chunks")
        if self.buckets.independent:
            return
        self.check_run(taint, inputs, whole)
        if taint.hiding:
            what = "a number hides the rows of one chunk from another's"
            raise CaptureError("OL140", what, fix="-inf in its place")
        for number, t in enumerate(result.tensors):
            dim = next(f.dim for f in proof.follows[number] if f.place == place)
            if taint.depends(t, (*[slice(None)] * dim, slice(half, None))):
                raise self.refusal(f"result {number}", taint.blame(t))
        self._check_places(proof, place, whole, half)

    def _check_places(self, proof: Proof, place: int, whole: Sizes, half: int) -> None:
        """Refuse if rows depend on the number of rows before, as by a table of positions."""
        count = whole[place] - half
        inputs = Samples(self.call, whole, random=True).real(whole)
        dims = zip(inputs, self.call.along(place), strict=True)
        behind = [(t if dim is None else t.narrow(dim, half, count)).clone() for t, dim in dims]
        try:
            alone, result = (self.real(whole, Trace(True), each) for each in (behind, inputs))
        except CallFails:
            return  # it does not take random numbers
        for number, (small, t) in enumerate(zip(alone.tensors, result.tensors, strict=True)):
            dim = next(f.dim for f in proof.follows[number] if f.place == place)
            rows = t.narrow(dim, half, count)
            if rows.shape != small.shape or (is_inexact(t) and not close(rows, small)):
                what = f"rows of result {number} depend on how many are before them"
                raise CaptureError("OL140", what, fix=_ELSE)
