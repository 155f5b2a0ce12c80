"""Arguments that name rows, in a proof and in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onelaunch.padding.pad import BucketedCall
from onelaunch.padding.taint.shadow import Rows
from onelaunch.replay.call_path import MISS, CallPath
from onelaunch.sizes.buckets import Buckets, Sizes
from onelaunch.sizes.ragged import Ragged

NAMED = 'name each argument whose numbers are places of rows: `index={"edges": "nodes"}` of Ragged'
GROUPED = (
    f"{NAMED}; bring rows together by such an argument, as `index_add` does; or mask the padding"
)
"""The fix for an operation that brings rows together."""


def spare(buckets: Buckets, sizes: Sizes, bucket: Sizes) -> frozenset[Rows]:
    """Return the pairs (size, bucket) whose last row is never real, each once."""
    pairs = [*zip(sizes, bucket, strict=True)]
    return frozenset(
        p for p, has in zip(pairs, buckets.spare, strict=True) if has and pairs.count(p) == 1
    )


def ends(buckets: Buckets, bucket: Sizes) -> tuple[Sizes, Sizes]:
    """Return the smallest sizes of a bucket, and the largest but one; sizes without a spare row end
    one earlier. If two sizes have the same numbers, the second moves to others."""
    least = buckets.smallest(bucket)
    if not isinstance(buckets, Ragged):
        return least, tuple(max(b - 1, n) for b, n in zip(bucket, least, strict=True))
    low, high = list(least), list(least)
    order = sorted(range(len(bucket)), key=lambda place: -buckets.spare[place])
    for number, place in enumerate(order):
        n, b = least[place], bucket[place]
        served = range(n, max(b, n + 1))  # up to the largest but one
        before = [p for p in order[:number] if bucket[p] == b]
        first = [m for m in served if m not in {low[p] for p in before}]
        last = [m for m in served if m not in {high[p] for p in before}]
        low[place] = first[0] if first else n
        high[place] = last[-1 if buckets.spare[place] or len(last) < 2 else -2] if last else n
    return tuple(low), tuple(high)


def naming(path: CallPath, call: BucketedCall) -> CallPath:
    """Return the call path for calls of this form, some of whose arguments name rows. Each must be
    real, which the device checks. Without such arguments return `path`."""
    found = [
        f"({name}, {call.size_text(how.rows)})"
        for name, how in zip(call.flat.paths, call.padded, strict=True)
        if how is not None and how.rows is not None
    ]
    if not found:
        return path
    read: Callable[..., Any] = eval(f"lambda args, kwargs: [{', '.join(found)}]")

    def checked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            named = read(args, kwargs)
        except (LookupError, AttributeError, TypeError):  # arguments of another form
            return MISS
        for t, count in named:
            torch._assert_async((t.clamp(0, count - 1) == t).all(), "an index out of bounds")
        return path(args, kwargs)

    return checked


def fix_of_failure(error: Exception) -> str:
    """Return the fix for a run that fails at another size of the bucket."""
    such = "leave out the buckets that serve such sizes"
    return f"{NAMED}; or {such}" if isinstance(error, IndexError) else such
