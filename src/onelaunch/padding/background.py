"""`graph(f, buckets=..., capture="background")`: buckets captured while calls run eagerly."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ParamSpec, TypeVar

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat
from onelaunch.errors import GraphError
from onelaunch.padding.bucketed import Bucketed
from onelaunch.padding.pad import request
from onelaunch.padding.strategy import serves
from onelaunch.runtime.background import CapturesBeside
from onelaunch.sizes.buckets import Sizes

P = ParamSpec("P")
R = TypeVar("R")


class BucketedBeside(CapturesBeside[P, R], Bucketed[P, R]):
    """A callable with buckets that is captured beside its calls."""

    def _bucket(self, flat: Flat) -> Sizes | None:
        """Return the bucket of a call; None if it has none."""
        try:
            return self._buckets.choose(request(self._buckets, flat, self._names).sizes)
        except GraphError:  # the call itself says so
            return None

    def served_alike(self, flat: Flat, spec: CallSpec) -> Hashable:
        """See `CapturesBeside.served_alike`: the calls of one bucket."""
        bucket = self._bucket(flat)
        if bucket is None:
            return spec
        kinds = tuple((t.dtype, t.device, len(t.shape)) for t in spec.tensors)
        return bucket, spec.tree, kinds, spec.modes

    def is_served(self, flat: Flat, spec: CallSpec) -> bool:
        """See `CapturesBeside.is_served`: other sizes than those of past calls are yet to be
        tried."""
        bucket = self._bucket(flat)
        return bucket is not None and any(
            serves(entry, bucket) and entry.captured.guard.check() for entry in self._table.entries
        )
