"""The rule of a batcher: how many of the waiting requests to run now, and what that saves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

import onelaunch as ol
from benchmarks import batching, render

SIZES = st.sets(st.integers(1, 40), min_size=1, max_size=4).map(sorted)
WAITING = st.lists(st.integers(1, 50), max_size=12)
TIMES = st.sampled_from((0.1, 0.9, 1.0, 1.1, 2.0, 3.9, 50.0))


@st.composite
def timed(draw: st.DrawFn) -> tuple[ol.Buckets, dict[int, float]]:
    """Buckets, with times of all their sizes, some or none."""
    sizes = draw(SIZES)
    known = draw(st.sets(st.sampled_from(sizes)))
    return ol.Buckets(0, sizes), {size: draw(TIMES) for size in known}


@given(timed(), WAITING, st.floats(0, 20), st.floats(0, 20))
def test_batches_are_within_the_limits(
    case: tuple[ol.Buckets, dict[int, float]], waiting: list[int], waited: float, most: float
) -> None:
    buckets, times = case
    largest = buckets.largest[0]
    count = buckets.best(waiting, waited, max_wait_ms=most, times=times)
    assert 0 <= count <= len(waiting)
    rows = sum(waiting[:count])
    assert rows <= largest or count == 1, "never above the largest size, but a request that is"
    if waiting and waited >= most:
        assert count, "never longer than max_wait_ms"
    if sum(waiting) >= largest:
        assert count, "the largest size is full"
    assert count == buckets.best(iter(waiting), waited, max_wait_ms=most, times=times)


@given(timed(), WAITING)
def test_all_run_in_order_and_none_starves(
    case: tuple[ol.Buckets, dict[int, float]], waiting: list[int]
) -> None:
    buckets, times = case
    rest = list(enumerate(waiting))
    order: list[int] = []
    while rest:
        count = buckets.best([rows for _, rows in rest], 1, max_wait_ms=1, times=times)
        assert count >= 1
        order += [number for number, _ in rest[:count]]
        rest = rest[count:]
    assert order == list(range(len(waiting)))


@given(SIZES, st.data(), st.integers(1, 100))
def test_no_batch_is_cheaper_per_row(sizes: list[int], data: st.DataObject, waiting: int) -> None:
    times = {size: data.draw(TIMES) for size in sizes}
    buckets = ol.Buckets(0, sizes)

    def price(rows: int) -> float:
        return times[min(s for s in sizes if s >= rows)] / rows

    count = buckets.best(waiting, 0, max_wait_ms=0, times=times)
    least = min(price(rows) for rows in range(1, min(waiting, sizes[-1]) + 1))
    assert price(count) <= least * (1 + 1e-6)


@given(SIZES, st.integers(1, 100))
def test_without_times_the_fullest_exact_size_runs(sizes: list[int], waiting: int) -> None:
    count = ol.Buckets(0, sizes).best(waiting, 0, max_wait_ms=0)
    exact = [size for size in sizes if size <= waiting]
    assert count == (max(exact) if exact else waiting)


def best(waiting: int | Sequence[int], waited: float, times: dict[int, float] | None = None) -> int:
    return ol.Buckets(0, (2, 4, 8)).best(waiting, waited, max_wait_ms=5, times=times)


def test_it_waits_while_a_fuller_batch_would_be_cheaper() -> None:
    flat = {2: 1.0, 4: 1.02, 8: 1.1}
    assert best(4, 4.9, flat) == 0
    assert best(4, 5.0, flat) == 4
    assert best(7, 5.0, flat) == 7, "padding to 8 costs less per row than 4"
    assert best(8, 0.0, flat) == 8
    assert best(30, 0.0, flat) == 8
    assert best(0, 9.0, flat) == 0


def test_it_runs_at_once_where_waiting_gains_nothing() -> None:
    linear = {2: 1.0, 4: 2.0, 8: 3.9}
    assert best(2, 0.0, linear) == 2
    assert best(3, 0.0, linear) == 2
    assert best(1, 0.0, linear) == 0, "half of it would be padding"
    assert best(2, 0.0, {2: 1.0}) == 0, "the others have no time yet"
    assert best(2, 0.0) == 0


def test_a_size_without_a_time_gets_the_nearest() -> None:
    assert best(5, 9.0, {8: 1.0}) == 4, "in proportion, only exact sizes are cheapest"
    assert best(5, 9.0, {2: 1.0, 4: 1.0}) == 4
    assert best(3, 9.0, {2: 1.0, 4: 1.1}) == 3


def test_requests_of_several_rows_stay_whole() -> None:
    assert best([3, 3, 3], 9.0) == 2, "6 in 8, of 3 in 4 the same"
    assert best([1, 8], 9.0) == 1
    assert best([9, 1], 0.0) == 1, "larger than the largest: alone"
    assert best(itertools.repeat(1), 0.0) == 8


def test_simulated_batches_are_padded_half_as_much() -> None:
    """Where a row takes time, as the whole figures in benchmarks/results show."""
    found = batching.figures(3000)
    for row in found["rows"]:
        rules = row["rules"]
        assert rules["batcher"]["padding"] <= rules["padded"]["padding"] + 0.01
        if row["times"] != "the launch":
            assert rules["batcher"]["padding"] <= rules["fixed"]["padding"] / 2
            assert rules["batcher"]["p50 ms"] <= rules["fixed"]["p50 ms"]
    assert render.batching(found).count("\n| ") == len(found["rows"]) + 1
