"""`Buckets`: a few sizes to which all others are padded."""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex, TypedDict, Unpack, cast

from onelaunch.errors import ArgumentError
from onelaunch.sizes.batching import best
from onelaunch.sizes.fit import fit

Overflow = Literal["eager", "chunk", "raise"]
Number = int | float | bool
Key = int | str
Sizes = tuple[int, ...]  # one size for each bucketed dimension
Dims = Mapping[Key, int | Sequence[int | Sequence[int] | None] | None]
Fills = Mapping[Key, Number | Sequence[Number | None] | None]
ResultDims = Mapping[int, int | Sequence[int | None] | None]


class BucketOptions(TypedDict, total=False):
    """The options of `Buckets` besides the dimension and its sizes."""

    dims: Dims | None
    pad: Fills | None
    overflow: Overflow
    independent: bool
    outputs: ResultDims | None


@dataclass(frozen=True, init=False)
class Buckets:
    """Sizes to which a changing dimension is padded, so that a few recordings serve all requests.

    Args:
        dim: the dimension of the arguments that changes, or several: ``(0, 1)`` for batch and
            sequence. Not negative.
        sizes: the bucket sizes, in any order; with several dimensions one sequence for each, and
            every combination is a bucket.
        dims: argument -> its dimension, where that is not `dim`: ``{"mask": 1}``; None for an
            argument that is not padded. An argument is named by parameter, by position, or by path
            (``"args[0]['x']"``). With several dimensions a tuple; None in it if the argument lacks
            the dimension, a tuple if it has two: ``{"mask": (0, (2, 3))}`` of
            (batch, 1, length, length).
        pad: argument -> the value of its padding: ``{"mask": 0}``; with several dimensions also a
            tuple, as ``{"mask": (None, 0)}``. None, the default, repeats the last real row: zeros
            are not neutral everywhere.
        overflow: calls above the largest size run ``"eager"``, run in chunks whose results are
            joined (``"chunk"``), or raise a `ReplayError` (``"raise"``).
        independent: True: you assert that real rows do not depend on padded rows, and no result is
            checked. State that counts padded rows is still refused.
        outputs: number of a tensor in the result -> its dimension that follows the bucketed
            dimension: ``{0: 0, 1: None}``. Found automatically if not given.

    Raises:
        ArgumentError: OL401 for sizes or dimensions that are not valid.

    Example:
        >>> Buckets(dim=0, sizes=(1, 4, 16)).choose((3,))
        (4,)
        >>> Buckets.powers_of_two(64).sizes
        ((1, 2, 4, 8, 16, 32, 64),)
        >>> Buckets.powers_of_two(8).best(5, 2.0, max_wait_ms=2.0)  # of 5 requests 4 run, unpadded
        4
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
    spare: Sizes = field(repr=False)
    """The spare rows of each size: 1 if its last row is never real, as in `Ragged`, else 0."""

    def __init__(
        self,
        dim: int | Sequence[int] = 0,
        sizes: Sequence[int] | Sequence[Sequence[int]] = (),
        *,
        dims: Dims | None = None,
        pad: Fills | None = None,
        overflow: Overflow = "eager",
        independent: bool = False,
        outputs: ResultDims | None = None,
    ) -> None:
        several = _listed(dim)
        places = _places(dim, several)
        listed = [sizes] if several is None else _listed(sizes)
        nested = several is None or all(_listed(s) is not None for s in listed or ())
        if listed is None or len(listed) != len(places) or not nested:
            what = f"sizes={sizes!r:.60} for {len(places)} dimension{'s' * (len(places) > 1)}"
            fix = "sizes=((1, 4), (8, 16)), a tuple for each dimension"
            raise ArgumentError("OL401", what, fix=fix)
        if overflow not in ("eager", "chunk", "raise"):
            fix = 'overflow is one of "eager", "chunk", "raise"'
            raise ArgumentError("OL401", f"overflow={overflow!r}", fix=fix)
        if type(independent) is not bool:
            raise ArgumentError("OL401", f"independent={independent!r}", fix="True or False")
        settings = {
            "dim": places,
            "sizes": tuple(_ascending(s) for s in listed),
            "dims": _by_argument("dims", dims, len(places), _is_dims),
            "pad": _by_argument("pad", pad, len(places), _is_fill),
            "overflow": overflow,
            "independent": independent,
            "outputs": _by_argument("outputs", outputs, len(places), _is_dim),
            "spare": (0,) * len(places),
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def powers_of_two(max_size: int, dim: int = 0, **options: Unpack[BucketOptions]) -> Buckets:
        """Return buckets of 1, 2, 4, ... `max_size`; the last size need not be a power of two."""
        most = positive("max_size", max_size)
        sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
        return Buckets(dim, (*sizes, most), **options)

    @staticmethod
    def every(step: int, max_size: int, dim: int = 0, **options: Unpack[BucketOptions]) -> Buckets:
        """Return buckets of `step`, 2 `step`, ... up to `max_size`, which is the last size."""
        step, most = positive("step", step), positive("max_size", max_size)
        return Buckets(dim, (*range(step, most, step), most), **options)

    @staticmethod
    def fit(
        histogram: Mapping[int, float] | Mapping[int | Sizes, float],
        *,
        max_sizes: int | None = None,
        dim: int | Sequence[int] = 0,
        **options: Unpack[BucketOptions],
    ) -> Buckets:
        """Choose the sizes that compute the fewest rows for observed requests.

        Args:
            histogram: size -> number of requests, as in `Graphed.stats().sizes`. With several
                dimensions a size is a tuple, and each dimension is fitted by itself.
            max_sizes: the most sizes for each dimension; None: every observed size.
            dim, options: as in `Buckets`; ``dim=(0, 1)`` for sizes that are tuples of two.

        The sizes of each dimension are optimal. Takes milliseconds for hundreds of observed sizes.

        Raises:
            ArgumentError: OL401 if nothing was observed.
        """
        several = _listed(dim)
        observed = _by_dimension(histogram, several)
        most = None if max_sizes is None else positive("max_sizes", max_sizes)
        each = [fit(rows, len(rows) if most is None else most) for rows in observed]
        chosen = each[0] if several is None else each
        return Buckets(dim, chosen, **options)

    def best(
        self,
        waiting: int | Iterable[int],
        waited_ms: float,
        *,
        max_wait_ms: float,
        times: Mapping[int, float] | None = None,
    ) -> int:
        """Return how many waiting requests to run now as one batch, from the first; 0 to wait.

        It takes the batch with the lowest time per row, the fuller of equals. It waits until the
        largest size is full, or `max_wait_ms` has passed. Once each size has a time, it runs a size
        that is full at once if no fuller batch would save 5% per row.

        Args:
            waiting: the number of requests of one row; or the rows of each, in their order.
            waited_ms: the milliseconds that the first has waited.
            max_wait_ms: the most that a request waits for others.
            times: size -> time of its recording, in any unit, as `Batcher.times`. A size without a
                time gets the nearest other's, in proportion. Without any, time is in proportion to
                the size.

        It is a function of its arguments alone. A request of more rows than the largest size runs
        alone. With several dimensions the sizes are those of the first.
        """
        count = integer(waiting)
        rows = cast("Iterable[int]", waiting) if count is None else itertools.repeat(1, count)
        return best(self.sizes[0], rows, waited_ms < max_wait_ms, times or {})

    def choose(self, sizes: Sizes) -> Sizes | None:
        """Return the smallest bucket that serves `sizes`, or None above the largest."""
        chosen: list[int] = []
        for size, listed, spare in zip(sizes, self.sizes, self.spare, strict=True):
            place = bisect_left(listed, size + spare)
            if place == len(listed):
                return None
            chosen.append(listed[place])
        return tuple(chosen)

    def smallest(self, bucket: Sizes) -> Sizes:
        """Return the smallest sizes, 1 or more in each dimension, that a bucket serves."""
        places = [listed.index(size) for listed, size in zip(self.sizes, bucket, strict=True)]
        return tuple(
            1 if place == 0 else max(listed[place - 1] + 1 - spare, 1)
            for listed, place, spare in zip(self.sizes, places, self.spare, strict=True)
        )

    def most(self, bucket: Sizes) -> Sizes:
        """Return the largest sizes that a bucket serves."""
        return tuple(map(operator.sub, bucket, self.spare))

    def largest_first(self) -> Iterator[Sizes]:
        """Yield every bucket, largest volume first: a shared pool is smallest in that order."""
        products = itertools.product(*(reversed(sizes) for sizes in self.sizes))
        yield from sorted(products, key=math.prod, reverse=True)

    @property
    def largest(self) -> Sizes:
        """The largest size of each dimension that a bucket serves."""
        return self.most(tuple(sizes[-1] for sizes in self.sizes))


def histogram(counts: Mapping[Sizes, int]) -> dict[int | Sizes, int]:
    """Return size -> calls. A size is a number if one dimension is bucketed, else a tuple."""
    return {s[0] if len(s) == 1 else s: count for s, count in counts.items() if count}


def rows(
    buckets: Buckets, counts: Mapping[Sizes, int], larger: Mapping[tuple[Sizes, Sizes], int] = {}
) -> tuple[int, int]:
    """Return the real rows of calls in buckets, and the rows computed for the calls. `larger`:
    (sizes, larger bucket than their own) -> number of calls there."""
    real = sum(count * math.prod(sizes) for (sizes, _), count in larger.items())
    computed = sum(count * math.prod(bucket) for (_, bucket), count in larger.items())
    for sizes, count in counts.items():
        bucket = buckets.choose(sizes)
        if bucket is not None and 0 not in sizes:
            real += count * math.prod(sizes)
            computed += count * math.prod(bucket)
    return real, computed


def shown(sizes: Sizes) -> str:
    """Format sizes for a message: `3`, or `3 x 17`."""
    return " x ".join(map(str, sizes))


def _by_dimension(histogram: object, several: Sequence[object] | None) -> list[dict[int, float]]:
    """Return size -> number of requests for each dimension, checked."""
    fix = "a mapping of size to count, of one dimension, with a positive size in it"
    if not isinstance(histogram, Mapping):
        raise ArgumentError("OL401", f"histogram={histogram!r:.60}", fix=fix)
    count = 1 if several is None else len(several)
    each: list[dict[int, float]] = [{} for _ in range(count)]
    for given, times in cast("Mapping[object, object]", histogram).items():
        sizes: tuple[object, ...] = given if isinstance(given, tuple) else (given,)
        if len(sizes) != count:
            what = f"the histogram has size {given!r}, and {count} dimensions are bucketed"
            dims = f"dim={tuple(range(len(sizes)))}, one for each number of a size"
            raise ArgumentError("OL401", what, fix=dims)
        numbers = [n for n in map(integer, (given,) if several is None else sizes) if n is not None]
        if len(numbers) < count or min(numbers) < 0 or not _is_amount(times):
            raise ArgumentError("OL401", f"histogram has {given!r}: {times!r}", fix=fix)
        if times and 0 not in numbers:  # for size 0 nothing is computed
            for one, n in zip(each, numbers, strict=True):
                one[n] = one.get(n, 0) + cast(float, times)
    if not all(each):
        raise ArgumentError("OL401", "the histogram has no size above 0", fix=fix)
    return each


def integer(value: object) -> int | None:
    """Return an integer of any type (NumPy's too) as an int; None for booleans and non-integers."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        return None


def _is_amount(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return 0 <= float(value) < math.inf


def positive(name: str, value: object) -> int:
    """Return an integer of at least 1 as an int. Raises `ArgumentError`: OL401, it is none."""
    number = integer(value)
    if number is None or number < 1:
        raise ArgumentError("OL401", f"{name}={value!r}", fix=f"{name} is an int of at least 1")
    return number


def _places(dim: object, several: list[object] | None) -> Sizes:
    """Return the bucketed dimensions, checked."""
    numbers = [integer(d) for d in ([dim] if several is None else several)]
    places = tuple(d for d in numbers if d is not None and d >= 0)
    if not places or len(set(places)) < len(numbers):
        raise ArgumentError("OL401", f"dim={dim!r}", fix="dim=0, or dim=(0, 1)")
    return places


def _ascending(sizes: object) -> Sizes:
    listed = [integer(size) for size in _listed(sizes) or ()]
    positive = {size for size in listed if size is not None and size > 0}
    if not listed or not all(size in positive for size in listed):
        fix = "sizes=(1, 4, 16), each an int of at least 1"
        raise ArgumentError("OL401", f"sizes={sizes!r:.60}", fix=fix)
    return tuple(sorted(positive))


def _listed(value: object) -> list[object] | None:
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        return list(cast("Iterable[object]", value))
    except TypeError:
        return None


def _is_dim(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _is_dims(value: object) -> bool:
    inner = cast("Sequence[object]", value) if isinstance(value, tuple | list) else None
    if inner is None:
        return _is_dim(value)
    return bool(inner) and all(d is not None and _is_dim(d) for d in inner)


def _is_fill(value: object) -> bool:
    return value is None or isinstance(value, int | float)


_EXAMPLES = {
    "dims": 'dims={"mask": 1}, of dimensions that are not negative; None for none',
    "pad": 'pad={"mask": 0}, of numbers; None repeats the last row',
    "outputs": "outputs={0: 0, 1: None}: the dimension of each result, by its number",
}


def _by_argument(
    name: str, given: object, count: int, allowed: Callable[[object], bool]
) -> dict[Any, tuple[Any, ...]]:
    """Return argument or result -> a value of the option for each dimension."""
    if not isinstance({} if given is None else given, Mapping):
        raise ArgumentError("OL401", f"{name}={given!r:.60}", fix=_EXAMPLES[name])
    by_argument: dict[Any, tuple[Any, ...]] = {}
    for key, value in cast("Mapping[object, object]", given or {}).items():
        several = isinstance(value, tuple | list)
        each = tuple(cast("Sequence[object]", value)) if several else (value,) * count
        what = f"{name}={{{key!r}: {value!r}}}"
        if len(each) != count:
            fix = f"{count} of them, or a single one for all"
            raise ArgumentError("OL401", f"{what} for {count} dimensions", fix=fix)
        named = type(key) is int or (isinstance(key, str) and name != "outputs")
        if not named or not all(map(allowed, each)):
            raise ArgumentError("OL401", what, fix=_EXAMPLES[name])
        by_argument[key] = each
    return by_argument
