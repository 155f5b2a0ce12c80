"""`Buckets`: a few sizes that stand for all of them."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from onelaunch.errors import GraphError
from onelaunch.fitting import Budget, fit

Overflow = Literal["eager", "chunk", "error"]
Number = int | float | bool
Key = int | str
Sizes = tuple[int, ...]
"""One size for each bucketed dimension."""


@dataclass(frozen=True, init=False)
class Buckets:
    """Sizes to which a changing dimension is padded, so that a few recordings serve all requests.

    Args:
        dim: the dimension of the arguments that changes, or several: ``(0, 1)`` for batch and
            sequence. Not negative.
        sizes: the bucket sizes, in any order; with several dimensions one sequence for each, and
            every combination is a bucket.
        dims: arguments whose dimension is another: ``{"mask": 1}``; None for an argument that is
            not padded. Named by parameter, by position, or by path (``"args[0]['x']"``). With
            several dimensions a tuple, None where the argument lacks one, and a tuple inside where
            it has two: ``{"mask": (0, (2, 3))}`` of (batch, 1, length, length).
        pad: what fills the padding of an argument: ``{"mask": 0}``; with several dimensions also a
            tuple, as ``{"mask": (None, 0)}``. None, the default, repeats the last real row: zeros
            are not neutral everywhere.
        overflow: calls above the largest size run ``"eager"``, are cut into pieces and put together
            (``"chunk"``), or raise a `ReplayError` (``"error"``).
        independent: you assert that real rows do not depend on padded ones; nothing is checked.
        outputs: which dimension of a result follows each bucketed one, by the number of the tensor
            in the result: ``{0: 0, 1: None}``. Found out where it is not said.

    Raises:
        GraphError: OL401 for sizes or dimensions that make no sense.

    Example:
        >>> Buckets(dim=0, sizes=(1, 4, 16)).choose((3,))
        (4,)
        >>> Buckets.powers_of_two(64).sizes
        ((1, 2, 4, 8, 16, 32, 64),)
        >>> Buckets.fit({1: 90, 30: 5, 32: 5}, max_sizes=2).sizes
        ((1, 32),)
    """

    dim: Sizes
    sizes: tuple[Sizes, ...]
    dims: Mapping[Key, tuple[int | Sequence[int] | None, ...]] = field(hash=False)
    pad: Mapping[Key, tuple[Number | None, ...]] = field(hash=False)
    overflow: Overflow
    independent: bool
    outputs: Mapping[int, tuple[int | None, ...]] = field(hash=False)

    def __init__(
        self,
        dim: int | Sequence[int] = 0,
        sizes: Sequence[int] | Sequence[Sequence[int]] = (),
        *,
        dims: Mapping[Key, int | Sequence[int | Sequence[int] | None] | None] | None = None,
        pad: Mapping[Key, Number | Sequence[Number | None] | None] | None = None,
        overflow: Overflow = "eager",
        independent: bool = False,
        outputs: Mapping[int, int | Sequence[int | None] | None] | None = None,
    ) -> None:
        several = not isinstance(dim, int)
        places = (dim,) if isinstance(dim, int) else tuple(dim) if _is_sequence(dim) else ()
        if not places or not all(_is_int(d) and d >= 0 for d in places):
            raise GraphError("OL401", f"dim={dim!r}", fix="dim=0, or dim=(0, 1)")
        listed: tuple[object, ...] = (sizes,)
        if several and _is_sequence(sizes):
            listed = tuple(cast(Sequence[object], sizes))
        if len(listed) != len(places) or (several and not all(map(_is_sequence, listed))):
            what = f"{len(places)} dimensions and sizes={sizes!r}"
            fix = "a sequence of sizes for each: Buckets(dim=(0, 1), sizes=((2, 4), (8, 16)))"
            raise GraphError("OL401", what, fix=fix)
        if overflow not in ("eager", "chunk", "error"):
            fix = 'overflow is one of "eager", "chunk", "error"'
            raise GraphError("OL401", f"overflow={overflow!r}", fix=fix)
        settings = {
            "dim": places,
            "sizes": tuple(_ascending(s) for s in listed),
            "dims": {k: _each(v, len(places)) for k, v in (dims or {}).items()},
            "pad": {k: _each(v, len(places)) for k, v in (pad or {}).items()},
            "overflow": overflow,
            "independent": bool(independent),
            "outputs": {k: _each(v, len(places)) for k, v in (outputs or {}).items()},
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def powers_of_two(upto: int, dim: int = 0, **options: object) -> Buckets:
        """1, 2, 4, ... up to `upto`, which is the last size whether or not it is a power."""
        _positive("upto", upto)
        sizes = [1 << i for i in range(upto.bit_length()) if 1 << i < upto]
        return Buckets(dim, (*sizes, upto), **options)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def every(step: int, *, upto: int, dim: int = 0, **options: object) -> Buckets:
        """`step`, 2 `step`, ... up to `upto`, which is the last size."""
        _positive("step", step)
        _positive("upto", upto)
        sizes = range(step, upto, step)
        return Buckets(dim, (*sizes, upto), **options)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def fit(
        histogram: Mapping[int, int],
        *,
        max_sizes: int | None = None,
        max_bytes: float | None = None,
        max_capture_seconds: float | None = None,
        bytes_of: Callable[[int], float] | None = None,
        seconds_of: Callable[[int], float] | None = None,
        dim: int = 0,
        **options: object,
    ) -> Buckets:
        """The sizes that minimise rows computed for observed requests, within a budget.

        Args:
            histogram: size -> number of requests, as `Graphed.stats().sizes` has it.
                Of one dimension; with several, fit each by itself.
            max_sizes: at most so many sizes.
            max_bytes: what the recordings of all sizes may take together; needs `bytes_of`.
            max_capture_seconds: what capturing all of them may take; needs `seconds_of`.
            bytes_of: bytes that the recording of a size adds.
            seconds_of: seconds that capturing a size takes.
            dim, options: as in `Buckets`.

        Optimal, by dynamic programming; milliseconds for hundreds of observed sizes.

        Raises:
            GraphError: OL401 if nothing was observed, or no set of sizes fits the budget.
        """
        if max_bytes is not None and bytes_of is None:
            fix = "bytes_of=lambda size: bytes that a recording of this size takes"
            raise GraphError("OL401", f"max_bytes={max_bytes} without bytes_of", fix=fix)
        if max_capture_seconds is not None and seconds_of is None:
            fix = "seconds_of=lambda size: seconds that capturing this size takes"
            what = f"max_capture_seconds={max_capture_seconds} without seconds_of"
            raise GraphError("OL401", what, fix=fix)
        if max_sizes is not None:
            _positive("max_sizes", max_sizes)
        rows = {size: count for size, count in histogram.items() if size != 0 and count}
        if not rows or not all(_is_int(s) and s > 0 and c > 0 for s, c in rows.items()):
            fix = "a mapping of size to count, of one dimension, with a positive size in it"
            raise GraphError("OL401", f"histogram={dict(histogram)!r}", fix=fix)
        budget = Budget(
            max_sizes,
            max_bytes,
            bytes_of or _free,
            max_capture_seconds,
            seconds_of or _free,
        )
        sizes = fit(rows, budget)
        if sizes is None:
            what = f"no set of sizes up to {max(rows)} fits the budget"
            raise GraphError("OL401", what, fix="raise max_bytes or max_capture_seconds")
        return Buckets(dim, sizes, **options)  # pyright: ignore[reportArgumentType]

    def choose(self, sizes: Sizes) -> Sizes | None:
        """The smallest bucket that holds `sizes`, or None above the largest."""
        found: list[int] = []
        for size, known in zip(sizes, self.sizes, strict=True):
            place = bisect_left(known, size)
            if place == len(known):
                return None
            found.append(known[place])
        return tuple(found)

    def smallest(self, bucket: Sizes) -> Sizes:
        """The smallest sizes, 1 or more in each dimension, that this bucket serves."""
        places = [known.index(size) for known, size in zip(self.sizes, bucket, strict=True)]
        return tuple(
            1 if place == 0 else known[place - 1] + 1
            for known, place in zip(self.sizes, places, strict=True)
        )

    def largest_first(self) -> Iterator[Sizes]:
        """Every bucket, the one with the most elements first: so one pool serves them best."""
        products = itertools.product(*(reversed(sizes) for sizes in self.sizes))
        yield from sorted(products, key=volume, reverse=True)

    @property
    def largest(self) -> Sizes:
        """The largest size of each dimension."""
        return tuple(sizes[-1] for sizes in self.sizes)


def histogram(counts: Mapping[Sizes, int]) -> dict[int | Sizes, int]:
    """Calls by size: a number where one dimension is bucketed, else a tuple."""
    return {s[0] if len(s) == 1 else s: count for s, count in counts.items() if count}


def padding(buckets: Buckets, counts: Mapping[Sizes, int]) -> float:
    """The share of padding in the rows computed, 0 to 1, of calls that a bucket served."""
    real = computed = 0
    for sizes, count in counts.items():
        bucket = buckets.choose(sizes)
        if bucket is not None and 0 not in sizes:
            real += count * volume(sizes)
            computed += count * volume(bucket)
    return 1 - real / computed if computed else 0.0


def volume(sizes: Sizes) -> int:
    """Rows of that size: the product."""
    volume = 1
    for size in sizes:
        volume *= size
    return volume


def _free(size: int) -> float:
    return 0.0


def _is_int(value: object) -> bool:
    return type(value) is int


def _positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise GraphError("OL401", f"{name}={value!r}", fix=f"{name} is an int of at least 1")


def _ascending(sizes: object) -> Sizes:
    listed: list[object] = list(cast(Sequence[object], sizes)) if _is_sequence(sizes) else []
    if not listed or not all(_is_int(s) and cast(int, s) > 0 for s in listed):
        raise GraphError("OL401", f"sizes={sizes!r}", fix="sizes=(1, 4, 16), each at least 1")
    return tuple(sorted(set(cast(list[int], listed))))


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence | range) and not isinstance(value, str)


def _each(value: object, count: int) -> tuple[object, ...]:
    """One value for each dimension."""
    if not _is_sequence(value):
        return (value,) * count
    listed = tuple(cast(Sequence[object], value))
    if len(listed) != count:
        fix = f"{count} of them, or a single one for all"
        raise GraphError("OL401", f"{value!r} for {count} dimensions", fix=fix)
    return listed
