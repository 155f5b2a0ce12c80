"""`graph(f, buckets=...)`: one recording for each bucket, for calls of all sizes."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakSet

from onelaunch.call.ambient import runs_inline
from onelaunch.call.identity import Identities
from onelaunch.call.tree import Flat, flatten, flatten_call, unflatten
from onelaunch.errors import ArgumentError, GraphError, ReplayError
from onelaunch.padding.chunks import ChunkProofs, chunks, joined
from onelaunch.padding.compare import Known
from onelaunch.padding.joined_calls import JoinedCalls
from onelaunch.padding.pad import BucketedCall, Proof, bucketed_call, check_named, parameters
from onelaunch.padding.padded_call import reader
from onelaunch.padding.strategy import BucketStrategy, serves
from onelaunch.replay.call_path import MISS, CallPath, Miss
from onelaunch.runtime.candidate import Call
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.options import Options
from onelaunch.runtime.signature import spec_of
from onelaunch.runtime.stats import GraphStats
from onelaunch.sizes.buckets import Buckets, Sizes, histogram, rows, shown
from onelaunch.sizes.ragged import Ragged

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class SizeCalls:
    """The number of calls of one size: callers' calls, and chunks of larger calls."""

    made: int = 0
    chunks: int = 0


class Bucketed(Graphed[P, R]):
    """A callable with one recording for each bucket of sizes. Made by `graph`. A call runs at the
    smallest bucket that holds it. Its arguments are padded to that size, and the real rows of its
    results are returned. The first calls of a bucket run eagerly at their own size."""

    def __init__(self, fn: Callable[P, R], options: Options, *rest: Any, **named: Any) -> None:
        assert options.buckets is not None
        count = math.prod(map(len, options.buckets.sizes))
        most = max(options.max_recordings, count)
        super().__init__(fn, replace(options, max_recordings=most), *rest, **named)
        self._buckets: Buckets = options.buckets
        check_named(self._buckets, fn, self._name)
        self._names = parameters(fn)
        self._counts_by_size: dict[Sizes, SizeCalls] = {}
        self._counts_at_larger: dict[tuple[Sizes, Sizes], SizeCalls] = {}
        self._read_sizes: Callable[..., Sizes] = lambda *_: ()  # until `index` is filled
        self._raises = options.on_refusal == "raise"
        self._chunks = ChunkProofs(self._buckets, self._callee, failures=True)
        self._most_chunked = 4 * most
        self._batchers = WeakSet()
        self._known: Known = {}  # the findings of the proofs so far
        self.infinite_masks = False
        """True if boolean masks of padded runs are left to kernels with minus infinity."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if runs_inline(self):
            return self.fn(*args, **kwargs)
        try:
            sizes = self._read_sizes(args, kwargs)
            known = self._table.index.get(sizes) or self._indexed(sizes)
        except (LookupError, AttributeError, TypeError):  # arguments of another form
            known = None
        if known is not None:
            counted, paths = known
            for call in paths:
                result = call(args, kwargs)
                if result is not MISS:
                    counted.made += 1
                    return result
        return self._miss(args, kwargs)

    def _recorded_or_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        flat = flatten_call(args, kwargs)
        given = self._call(args, kwargs, flat)
        if self._table.unserved.is_unrecordable(given):
            return self._run_whole_eagerly(given)
        try:
            call = bucketed_call(self._buckets, flat, self._names)
        except GraphError as error:
            if self._raises or error.code != "OL402":
                raise
            return self._unbucketed(error, given)
        self._count(call.sizes).made += 1
        bucket = self._buckets.choose(call.sizes)
        if 0 in call.sizes:
            self._table.counts.ran_eagerly("empty")
            return self._run_whole_eagerly(given)
        if bucket is None:
            return self._above(given, call)
        with given.driver.exclusive():
            result = self._at_own(call, bucket, args, kwargs)  # recorded in the meantime?
            if result is not MISS:
                return result
            strategy = BucketStrategy(self, call, bucket)
            padded_call = given._replace(flat=strategy.padded, strategy=strategy)
            result = self._warm_up_or_capture(padded_call)
            if result is MISS:
                self._begin_eager_run()
        return self._run_eagerly(args, kwargs) if result is MISS else result

    def _at_own(
        self, call: BucketedCall, bucket: Sizes, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> R | Miss:
        """Make a call by a recording of its bucket, indexed from now on; `MISS` if none fits."""
        paths = self._paths(bucket)
        for path in paths:
            result = path(args, kwargs)
            if result is not MISS:
                self._fill(self._table.index, call, self._count(call.sizes), paths)
                self._table.index[(bucket,)] = paths
                return result
        return MISS

    def _indexed(self, sizes: Sizes) -> tuple[SizeCalls, list[CallPath]] | None:
        """Index the recordings of a bucket for sizes that are new to it; None if none are known."""
        index = self._table.index
        bucket = self._buckets.choose(sizes) if index and 0 not in sizes else None
        paths = None if bucket is None else index.get((bucket,))
        if paths is None:
            return None
        index[sizes] = known = self._count(sizes), paths
        return known

    def _fell_back(
        self, said: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call eagerly, since a check of its values failed; count and tell that."""
        self._table.counts.ran_eagerly("OL140")
        what, fix = said
        self._notices.warn("OL140", what.format(self._name), what, fix)
        return self._callee.fn(*args, **kwargs)

    def _count(self, sizes: Sizes) -> SizeCalls:
        return self._counts_by_size.setdefault(sizes, SizeCalls())

    def _fill(
        self, index: dict[Any, Any], call: BucketedCall, counted: SizeCalls, paths: list[CallPath]
    ) -> None:
        """Index recordings for calls of these sizes, which then need no flattening."""
        if not index:
            self._read_sizes = reader(call)
        index[call.sizes] = counted, paths

    def _paths(self, bucket: Sizes) -> list[CallPath]:
        """Return the call paths of a bucket's recordings, those that pad in the launch first."""
        entries = [e for e in self._table.entries if serves(e, bucket)]
        around = [e.captured.bucket.around for e in entries if e.captured.bucket is not None]
        return [*(e.call for e in entries), *(call for call in around if call is not None)]

    def _above(self, given: Call, call: BucketedCall) -> R:
        """Run or refuse a call above the largest bucket, as `overflow` says."""
        size, largest = shown(call.sizes), shown(self._buckets.largest)
        what = f"`{self._name}` was called with size {size}, above {largest}"
        if self._buckets.overflow == "raise":
            raise ReplayError("OL210", what)
        places = [
            i
            for i, (n, b) in enumerate(zip(call.sizes, self._buckets.largest, strict=True))
            if n > b
        ]
        fix = "add a larger size" if isinstance(self._buckets, Ragged) else None
        if self._buckets.overflow == "chunk" and len(places) > 1:
            dims = " and ".join(str(self._buckets.dim[place]) for place in places)
            fix = f"add a larger size: chunks are cut along one dimension, and {dims} are above"
        elif self._buckets.overflow == "chunk":
            example = given.flat._replace(tensors=call.resized(self._buckets.largest))
            spec = spec_of(given._replace(flat=example))
            known = self._chunks.kept
            if spec in known or len(known) < self._most_chunked:
                proof = self._chunks.of(spec, call, places[0])
                if isinstance(proof, Proof):
                    return self._in_chunks(proof, call, places[0])
                if self._raises:
                    raise copy.copy(proof)
                return self._unbucketed(proof, given)
            what = f"{what}, with more than {len(known)} signatures"
            fix = "add a larger size, or pass the varying value as a tensor"
        return self._unbucketed(GraphError("OL310", what, fix=fix), given)

    def _unbucketed(self, error: GraphError, given: Call) -> R:
        """Run a call that no bucket serves as it is, with a warning."""
        self._notices.give(error.warning("such calls run eagerly"))
        self._table.counts.ran_eagerly(error.code)
        return self._run_whole_eagerly(given)

    def _in_chunks(self, proof: Proof, call: BucketedCall, place: int) -> R:
        """Run the call in chunks of the largest bucket, and join the results."""
        parts: list[Flat] = []
        for sizes, args, kwargs in chunks(call, place, self._buckets.largest[place]):
            part = cast(Any, self)(*args, **kwargs)
            counted = self._count(sizes)
            counted.made, counted.chunks = counted.made - 1, counted.chunks + 1
            parts.append(flatten(part, "result", objects=True, number=Identities().note))
        return joined(parts, proof, place)

    # For users.

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Record the bucket of this call ahead of time; see `Graphed.capture`.

        Raises:
            ReplayError: OL210, the call is larger than every bucket.
            CaptureError: it cannot be captured; OL140 if padding would change a result.
        """
        flat = flatten_call(args, kwargs)
        driver, _ = self._callee.driver_and_device(flat)
        call = bucketed_call(self._buckets, flat, self._names)
        bucket = self._buckets.choose(call.sizes)
        if bucket is None or 0 in call.sizes:
            raise ReplayError("OL210", f"no bucket for size {shown(call.sizes)}")
        with driver.exclusive():
            strategy = BucketStrategy(self, call, bucket)
            grown, named = unflatten(flat.tree, strategy.padded.tensors)
            self._recorder.capture_ahead(self, grown, named, strategy)

    def _sized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]:
        """Return the makers of a call of each bucket's size, from an example of any size."""
        flat = flatten_call(args, kwargs)
        call = bucketed_call(self._buckets, flat, self._names)
        if 0 in call.sizes:
            raise ArgumentError("OL401", "the example has no rows", fix="one of 1 row or more")

        def made(bucket: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return unflatten(flat.tree, call.resized(self._buckets.most(bucket)))

        return (partial(made, bucket) for bucket in self._buckets.largest_first())

    def _joining(self) -> JoinedCalls:
        return JoinedCalls(self)

    def _recorded_as(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call that a bucket serves, padded."""
        given = super()._recorded_as(args, kwargs)
        call = bucketed_call(self._buckets, given.flat, self._names)
        bucket = self._buckets.choose(call.sizes)
        assert bucket is not None
        return given._replace(flat=call.grown(bucket))

    def stats(self) -> GraphStats:
        """Return the figures of the recordings and calls, with the sizes of the calls."""
        counts = list(self._counts_by_size.items())
        made = Counter({sizes: count.made for sizes, count in counts})
        run = {sizes: count.made + count.chunks for sizes, count in counts}
        larger = {key: count.made for key, count in list(self._counts_at_larger.items())}
        for (sizes, _), count in larger.items():
            made[sizes] += count
        real, computed = rows(self._buckets, run, larger)
        return replace(
            super().stats(),
            sizes=histogram(made),
            padding=1 - real / computed if computed else 0.0,
            bucket_rows=computed,
            larger_calls=sum(larger.values()),
        )

    def reset(self) -> None:
        """Free every recording and forget every signature and count; see `Graphed.reset`."""
        super().reset()
        self._counts_by_size.clear()
        self._counts_at_larger.clear()
        self._chunks.kept.clear()
