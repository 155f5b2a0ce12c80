"""The order of a recording's operations by the memory that they touch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onelaunch as ol
from onelaunch.driver import edges
from onelaunch.driver.edges import Access, Dependencies, NodeGroup, completed
from onelaunch.driver.schedule import packed
from onelaunch.testing.lanes import shuffled
from tests.device.overlaps import clashes

ACCESSES = st.lists(
    st.builds(
        lambda start, length, writes: Access(start, start + length, writes),
        st.integers(0, 12),
        st.integers(1, 5),
        st.booleans(),
    ),
    max_size=3,
)
SHAPES = st.lists(
    st.tuples(st.integers(1, 3), st.one_of(ACCESSES, ACCESSES, ACCESSES, st.none())), max_size=14
)


def groups_of(shapes: list[tuple[int, list[Access] | None]]) -> list[NodeGroup]:
    ends = [0, *itertools.accumulate(count for count, _ in shapes)]
    return [
        NodeGroup(first, last, accesses)
        for (first, last), (_, accesses) in zip(itertools.pairwise(ends), shapes, strict=True)
    ]


def behind(order: Dependencies) -> list[set[int]]:
    """For each group all groups that come before it."""
    found: list[set[int]] = []
    for waits in order.waits:
        found.append(set(waits).union(*(found[i] for i in waits)))
    return found


def conflict(a: NodeGroup, b: NodeGroup) -> bool:
    if a.accesses is None or b.accesses is None:
        return True
    return any(
        set(range(x.start, x.stop)) & set(range(y.start, y.stop)) and (x.writes or y.writes)
        for x in a.accesses
        for y in b.accesses
    )


@given(SHAPES)
@settings(max_examples=400, deadline=None)
def test_exactly_what_conflicts_is_ordered(shapes: list[tuple[int, list[Access] | None]]) -> None:
    groups = groups_of(shapes)
    order = Dependencies(groups)
    before: list[set[int]] = []
    for number, group in enumerate(groups):
        direct = {i for i in range(number) if conflict(groups[i], group)}
        before.append(direct.union(*(before[i] for i in direct)))
    assert behind(order) == before
    lengths: list[int] = []
    for group, earlier in zip(groups, before, strict=True):
        longest = max((lengths[i] for i in earlier), default=0)
        lengths.append(longest + group.last - group.first)
    assert order.longest == max(lengths, default=0)


@given(SHAPES)
@settings(max_examples=200, deadline=None)
def test_edges_and_another_order(shapes: list[tuple[int, list[Access] | None]]) -> None:
    groups = groups_of(shapes)
    order = Dependencies(groups)
    edges = set(order.edges())
    assert all(a < b for a, b in edges)
    reach: dict[int, set[int]] = {}
    for node in range(order.nodes):
        direct = {a for a, b in edges if b == node}
        reach[node] = direct.union(*(reach[a] for a in direct))
        for a in direct:  # no edge that others imply
            assert not any(a in reach[other] for other in direct if other != a)
    found = shuffled(order)
    assert sorted(found) == list(range(len(groups)))
    places = {number: place for place, number in enumerate(found)}
    for number, waits in enumerate(order.waits):
        assert all(places[other] < places[number] for other in waits)


@given(SHAPES)
@settings(max_examples=200, deadline=None)
def test_each_missing_edge_is_found(shapes: list[tuple[int, list[Access] | None]]) -> None:
    """No edge of a graph is needless, so the check of final graphs misses each one."""
    groups = groups_of(shapes)
    every = list(Dependencies(groups).edges())
    assert clashes(groups, every) == []
    for edge in every:
        assert clashes(groups, [other for other in every if other != edge])


@given(SHAPES, st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_a_narrowed_order(shapes: list[tuple[int, list[Access] | None]], width: int) -> None:
    """Nothing is lost, no more run at the same time, and no time is wasted: the longest chain is as
    long as the work of all lanes and the longest chain before allow."""
    groups = groups_of(shapes)
    order = Dependencies(groups)
    narrow = order.narrowed(width)
    assert sorted(g.first for g in narrow.groups) == [g.first for g in groups]
    assert clashes(groups, list(narrow.edges())) == []
    numbers, ordered = range(len(groups)), behind(narrow)
    for some in itertools.combinations(numbers, width + 1):
        pairs = itertools.combinations(some, 2)
        assert any(one in ordered[other] for one, other in pairs)
    assert narrow.schedule().width <= width
    assert order.longest <= narrow.longest
    rest = order.longest * (width - 1) / width
    assert narrow.longest <= order.nodes / width + rest  # Graham's bound
    if width >= len(groups):
        assert narrow.longest == order.longest


def test_wide_work_is_packed_without_loss() -> None:
    """24 chains of one, two and three nodes beside a chain of 40, in two lanes."""
    lengths, waits = [1] * 88, [[n - 1] if n else [] for n in range(40)]
    for size in (1, 2, 3) * 8:
        first = len(waits)
        waits += [[n - 1] if n > first else [] for n in range(first, first + size)]
    order, before = packed(lengths, waits, 3)
    assert sorted(order) == list(range(88))
    ends: dict[int, int] = {}
    for number in order:
        ends[number] = 1 + max((ends[b] for b in (*waits[number], *before[number])), default=0)
    assert max(ends.values()) == 40


@pytest.mark.parametrize("accesses", [None, [Access(0, 1, True)]])
def test_nodes_of_no_operation_are_barriers(accesses: list[Access] | None) -> None:
    groups = completed([NodeGroup(1, 3, accesses), NodeGroup(4, 5, accesses)], 7)
    spans = [(g.first, g.last, g.accesses) for g in groups]
    assert spans == [
        *((0, 1, None), (1, 3, accesses), (3, 4, None)),
        *((4, 5, accesses), (5, 7, None)),
    ]
    assert Dependencies(groups).longest == 7


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program frees memory that is kept, as FSDP does."""
    monkeypatch.setattr(edges, "SPARE_BYTES", 100)
    kept, tensors = edges.Kept(), [torch.zeros(10) for _ in range(6)]
    kept.keep(tensors[:2])
    kept.keep([tensors[0][2:], tensors[1]])  # views, and again
    assert [memory.data_ptr() for memory, _ in kept._memory.values()] == [
        t.data_ptr() for t in tensors[:2]
    ]
    tensors[0].untyped_storage().resize_(0)
    for t in tensors:
        kept.keep([t])
    assert 0 < kept._nbytes <= 100
    kept.keep([torch.zeros(1000)])
    assert kept._nbytes == 0 == len(kept._memory)


def test_the_option_is_checked() -> None:
    with pytest.raises(ol.ArgumentError, match="parallel"):
        ol.graph(lambda x: x, parallel="wide")  # pyright: ignore
