"""Buckets: which sizes there are, which one serves a call, and which to have."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onelaunch as ol
from onelaunch.errors import ArgumentError
from onelaunch.padding.pad import cut, pad, resized
from onelaunch.sizes.buckets import BucketOptions, Buckets, rows
from onelaunch.sizes.dims import PaddedDims, SizeLink
from onelaunch.sizes.ragged import Ragged

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(SIZES, st.data())
def test_every_size_up_to_the_largest_has_the_smallest_bucket_that_holds_it(
    sizes: list[int], data: st.DataObject
) -> None:
    buckets = Buckets(0, sizes)
    size = data.draw(st.integers(0, max(sizes)))
    chosen = buckets.choose((size,))
    assert chosen == (min(s for s in sizes if s >= size),)
    assert buckets.smallest(chosen)[0] <= max(size, 1)
    assert buckets.choose((max(sizes) + 1,)) is None


@given(SIZES, SIZES, st.data())
def test_with_two_dimensions_each_has_its_own(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    buckets = Buckets((0, 1), (first, second))
    sizes = data.draw(st.tuples(st.integers(1, max(first)), st.integers(1, max(second))))
    chosen = buckets.choose(sizes)
    assert chosen == (*Buckets(0, first).choose(sizes[:1]), *Buckets(0, second).choose(sizes[1:]))
    every = list(buckets.largest_first())
    assert chosen in every
    assert len(every) == len(set(first)) * len(set(second))
    assert every[0] == buckets.largest


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.permutations((0, 1, 2)),
    st.sampled_from([None, 0, 7]),
)
def test_cut_of_padded_is_the_tensor(
    shape: tuple[int, int, int], more: tuple[int, int], order: Sequence[int], value: int | None
) -> None:
    t = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    t = t.permute(*order).contiguous().permute(*(list(order).index(d) for d in range(3)))
    bucket = (shape[0] + more[0], shape[1] + more[1])
    grown = pad(t, PaddedDims((0, 1), (0, 1), (None, value)), bucket)
    assert tuple(grown.shape) == (*bucket, shape[2])
    back = cut(grown, (SizeLink(0, 0, 1, 0), SizeLink(1, 1, 1, 0)), shape[:2])
    assert torch.equal(back, t)
    pairs = zip(back.shape, back.stride(), t.stride(), strict=True)
    assert all(n == 1 or a == b for n, a, b in pairs)
    rows = grown[: shape[0], shape[1] :]
    last = t[:, -1:].expand_as(rows) if value is None else torch.full_like(rows, value)
    assert torch.equal(rows, last)
    assert torch.equal(grown[shape[0] :], grown[shape[0] - 1 : shape[0]].expand(more[0], -1, -1))


@given(st.integers(1, 6), st.integers(0, 9))
def test_examples_of_other_sizes_hold_real_rows(n: int, size: int) -> None:
    t = torch.arange(n)
    made = resized(t, PaddedDims((0,), (0,), (None,)), (size,))
    assert made.tolist() == [i % n for i in range(size)]


@settings(max_examples=25, deadline=None)
@given(SIZES, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_bucketed_call_is_the_call(sizes: list[int], calls: list[int]) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2 + 1, x.amax(1)

    fast = ol.graph(f, buckets=Buckets(0, sizes), warmup=1)
    for n in calls:
        if n <= max(sizes):
            x = torch.randn(n, 3)
            for got, expected in zip(fast(x), f(x), strict=True):
                assert torch.equal(got, expected)
                assert got.stride() == expected.stride()
    assert len(fast.recordings) <= len(set(sizes))


def work(sizes: Sequence[int], histogram: Mapping[int, int]) -> int:
    return sum(count * min(s for s in sizes if s >= n) for n, count in histogram.items())


@given(
    st.dictionaries(st.integers(1, 25), st.integers(1, 9), min_size=1, max_size=7),
    st.sampled_from([None, 1, 2, 3]),
)
def test_the_fit_is_the_best_of_all_sets(histogram: dict[int, int], most: int | None) -> None:
    sets = [
        chosen
        for count in range(1, len(histogram) + 1)
        for chosen in itertools.combinations(sorted(histogram), count)
        if chosen[-1] == max(histogram) and (most is None or count <= most)
    ]
    (sizes,) = Buckets.fit(histogram, max_sizes=most).sizes
    assert most is None or len(sizes) <= most
    assert work(sizes, histogram) == min(work(s, histogram) for s in sets)


def best_of(histogram: Mapping[int, int], most: int) -> int:
    """The least work of at most so many sizes, by the plain recursion."""
    sizes = sorted(histogram)
    before = [0, *itertools.accumulate(histogram[size] for size in sizes)]
    least: list[float] = [0, *(math.inf for _ in sizes)]
    for _ in range(most):
        least = [0] + [
            min(least[first] + size * (before[last] - before[first]) for first in range(last))
            for last, size in enumerate(sizes, start=1)
        ]
    return int(least[-1])


@pytest.mark.parametrize("most", [1, 3, 12])
def test_a_fit_to_hundreds_of_sizes_is_the_best_and_takes_no_time(most: int) -> None:
    histogram = {n: 1 + (n * 7919) % 97 for n in range(1, 201)}
    started = time.process_time()
    buckets = Buckets.fit(histogram, max_sizes=most, overflow="chunk")
    assert time.process_time() - started < 2
    (sizes,) = buckets.sizes
    assert (len(sizes), sizes[-1], buckets.overflow) == (most, 200, "chunk")
    assert work(sizes, histogram) == best_of(histogram, most)
    real, computed = rows(buckets, {(n,): c for n, c in histogram.items()})
    assert (real, computed) == (sum(n * c for n, c in histogram.items()), work(sizes, histogram))


def test_a_fit_to_thousands_of_sizes_takes_no_time() -> None:
    histogram = {n: 1 + (n * 7919) % 97 for n in range(1, 4097)}
    started = time.process_time()
    (sizes,) = Buckets.fit(histogram, max_sizes=16).sizes
    assert time.process_time() - started < 10
    assert (len(sizes), sizes[-1]) == (16, 4096)


def test_a_histogram_of_numpy_and_of_weights() -> None:
    numpy = pytest.importorskip("numpy")
    found, counts = numpy.unique(numpy.array([3, 3, 7, 9, 9, 9]), return_counts=True)
    observed = dict(zip(found, counts, strict=True))
    assert Buckets.fit(observed, max_sizes=2).sizes == ((3, 9),)
    assert Buckets(0, found).sizes == ((3, 7, 9),)
    assert all(type(size) is int for size in Buckets(numpy.int64(0), found).sizes[0])
    assert Buckets.fit({4: 2.5, 5: 0.0, 0: 9}).sizes == ((4,),)
    assert Buckets.powers_of_two(numpy.int64(8)).sizes == ((1, 2, 4, 8),)
    assert Buckets.every(numpy.int32(2), max_size=numpy.int64(5)).sizes == ((2, 4, 5),)
    assert Buckets.fit(observed, max_sizes=numpy.int64(1)).sizes == ((9,),)
    assert all(type(n) is int for n in Buckets.every(numpy.int64(2), 5).sizes[0])
    assert ol.Pool(numpy.int64(1 << 20)).max_bytes == 1 << 20


@pytest.mark.parametrize("sizes", [(1, 2), 3, ((1, 4),), ((1, 4), 8)], ids=str)
def test_sizes_of_two_dimensions_are_a_tuple_for_each(sizes: Any) -> None:
    with pytest.raises(ol.ArgumentError) as caught:
        Buckets(dim=(0, 1), sizes=sizes)
    assert caught.value.what == f"sizes={sizes!r} for 2 dimensions"
    assert caught.value.fix == "sizes=((1, 4), (8, 16)), a tuple for each dimension"


def test_a_fit_to_two_dimensions() -> None:
    observed = {(1, 7): 5, (1, 9): 2, (3, 7): 1, (0, 90): 4, (4, 8): 3}
    buckets = Buckets.fit(observed, max_sizes=2, dim=(0, 1), overflow="chunk")
    batches, lengths = {1: 7, 3: 1, 4: 3}, {7: 6, 8: 3, 9: 2}
    assert buckets.sizes == tuple(
        Buckets.fit(each, max_sizes=2).sizes[0] for each in (batches, lengths)
    )
    assert (buckets.dim, buckets.overflow) == ((0, 1), "chunk")
    assert Buckets.fit({4: 1, 5: 1}, dim=(1,)).sizes == ((4, 5),)
    with pytest.raises(ol.ArgumentError, match=r"dim=\(0, 1\), one for each") as caught:
        Buckets.fit(observed)
    assert caught.value.code == "OL401"


def test_sizes_by_rule() -> None:
    assert Buckets.powers_of_two(64).sizes == ((1, 2, 4, 8, 16, 32, 64),)
    assert Buckets.powers_of_two(48).sizes == ((1, 2, 4, 8, 16, 32, 48),)
    assert Buckets.powers_of_two(1).sizes == ((1,),)
    assert Buckets.every(8, 512, dim=1).sizes == (tuple(range(8, 513, 8)),)
    assert Buckets.every(step=8, max_size=20).sizes == ((8, 16, 20),)
    assert Buckets.powers_of_two(max_size=3, dim=1, overflow="chunk").overflow == "chunk"
    assert Buckets(0, (4, 1, 4)).sizes == ((1, 4),)


def test_the_options_besides_the_sizes_are_those_of_buckets() -> None:
    listed = inspect.signature(Buckets).parameters.values()
    hints = get_type_hints(Buckets.__init__)
    named = {p.name: hints[p.name] for p in listed if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert named == get_type_hints(BucketOptions)


BAD: list[Callable[[], Buckets]] = [
    lambda: Buckets(0, ()),
    lambda: Buckets(0, (0, 4)),
    lambda: Buckets(-1, (4,)),
    lambda: Buckets((0, 1), ((4,),)),
    lambda: Buckets((0, 1), (2, 4)),  # pyright: ignore[reportArgumentType]
    lambda: Buckets(0, (4.0,)),  # pyright: ignore[reportArgumentType]
    lambda: Buckets(0, (4,), overflow="wrap"),  # pyright: ignore[reportArgumentType]
    lambda: Buckets((0, 1), ((4,), (4,)), pad={"x": (1, 2, 3)}),
    lambda: Buckets.powers_of_two(0),
    lambda: Buckets.every(0, 4),
    lambda: Buckets.fit({}),
    *(
        functools.partial(cast(Any, Buckets), *args, **kwargs)
        for args, kwargs in (
            ((1.0, (4,)), {}),
            ((None, (4,)), {}),
            (((0, 0), ((4,), (8,))), {}),
            (((0, 1), 4), {}),
            ((0, 4), {}),
            ((0, {4: 1}), {}),
            ((0, (4,)), {"dims": {"x": -1}}),
            ((0, (4,)), {"dims": {"x": 1.5}}),
            ((0, (4,)), {"dims": {1.0: 0}}),
            ((0, (4,)), {"dims": ["x"]}),
            ((0, (4,)), {"pad": {"x": "a"}}),
            ((0, (4,)), {"pad": 0}),
            ((0, (4,)), {"outputs": {0: -1}}),
            ((0, (4,)), {"outputs": {"y": 0}}),
            ((0, (4,)), {"independent": "no"}),
        )
    ),
    *(
        functools.partial(cast(Any, Buckets.fit), given, **kwargs)
        for given, kwargs in (
            (None, {}),
            ([1, 2], {}),
            ({4: "2"}, {}),
            ({4: -2}, {}),
            ({4: math.nan}, {}),
            ({4: math.inf}, {}),
            ({4.0: 2}, {}),
            ({-4: 2, 5: 1}, {}),
            ({(1, 2): 3}, {}),
            ({(1, 2): 3}, {"dim": (0, 1, 2)}),
            ({(1, 2): 3, 4: 1}, {"dim": (0, 1)}),
            ({(1, 2.5): 3}, {"dim": (0, 1)}),
            ({(1, 2): "3"}, {"dim": (0, 1)}),
            ({(0, 2): 3}, {"dim": (0, 1)}),
            (None, {"dim": (0, 1)}),
            ({4: 2}, {"max_sizes": 0}),
            ({4: 2}, {"max_sizes": 1.5}),
        )
    ),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_what_makes_no_sense_is_refused(index: int) -> None:
    with pytest.raises(ol.ArgumentError) as caught:
        BAD[index]()
    assert caught.value.code == "OL401"


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ol.ArgumentError, match="buckets="):
        ol.graph(torch.sin, buckets=(1, 2))  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ol.ArgumentError, match="static"):
        ol.graph(torch.sin, buckets=Buckets(0, (4,)), outputs="static")


def masked(x: Tensor, /, mask: Tensor, *, lengths: Tensor) -> Tensor:
    return x * mask


class Masked(torch.nn.Module):
    def forward(self, x: Tensor, mask: Tensor, *, lengths: Tensor) -> Tensor:
        return x * mask


@pytest.mark.parametrize("fn", [masked, Masked(), Masked().forward])
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"pad": {"lenghts": 0}}, "pad={'lengths': ...}"),
        ({"dims": {"X": None}}, "its parameters are x, mask, lengths"),
        ({"dims": {"self": None}}, "no argument 'self'"),
        ({"dims": {9: 0}}, "no argument 9, which dims names"),
        ({"dims": {2: 0}}, "no argument 2"),
        ({"pad": {-1: 0}}, "no argument -1"),
        ({"pad": {"x['mask']": 0}}, "args[0]"),
    ],
)
def test_an_argument_that_there_is_not(fn: Any, said: Any, message: str) -> None:
    with pytest.raises(ol.ArgumentError) as caught:
        ol.graph(fn, buckets=Buckets(0, (4,), **said))
    assert caught.value.code == "OL401"
    assert message in str(caught.value)


def test_arguments_that_there_are_or_may_be() -> None:
    keys = ("x", "mask", "lengths", 0, 1, "args[0]['x']", "kwargs['x'][0]")
    for fn in (masked, Masked()):
        ol.graph(fn, buckets=Buckets(0, (4,), pad=dict.fromkeys(keys, 0)))
    named = Buckets(0, (4,), dims={"anything": 0})
    placed = Buckets(0, (4,), dims={9: 0})
    ol.graph(lambda **rest: rest, buckets=named)
    ol.graph(lambda *rest: rest, buckets=placed)
    ol.graph(functools.partial(masked, lengths=torch.ones(1)), buckets=Buckets(0, (4,), pad={1: 0}))
    for buckets in (named, placed):
        ol.graph(torch.sin, buckets=buckets)
        with pytest.raises(ol.ArgumentError, match="OL401"):
            ol.graph(lambda: 1, buckets=buckets)
    with pytest.raises(ol.ArgumentError, match="anything"):
        ol.graph(lambda *rest: rest, buckets=named)


def ragged(**options: Any) -> Ragged:
    given: dict[str, Any] = {
        "sizes": {"nodes": (4, 8), "edges": (16,)},
        "dims": {"x": "nodes", "edges": (None, "edges")},
        "index": {"edges": "nodes"},
    }
    return Ragged(**given | options)


def test_ragged_sizes_leave_a_row_of_what_is_named() -> None:
    buckets = ragged()
    assert [buckets.choose((n, 16)) for n in (1, 3, 4, 7, 8)] == [
        (4, 16), (4, 16), (8, 16), (8, 16), None,
    ]  # fmt: skip
    assert (buckets.smallest((4, 16)), buckets.smallest((8, 16))) == ((1, 1), (4, 1))
    assert (buckets.most((8, 16)), buckets.largest) == ((7, 16), (7, 16))
    assert buckets.dims == {"x": ((0,), None), "edges": (None, (1,))}
    assert copy.deepcopy(buckets) == buckets


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": {}},
        {"sizes": (4, 8)},
        {"sizes": {"nodes": (1, 8), "edges": (16,)}},
        {"sizes": {"nodes": (0, 8), "edges": (16,)}},
        {"dims": {}},
        {"dims": {"x": "vertices", "edges": "edges"}},
        {"dims": {"x": 0, "edges": "edges"}},
        {"dims": {"x": "nodes"}},
        {"index": {"edges": "vertices"}},
        {"index": {"e": "nodes"}},
        {"index": "edges"},
        {"pad": {"edges": 0}},
        {"overflow": "chunk"},
    ],
)
def test_ragged_sizes_that_are_not_valid(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="OL401"):
        ragged(**options)
