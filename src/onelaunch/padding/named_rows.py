"""Arguments that name rows, in a proof and in each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.padding.pad import Request
from onelaunch.replay.call_path import MISS, CallPath
from onelaunch.sizes.buckets import Buckets, Sizes
from onelaunch.sizes.ragged import Ragged


def spare(buckets: Buckets, sizes: Sizes, bucket: Sizes) -> frozenset[tuple[int, int]]:
    """Return real and padded size of dimensions whose last row is in no call a real row. A size
    without such a row may have the same two numbers: then none of them is known."""
    if not isinstance(buckets, Ragged):
        return frozenset()
    pairs = [*zip(buckets.spare, zip(sizes, bucket, strict=True), strict=True)]
    return frozenset(p for has, p in pairs if has) - frozenset(p for has, p in pairs if not has)


def ends(buckets: Buckets, bucket: Sizes) -> tuple[Sizes, Sizes]:
    """Return the smallest sizes of a bucket, and the largest but one. Sizes that have a spare row
    differ from those that have none."""
    least = buckets.smallest(bucket)
    most = tuple(max(b - 1, n) for b, n in zip(bucket, least, strict=True))
    if not isinstance(buckets, Ragged):
        return least, most
    pairs = [*zip(least, bucket, strict=True)]
    taken = {pair for pair, has in zip(pairs, buckets.spare, strict=True) if has}
    for place, ((n, b), has) in enumerate(zip(pairs, buckets.spare, strict=True)):
        if not has and n < b - 1:
            low = n + 1 if (n, b) in taken else n
            least = (*least[:place], low, *least[place + 1 :])
            most = (*most[:place], max(b - 2, low), *most[place + 1 :])
    return least, most


def naming(call: Request, paths: Sequence[str]) -> Callable[..., list[tuple[Tensor, int]]] | None:
    """Return a function that reads the tensors that name rows from a call of this form, each with
    the number of its rows. None if there are no such tensors."""
    found: list[str] = []
    for path, how in zip(paths, call.padded, strict=True):
        if how is None or how.rows is None:
            continue
        sized = zip(paths, call.padded, strict=True)
        rows = next((p, d) for p, h in sized if h and (d := h.dim_of(how.rows)) is not None)
        found.append(f"({path}, {rows[0]}.shape[{rows[1]}])")
    if not found:
        return None
    names: dict[str, Any] = {}
    exec(f"def read(args, kwargs): return [{', '.join(found)}]", names)
    return names["read"]


@dataclass(slots=True, eq=False)
class NamingCall:
    """The call path where arguments name rows: each must be real, which the device checks."""

    call: CallPath
    read: Callable[..., list[tuple[Tensor, int]]]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            named = self.read(args, kwargs)
        except (LookupError, AttributeError, TypeError):  # arguments of another form
            return MISS
        for t, rows in named:
            torch._assert_async((t.clamp(0, rows - 1) == t).all(), "an index out of bounds")
        return self.call(args, kwargs)
