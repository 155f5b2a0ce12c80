"""Several calls as one: their rows are joined before it, and its results are parted."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.identity import Identities
from onelaunch.call.tree import Flat, first_places, flatten, flatten_call, unflatten
from onelaunch.driver.select import recordable
from onelaunch.errors import CaptureError, GraphError
from onelaunch.padding.chunks import ChunkProofs
from onelaunch.padding.pad import BucketedCall, Proof, as_made, bucketed_call, dense_stride
from onelaunch.padding.proof import CallFails
from onelaunch.sizes.buckets import Sizes

if TYPE_CHECKING:
    from onelaunch.padding.bucketed import Bucketed

_TIMES = 3  # the runs of each size that is timed; the shortest counts


class JoinableCall(NamedTuple):
    """A request to a callable with buckets, taken apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: Flat
    call: BucketedCall | None
    key: Any  # equal for requests that may run together: their form, and the tensors that all share
    rows: int  # its size of the first bucketed dimension; the largest for one that runs alone
    others: Sizes = ()  # the bucket of its other sizes


class JoinedCalls:
    """The calls of a callable with buckets, joined along the first bucketed dimension."""

    def __init__(self, graphed: Bucketed[..., Any]) -> None:
        self._graphed: Any = graphed
        self.sizes = graphed._buckets.sizes[0]
        self._proofs = ChunkProofs(graphed._buckets, graphed._callee, failures=False)

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JoinableCall:
        """Take a request apart. One that runs alone has a key of its own."""
        flat, buckets = flatten_call(args, kwargs), self._graphed._buckets
        alone = JoinableCall(args, kwargs, flat, None, (object(),), self.sizes[-1])  # at once
        try:
            call = bucketed_call(buckets, flat, self._graphed._names)
        except GraphError:
            return alone  # the call itself says why
        bucket, tensors = buckets.choose(call.sizes), flat.tensors
        if bucket is None or 0 in call.sizes or not all(map(recordable, tensors)):
            return alone
        first, parts, same = first_places(tensors), [], []
        for t, how in zip(tensors, call.padded, strict=True):
            dim, shape = None if how is None else how.dim_of(0), [*t.shape]
            if dim is None:
                same.append(id(t))
            else:
                del shape[dim]
            parts.append((how, *shape, t.dtype, t.device, t.is_inference(), first[id(t)]))
        key = (flat.tree, call.sizes[1:], tuple(parts)), tuple(same)
        return JoinableCall(args, kwargs, flat, call, key, call.sizes[0], bucket[1:])

    def together(self, requests: Sequence[JoinableCall]) -> tuple[list[Any], bool] | None:
        """Run requests of one key as one call, and wait for the device. Return the result of each,
        and whether it was a replay; None if each is to run alone. Raises `CaptureError`: OL140, the
        rows of a request would depend on the others."""
        fast, first = self._graphed, requests[0]
        try:
            proof = self._proof(first)
        except CallFails:
            proof = None  # the callable fails on this request, and says so when it runs alone
        before = _not_replayed(fast)
        if proof is not None:
            args, kwargs = unflatten(first.flat.tree, _joined(requests))
            results = _parted(fast(*args, **kwargs), proof, [each.rows for each in requests])
        elif len(requests) == 1:
            results = [fast(*first.args, **first.kwargs)]
        else:
            return None
        driver, device = fast._callee.driver_and_device(first.flat)
        driver.finish(device)
        return results, proof is not None and _not_replayed(fast) == before

    def timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Sizes, float]:
        """Return bucket -> milliseconds of its recording, on rows made from a request. Raises
        `CaptureError`: OL140, rows depend on others, or a call changes state."""
        fast, found = self._graphed, dict[Sizes, float]()
        for make in fast._sized(args, kwargs):
            one = self.taken(*make())
            if not found and self._proof(one) is None:
                return {}
            bucket = one.rows, *one.others
            for _ in range(_TIMES):
                started = time.perf_counter()
                _, replayed = self.together([one]) or ([], False)
                took = (time.perf_counter() - started) * 1e3
                fast._count(bucket).made -= 1  # it is nobody's call
                if replayed:
                    found[bucket] = min(took, found.get(bucket, took))
        return found

    def _proof(self, one: JoinableCall) -> Proof | None:
        """Return the proof that calls may be joined: that a call may be cut into chunks. None if
        each is to run alone, since rows depend on others, or arguments are written to."""
        if one.call is None:
            return None
        fast, found = self._graphed, self._proofs.of(one.key[0], one.call, 0)
        if not isinstance(found, CaptureError):
            return None if found.written else found
        if isinstance(found, CallFails) or fast.options.on_refusal == "raise":
            raise copy.copy(found) from found.__cause__
        fast._notices.give(found.warning("requests run one by one"), "one by one")
        return None


def _not_replayed(graphed: Any) -> tuple[int, int, int]:
    counts = graphed._table.counts
    return counts.captures, counts.warmup_calls, sum(counts.eager_reasons.values())


def _joined(requests: Sequence[JoinableCall]) -> list[Tensor]:
    """Return the tensors of one call that has the rows of all requests, in their order. A tensor
    that occurs twice is joined once."""
    first, made = requests[0], dict[int, Tensor]()
    assert first.call is not None
    for index, (t, dim) in enumerate(zip(first.flat.tensors, first.call.along(0), strict=True)):
        if dim is None:
            made[id(t)] = t
        elif id(t) not in made:
            with as_made(t), torch.no_grad():
                made[id(t)] = torch.cat([each.flat.tensors[index] for each in requests], dim)
    return [made[id(t)] for t in first.flat.tensors]


def _parted(result: Any, proof: Proof, rows: Sequence[int]) -> list[Any]:
    """Return the result of each request. Its tensors are new memory, laid out as in eager."""
    whole = flatten(result, "result", objects=True, number=Identities().note)
    parts: dict[int, list[Tensor]] = {}
    for t, follows in zip(whole.tensors, proof.follows, strict=True):
        if id(t) in parts:
            continue
        dim = next(f.dim for f in follows if f.place == 0)
        views = list(t.split(list(rows), dim))
        empty = t.new_empty(0)
        strides = {shape: dense_stride(t, shape) for shape in {v.shape for v in views}}
        made = [empty.new_empty_strided(v.shape, strides[v.shape]) for v in views]
        torch._foreach_copy_(made, views)
        parts[id(t)] = made
    return [
        unflatten(whole.tree, [parts[id(t)][place] for t in whole.tensors])
        for place in range(len(rows))
    ]
