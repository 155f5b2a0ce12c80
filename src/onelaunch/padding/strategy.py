"""The recording of a call at its bucket's size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from onelaunch.call.spec import CallSpec, has_strides
from onelaunch.capture.recording import Bucket, CapturedCall
from onelaunch.driver.overlaps import Overlaps
from onelaunch.errors import CaptureError
from onelaunch.padding.attention import CUDNNS, with_infinite_masks
from onelaunch.padding.dry_run import DryRun
from onelaunch.padding.named_rows import naming
from onelaunch.padding.pad import BucketedCall, Proof, varying
from onelaunch.padding.padded_call import (
    MASKS,
    SCORES,
    CheckedRun,
    PaddedCall,
    checked,
    refuse_shared,
    refuse_unchecked,
    steady,
)
from onelaunch.padding.proof import Proving
from onelaunch.replay.call_path import CallPath
from onelaunch.runtime.candidate import Candidate, E, Strategy
from onelaunch.sizes.buckets import Buckets, Sizes
from onelaunch.sizes.dims import PaddedDims, Varying

if TYPE_CHECKING:
    from onelaunch.padding.bucketed import Bucketed


class BucketStrategy(Strategy):
    """The way to record a padded call: at its bucket's size, once this is proven to change no
    result. `buckets`: default the buckets of `of`; for others nothing is proven yet."""

    def __init__(
        self,
        of: Bucketed[..., Any],
        call: BucketedCall,
        bucket: Sizes,
        buckets: Buckets | None = None,
    ) -> None:
        self._of, self._call, self._flat = of, call, call.flat
        self._buckets = of._buckets if buckets is None else buckets
        self._known = of._known if buckets is None else {}
        self.bucket = bucket
        self.padded = call.grown(bucket)
        self._least = self._buckets.smallest(bucket)
        self._proof = Proof()
        self._proven = False
        self._infinite_masks = of.infinite_masks
        """True if runs at the bucket's size leave boolean masks to kernels with minus infinity."""

    def mismatching(self, entries: Sequence[E]) -> Sequence[E]:
        return [entry for entry in entries if serves(entry, self.bucket)]

    def rehearse(self, candidate: Candidate, warm: Callable[[], None]) -> None:
        """Warm up by the runs of the proof, if they show all facts of a warm-up."""
        options, exact = self._of.options, self._least == self.bucket  # exact needs no proof
        if exact or self._of._pool.max_bytes or options.compile or torch.is_grad_enabled():
            warm()
            return
        self._learn(candidate)
        candidate.status.threads.add(get_ident())

    def prepare(self, candidate: Candidate) -> None:
        """Prove that padding changes no result, and choose the arguments that vary."""
        if not self._proven:
            self._learn(candidate)
        refuse_shared(self._proof, self._flat)
        # Autograd has to see the padding and the cut: its node has the bucket's size.
        self._set_varying({} if candidate.status.has_backward else self._grown_inside(candidate))

    def pad_outside(self) -> None:
        self._set_varying({})

    def call_path(self, captured: CapturedCall, spec: CallSpec, label: str) -> CallPath:
        places = {index: _places(self._call.padded[index]) for index in self.varying}
        captured.bucket = made = Bucket(self.bucket, self._least, places)
        made.exact = call = super().call_path(captured, spec, label)
        made.checked = self._proof.hiding is not None
        if self._least == self.bucket:
            return call
        around, checked = self._around(call), self._checked
        made.around = checked(around) if self.varying else None
        return checked(call if self.varying else around)

    def _around(self, exact: CallPath) -> PaddedCall:
        of, how, tree = self._of, self._call.padded, self._flat.tree
        return PaddedCall(exact, self._buckets, of._names, how, tree, self.bucket, self._proof)

    def proven_around(self, exact: CallPath, candidate: Candidate) -> CallPath:
        """Return the call path around a recording that was made for other sizes of the bucket.
        Raises `CaptureError`: OL140, padding would change a result, or each call would check
        values."""
        known = candidate.reached.reads
        self._prove(candidate)
        if self._proof.hiding is not None:
            raise CaptureError("OL140", "the recording checks no number that hides padding")
        if candidate.reached.reads is not known:
            raise CaptureError("OL140", "the recording does not check all that other sizes read")
        return self._checked(self._around(exact))

    def captured(self, fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        hiding, fn = self._proof.hiding, self._padded_form(fn)
        return fn if hiding is None else CheckedRun(fn, hiding, device)

    def _checked(self, call: CallPath) -> CallPath:
        fell_back = self._of._fell_back
        if self._proof.hiding is not None:
            call = checked(call, functools.partial(fell_back, SCORES))
        if self._proof.masks:
            call = steady(call, self._proof.masks, functools.partial(fell_back, MASKS))
        return naming(call, self._call)

    def _set_varying(self, arguments: dict[int, Varying]) -> None:
        self.varying = arguments
        self.follows = self._proof.follows if arguments else ()

    def _learn(self, candidate: Candidate) -> None:
        """Prove, and have the recording guard what the proof has read at any size."""
        known, entries = self._known, self._of._table.entries
        for key, found in list(known.items()):  # in a state that is gone
            if not any(serves(e, found.bucket) and e.captured.guard.check() for e in entries):
                del known[key]
        self._prove(candidate)
        self._of._callee.reads = candidate.reached.reads

    def _prove(self, candidate: Candidate) -> None:
        """Prove that padding changes no result. Where only a number of cuDNN's attention hides it,
        which each call would have to check, other kernels are tried."""
        compiled = self._of._callee.is_compiled(candidate.driver)
        self._infinite_masks &= not compiled
        proof, layouts = self._proof_of(candidate)
        finite = proof.hiding is not None and proof.hiding.number in CUDNNS
        if finite and not (self._infinite_masks or compiled):
            self._infinite_masks = True
            other, same = self._proof_of(candidate)
            self._infinite_masks = other.hiding is None and same == layouts
            self._of.infinite_masks = self._infinite_masks
            proof = other if self._infinite_masks else proof
        self._proof, self._proven = proof, True
        if self._infinite_masks:
            candidate.status.ledger = None  # the operations of other kernels
        if proof.hiding is not None:
            refuse_unchecked(proof, compiled)
            self._proof = replace(proof, follows=[*proof.follows, ()])  # the check

    def _padded_form(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return with_infinite_masks(fn) if self._infinite_masks else fn

    def _proof_of(self, candidate: Candidate) -> tuple[Proof, list[tuple[int, ...]]]:
        """Return a proof, and the strides of the results in its runs."""
        fn = self._padded_form(self._of._callee.eager_form)
        driver, device, reached = candidate.driver, candidate.device, candidate.reached
        dry_run = DryRun(driver, device, fn, reached, self._flat.tree, candidate.ahead)
        proving = Proving(dry_run, self._buckets, self._call, self.bucket, self._known)
        proof = proving.proven(candidate.status.has_backward)
        results = (result for _, result in sorted(proving.results.items()))
        return proof, [t.stride() for result in results for t in result.tensors if has_strides(t)]

    def _grown_inside(self, candidate: Candidate) -> dict[int, Varying]:
        """Return how the recording takes each padded argument from the caller's memory. Empty if it
        cannot: torch's operations then pad before the launch."""
        driver, device, tensors = candidate.driver, candidate.device, self.padded.tensors
        wanted = {
            index: varying(t, how)
            for index, (t, how) in enumerate(zip(tensors, self._call.padded, strict=True))
            if how is not None
        }
        fitting = {index: v for index, v in wanted.items() if v is not None}
        if (
            len(fitting) < len(wanted)
            or not all(self._flat.tensors[index].is_contiguous() for index in wanted)
            or self._least == self.bucket
            or self._proof.written
            or self._of.options.inputs == "rebind"
            or any(t.requires_grad for t in tensors)
            or Overlaps(driver)(*(t for t in tensors if t.device.type == device.type))
            or not driver.varies(device)
        ):
            return {}
        return fitting


def serves(entry: Any, bucket: Sizes) -> bool:
    served = entry.captured.bucket
    return served is not None and served.sizes == bucket


def _places(how: PaddedDims | None) -> tuple[int, ...]:
    """Return the bucketed dimensions that an argument's dimensions follow, in its order."""
    assert how is not None
    return tuple(place for _, place in sorted(zip(how.dims, how.places, strict=True)))
