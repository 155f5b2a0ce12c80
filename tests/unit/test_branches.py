"""The choice of a graph's edges, with a graph of Python's in the place of a device's."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onelaunch.driver.cuda import branches, lanes, trial
from onelaunch.driver.cuda.memory import joined
from onelaunch.driver.edges import Access, NodeGroup

Edges = dict[tuple[int, int], int]
FIRST, EARLY = 1 << 40, 0x01_0001
"""The address of the memory that the nodes touch, and the data of an edge of a dependent launch."""


class Graph:
    """A graph of `count` nodes, a chain as it is captured: with edges that start a kernel early.

    Attributes:
        executables: the edges of each executable, the graph's own first; None: it is gone.
        switched: the executables whose nodes were turned off and on.
    """

    def __init__(self, count: int, early: bool) -> None:
        self.handles = [100 + n for n in range(count)]
        self.captured = dict.fromkeys(pairwise(self.handles), EARLY if early else 0)
        self.edges: Edges = dict(self.captured)
        self.executables: list[Edges | None] = [dict(self.captured)]
        self.switched: list[Edges | None] = []
        self.tried: list[Edges | None] = []

    def raw_cuda_graph(self) -> int:
        return 7

    def raw_cuda_graph_exec(self) -> int:
        return 0

    def instantiate(self) -> None:
        self.executables[0] = dict(self.edges)

    def connect(self, graph: int, edges: Mapping[tuple[int, int], int]) -> None:
        self.edges = dict(edges)

    @contextmanager
    def instantiated(self, graph: int) -> Generator[int]:
        self.executables.append(dict(self.edges))
        number = len(self.executables) - 1
        yield number
        self.executables[number] = None


def settled(
    monkeypatch: pytest.MonkeyPatch,
    graph: Graph,
    groups: list[NodeGroup],
    parallel: Any,
    times: list[float],
) -> Any:
    """Give a graph its edges; the chain and the orders that are tried take these times."""
    found = SimpleNamespace(
        handles=lambda raw: graph.handles,
        edges=lambda raw: graph.edges,
        connect=graph.connect,
        instantiated=graph.instantiated,
        is_device_memory=lambda word: True,
    )

    def tried(executables: list[int], ports: list[int], index: int) -> list[float]:
        graph.tried = [graph.executables[e] for e in executables]
        assert ports == graph.handles[:1]
        return times[: len(executables)]

    def workspaces(groups: Any, handles: Any, executable: int, blocks: Any, device: Any) -> Any:
        graph.switched.append(graph.executables[executable])
        return SimpleNamespace(share=lambda: None)

    launches = SimpleNamespace(
        times=tried, fits=lambda spans, index: True, preserved=lambda spans, index: nullcontext()
    )
    monkeypatch.setattr(branches, "nodes", found)
    monkeypatch.setattr(branches, "trial", launches)
    monkeypatch.setattr(branches, "Workspaces", workspaces)
    made: Any = branches.Branches(graph, 0, groups, [], {graph.handles[0]}, True)  # pyright: ignore
    made.chain()
    assert graph.edges == graph.captured
    return made.settle(parallel)


def wide(count: int) -> list[NodeGroup]:
    """A node that all others wait for."""
    groups = [NodeGroup(0, 1, [Access(FIRST, FIRST + 1, True)], "first")]
    for n in range(1, count):
        own = Access(FIRST + n, FIRST + n + 1, True)
        groups.append(NodeGroup(n, n + 1, [Access(FIRST, FIRST + 1, False), own], f"{n}"))
    return groups


def chain(count: int) -> list[NodeGroup]:
    return [NodeGroup(n, n + 1, [Access(FIRST, FIRST + 1, True)]) for n in range(count)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("parallel", [True, "auto"])
def test_a_chain_stays_as_it_was_captured(
    monkeypatch: pytest.MonkeyPatch, early: bool, parallel: Any
) -> None:
    graph = Graph(9, early)
    assert settled(monkeypatch, graph, chain(9), parallel, []) is None
    assert graph.edges == graph.captured == graph.executables[0]


@pytest.mark.parametrize("early", [False, True])
def test_no_kernel_starts_early_among_branches(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    graph = Graph(9, early)
    found = settled(monkeypatch, graph, wide(9), True, [])
    assert (found.nodes, found.longest, found.width, found.gain) == (9, 2, 8, None)
    first, *others = graph.handles
    assert graph.edges == {(first, other): 0 for other in others} == graph.executables[0]
    (switched,) = graph.switched
    assert switched is not None
    assert set(switched.values()) == {0}  # no early edge where nodes are turned off
    assert graph.executables[1:] == [None] * early


@pytest.mark.parametrize("early", [False, True])
def test_the_chain_that_is_faster_is_the_captured_one(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    graph = Graph(9, early)
    assert settled(monkeypatch, graph, wide(9), "auto", [1.0, 0.99]) is None
    assert graph.edges == graph.captured == graph.executables[0] == graph.tried[0]
    assert set(graph.executables[1:]) == {None}


def beside(count: int, other: int) -> list[NodeGroup]:
    """A chain, and nodes that wait for nothing."""
    apart = [Access(FIRST + 9 + n, FIRST + 10 + n, True) for n in range(other)]
    groups = [NodeGroup(count + n, count + n + 1, [own]) for n, own in enumerate(apart)]
    return [*chain(count), *groups]


@pytest.mark.parametrize("fastest", [1, 2, 3, 4])
def test_fewer_lanes_where_they_are_faster(monkeypatch: pytest.MonkeyPatch, fastest: int) -> None:
    graph, times = Graph(40, early=True), [1.0, 0.5, 0.5, 0.5, 0.5]
    times[fastest] = 0.25
    found = settled(monkeypatch, graph, beside(10, 30), "auto", times)
    assert found.gain == 4
    assert graph.edges == graph.tried[fastest] == graph.executables[0]
    assert (found.width, found.longest) == ([31, 4, 8, 16][fastest - 1], 10)


def test_a_trial_points_the_ports_before_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[int, int]] = []  # executable, and a port or 0 for the launch
    took = {1: 3, 2: 1}  # executable -> steps of the clock

    def launch(executable: int, stream: int) -> tuple[int]:
        log.append((executable, 0))
        clock.now += took[executable] * 1e-4
        return (0,)

    clock = SimpleNamespace(now=0.0)
    stream = SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(trial, "perf_counter", lambda: clock.now)
    found = SimpleNamespace(
        kind=lambda node: "MEMCPY" if node == 7 else "KERNEL",
        CopyNode=lambda node: SimpleNamespace(setter=lambda executable: (executable, node)),
        KernelNode=SimpleNamespace(
            read=lambda node: SimpleNamespace(setter=lambda executable: (executable, node))
        ),
        apply=log.extend,
        launcher=lambda executable: (launch, executable),
        stream_handle=lambda raw: raw,
    )
    monkeypatch.setattr(trial, "nodes", found)
    assert trial.times([1, 2], [7, 8], 0) == pytest.approx([0.3, 0.1])
    calls = [log[at : at + 3] for at in range(0, len(log), 3)]
    assert {tuple(call) for call in calls} == {((e, 7), (e, 8), (e, 0)) for e in (1, 2)}
    assert calls.count(calls[0]) - calls.count([(2, 7), (2, 8), (2, 0)]) == 1  # to tell how many


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8)


@given(SPANS, st.integers(0, 30), st.integers(1, 6))
def test_spans_that_overlap_are_joined(spans: list[tuple[int, int]], start: int, size: int) -> None:
    found = joined((first, first + length) for first, length in spans)
    inside = {at for first, length in spans for at in range(first, first + length)}
    assert found.nbytes == len(inside)
    asked = range(start, start + size)
    assert found.overlaps(start, start + size) == bool(inside & set(asked))
    if found.contains(start, start + size):
        assert inside.issuperset(asked)
    if any(first <= start and start + size <= first + length for first, length in spans):
        assert found.contains(start, start + size)


@given(SPANS, st.integers(0, 40))
def test_all_blocks_around_an_address(spans: list[tuple[int, int]], word: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(lanes.nodes, "address_range", lambda word: None)
        found = lanes._Blocks(spans).around(word)
    around = [(a, a + n) for a, n in spans if a <= word < a + n]
    bounds = [*zip(*around, strict=True)]
    assert found == ((min(bounds[0]), max(bounds[1])) if around else None)
