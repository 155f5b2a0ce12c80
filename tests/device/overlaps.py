"""A check of a final graph: two nodes that may run at the same time share no byte, unless both only
read it. It goes by the edges alone, and knows nothing of how they were found.

compute-sanitizer's racecheck looks within one kernel, and does not see this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from typing import Any

from onelaunch.driver.edges import NodeGroup


def clashes(groups: Sequence[NodeGroup], edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs of groups that may run at the same time and must not.

    Args:
        edges: between numbers of nodes, each from the node that comes first.
    """
    before: dict[int, list[int]] = {}
    for first, then in edges:
        before.setdefault(then, []).append(first)
    behind = [0] * (groups[-1].last if groups else 0)  # a bit for each node that comes before
    for node in TopologicalSorter(before).static_order():
        for other in before.get(node, ()):
            behind[node] |= behind[other] | 1 << other
    found: list[tuple[int, int]] = []
    for one, other in sorted(_conflicts(groups)):
        last, first = groups[one].last - 1, groups[other].first
        if not behind[first] >> last & 1:
            found.append((one, other))
    for number, group in enumerate(groups):  # the nodes of one operation stay a chain
        for node in range(group.first + 1, group.last):
            if not behind[node] >> (node - 1) & 1:
                found.append((number, number))
    return found


def _conflicts(groups: Sequence[NodeGroup]) -> Iterator[tuple[int, int]]:
    """Pairs of groups, the earlier first, that have to keep their order."""
    unknown = [number for number, group in enumerate(groups) if group.accesses is None]
    for number in unknown:
        for other in range(len(groups)):
            if other != number:
                yield min(number, other), max(number, other)
    spans = sorted(
        (a.start, a.stop, n, a.writes) for n, g in enumerate(groups) for a in g.touched()
    )
    alive: list[tuple[int, int, bool]] = []
    seen: set[tuple[int, int]] = set()
    for start, stop, number, writes in spans:
        alive = [span for span in alive if span[0] > start]
        for _, other, wrote in alive if stop > start else ():
            pair = min(number, other), max(number, other)
            if other != number and (writes or wrote) and pair not in seen:
                seen.add(pair)
                yield pair
        alive.append((stop, number, writes))


def watch(monkeypatch: Any) -> list[int]:
    """Check every graph with branches from now on; returns the numbers of their groups."""
    from onelaunch.driver.cuda import branches, nodes
    from onelaunch.testing import lanes

    checked: list[int] = []
    connected, reorder = branches.Branches._connected, lanes.TapeLanes.reorder
    connect = nodes.connect

    def connected_and_checked(self: Any, parallel: Any) -> Any:
        def connect_and_check(graph: Any, of: Any) -> None:  # before a trial, which may be lost
            connect(graph, of)
            numbers = {node: number for number, node in enumerate(self._handles)}
            edges = [(numbers[a], numbers[b]) for a, b in nodes.edges(graph)]
            assert not clashes(self.groups, edges)
            checked.append(len(self.groups))

        with monkeypatch.context() as patch:
            patch.setattr(nodes, "connect", connect_and_check)
            return connected(self, parallel)

    def reordered_and_checked(self: Any) -> Any:
        groups = lanes.completed(self.groups, len(self._steps))
        number = {id(step): number for number, step in enumerate(self._steps)}
        found = reorder(self)
        # Of an order of steps the pairs that had to keep theirs are looked at.
        places = {number[id(step)]: place for place, step in enumerate(self._steps)}
        for one, other in _conflicts(groups):
            assert places[groups[one].last - 1] < places[groups[other].first], (one, other)
        checked.append(len(groups))
        return found

    monkeypatch.setattr(branches.Branches, "_connected", connected_and_checked)
    monkeypatch.setattr(lanes.TapeLanes, "reorder", reordered_and_checked)
    return checked
