"""`graph(f, buckets=..., capture="background")`: buckets captured while calls run.

Until its own bucket is recorded, a call runs at a larger one that is, or eagerly. The proof of a
bucket is of the sizes above the next smaller bucket. So the thread that captures proves, after a
capture, that the bucket serves smaller sizes, too, if no larger one does.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Hashable, Iterator
from typing import Any, ParamSpec, TypeVar

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat, unflatten
from onelaunch.capture.recording import Bucket
from onelaunch.errors import CaptureError, GraphError, let_go
from onelaunch.gc_pause import no_collection
from onelaunch.padding.bucketed import Bucketed, SizeCalls
from onelaunch.padding.pad import BucketedCall, bucketed_call
from onelaunch.padding.strategy import BucketStrategy, serves
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime.background import CapturesBeside
from onelaunch.runtime.candidate import Call, Candidate
from onelaunch.runtime.table import TableEntry
from onelaunch.sizes.buckets import Buckets, Sizes

P = ParamSpec("P")
R = TypeVar("R")


class BucketedBeside(CapturesBeside[P, R], Bucketed[P, R]):
    """A callable with buckets that is captured beside its calls."""

    def _chosen(self, flat: Flat) -> tuple[BucketedCall, Sizes] | None:
        """Return the sizes of a call, and its bucket; None if it has none."""
        try:
            call = bucketed_call(self._buckets, flat, self._names)
        except GraphError:  # the call itself says so
            return None
        bucket = self._buckets.choose(call.sizes)
        return None if bucket is None or 0 in call.sizes else (call, bucket)

    def served_alike(self, flat: Flat, spec: CallSpec) -> Hashable:
        """See `CapturesBeside.served_alike`: the calls of one bucket."""
        chosen = self._chosen(flat)
        if chosen is None:
            return spec
        kinds = tuple((t.dtype, t.device, len(t.shape)) for t in spec.tensors)
        return chosen[1], spec.tree, kinds, spec.modes

    def covers(self, key: Any, other: Any) -> bool:
        """See `CapturesBeside.covers`: a larger bucket serves smaller sizes, if that is proven."""
        if key == other or isinstance(key, CallSpec) or isinstance(other, CallSpec):
            return key == other
        return key[1:] == other[1:] and _is_larger(key[0], other[0])

    def is_served(self, flat: Flat, spec: CallSpec) -> bool:
        """See `CapturesBeside.is_served`: other sizes than those of past calls are yet to be
        tried."""
        chosen = self._chosen(flat)
        return chosen is not None and any(
            serves(entry, chosen[1]) and entry.captured.guard.check()
            for entry in self._table.entries
        )

    def _beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        chosen = self._chosen(self._signatures.flat(args, kwargs))
        if chosen is not None:
            self._count(chosen[0].sizes).made += 1
        return super()._beside(args, kwargs)

    def at_own(self, call: Call) -> R | Miss:
        """See `CapturesBeside.at_own`: these sizes may be new to a bucket that is recorded."""
        chosen = self._chosen(call.flat)
        result = MISS if chosen is None else self._at_own(*chosen, call.args, call.kwargs)
        if chosen is not None and result is not MISS:
            self._count(chosen[0].sizes).made += 1
        return result

    # At a larger bucket.

    def _larger(self, bucket: Sizes) -> Iterator[tuple[TableEntry, Bucket]]:
        """Yield the recordings of larger buckets, the smallest first."""
        every = [(e, b) for e in self._table.entries if (b := e.captured.bucket)]
        found = [(e, b) for e, b in every if _is_larger(b.sizes, bucket)]
        yield from sorted(found, key=lambda pair: math.prod(pair[1].sizes))

    def has_larger(self, flat: Flat) -> bool:
        """See `CapturesBeside.has_larger`."""
        chosen = self._chosen(flat)
        return chosen is not None and any(b.below for _, b in self._larger(chosen[1]))

    def at_larger(self, call: Call) -> R | Miss:
        """Make a call at the smallest larger bucket that serves it; see
        `CapturesBeside.at_larger`."""
        chosen, index = self._chosen(call.flat), self._table.index
        if chosen is None:
            return MISS
        sized, bucket = chosen
        for _, larger in self._larger(bucket):
            result = MISS if larger.below is None else larger.below(call.args, call.kwargs)
            if result is MISS:
                continue
            key = sized.sizes, larger.sizes
            counted = self._counts_at_larger.setdefault(key, SizeCalls())
            counted.made += 1
            alone = not self._paths(bucket)  # else of another signature
            if alone and larger.below is not None:
                self._fill(index, sized, counted, [larger.below])
            return result
        return MISS

    def widen(self, example: Flat) -> None:
        """Prove that the smallest bucket at which the example can run serves calls of smaller
        buckets, if some of these are not recorded."""
        chosen = self._chosen(example)
        if chosen is None or self._ranks.several:
            return
        bucket = chosen[1]
        own = [
            (e, b) for e in self._table.entries if (b := e.captured.bucket) and b.sizes == bucket
        ]
        fitting = [*own, *self._larger(bucket)]
        if any(made.below is not None for _, made in fitting):
            return
        for entry, made in fitting:
            if not made.tried and self._is_wanted(made.sizes) and _is_free(entry):
                made.tried = True
                self._widen(entry, made, example)
            if made.below is not None:
                return

    def _is_wanted(self, bucket: Sizes) -> bool:
        """Return whether a smaller bucket is not recorded."""
        recorded = {b.sizes for e in self._table.entries if (b := e.captured.bucket)}
        return any(
            other not in recorded and _is_larger(bucket, other)
            for other in self._buckets.largest_first()
        )

    @no_collection()
    def _widen(self, entry: TableEntry, made: Bucket, example: Flat) -> None:
        """Prove that padding from all sizes changes no result; or, as size 1 is often special, from
        all but the smallest bucket's."""
        args, kwargs = unflatten(example.tree, example.tensors)
        given = self._call(args, kwargs, example)
        assert made.exact is not None
        for above in (False, True):
            buckets = _up_to(self._buckets, made.sizes, above)
            smaller = (b for b in self._buckets.largest_first() if b != made.sizes)
            if not any(buckets.choose(self._buckets.most(b)) == made.sizes for b in smaller):
                return
            try:
                call = bucketed_call(buckets, example, self._names)
                strategy = BucketStrategy(self, call, made.sizes, buckets)
                reached = self._callee.reached(example)
                padded = given._replace(strategy=strategy)
                candidate = Candidate(*padded, entry.spec, entry.status, reached, ahead=True)
                made.below = strategy.proven_around(made.exact, candidate)
                return
            except CaptureError as error:
                let_go(error)
                if error.code != "OL140":
                    return


def _is_larger(one: Sizes, other: Sizes) -> bool:
    """Return whether a bucket is as large as another in every dimension, and larger in one."""
    return one != other and all(map(operator.ge, one, other))


def _up_to(buckets: Buckets, bucket: Sizes, above: bool) -> Buckets:
    """Return buckets with one of them alone, for all sizes up to it. `above`: leave the sizes of
    the smallest bucket out."""
    made = copy.copy(buckets)
    known = zip(buckets.sizes, bucket, strict=True)
    sizes = tuple((s[0], b) if above and s[0] < b else (b,) for s, b in known)
    object.__setattr__(made, "sizes", sizes)
    return made


def _is_free(entry: TableEntry) -> bool:
    """Return whether a recording changes nothing, draws nothing, and needs no check of values."""
    captured = entry.captured
    checked = captured.bucket is not None and captured.bucket.checked
    return captured.pair is None and not checked and not captured.has_effects()
