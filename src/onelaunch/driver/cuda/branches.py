"""The true edges of a captured graph, where they pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from onelaunch.driver.cuda import nodes, trial
from onelaunch.driver.cuda.lanes import LEAST_ADDRESS
from onelaunch.driver.cuda.workspaces import Workspaces
from onelaunch.driver.edges import Dependencies, NodeGroup
from onelaunch.driver.schedule import Parallel, Schedule
from onelaunch.driver.select import is_beside

LEAST_GAIN = 1.02
"""The gain from which branches replace the chain under ``"auto"``."""
_WORTH = 0.95
"""The longest chain, as a part of all nodes, above which a recording stays a chain."""


@dataclass
class Branches:
    """The operations of a graph that is a chain so far.

    Attributes:
        groups: the nodes of each operation.
        blocks: the (address, bytes) of each block that the capture allocated.
        ports: the nodes that bring inputs in and take outputs out.
        runnable: false if no part of it may run before its first launch.
    """

    graph: torch.cuda.CUDAGraph
    index: int
    groups: list[NodeGroup]
    blocks: list[tuple[int, int]]
    ports: set[int]
    runnable: bool
    _handles: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._handles = nodes.handles(self.graph.raw_cuda_graph())

    def chain(self) -> None:
        """Let each node wait for the one before it."""
        nodes.connect(self.graph.raw_cuda_graph(), [*pairwise(self._handles)])

    def settle(self, parallel: Parallel) -> Schedule | None:
        """Give the graph its edges, and instantiate it, unless the chain is as good. Return the
        lanes. Runs on the current stream, with the tensors that the ports point at. Memory is
        afterwards as it was, but for what the capture allocated.
        """
        narrow = [replace(group, hidden=[]) for group in self.groups]
        if not _worth(Dependencies(narrow)):
            return None
        lasting = self._lasting() if self.runnable and not is_beside() else None
        if lasting is None or not trial.fits(lasting, self.index):
            return None if parallel == "auto" else self._connected(parallel)
        with trial.preserved(lasting, self.index):
            executable = self.graph.raw_cuda_graph_exec()
            device = torch.device("cuda", self.index)
            Workspaces(self.groups, self._handles, executable, self.blocks, device).share()
            return self._connected(parallel)

    def _connected(self, parallel: Parallel) -> Schedule | None:
        order = Dependencies(self.groups)
        if not _worth(order):
            return None
        raw, handles = self.graph.raw_cuda_graph(), self._handles
        nodes.connect(raw, [(handles[a], handles[b]) for a, b in order.edges(self.groups)])
        found = order.schedule(self.groups)
        if parallel == "auto":
            executable = nodes.instantiated(raw)
            try:
                gain = trial.gain(self.graph.raw_cuda_graph_exec(), executable, self.index)
            finally:
                nodes.destroy_executable(executable)
            if gain < LEAST_GAIN:
                self.chain()
                return None
            found = replace(found, gain=gain)
        self.graph.instantiate()
        return found

    def _lasting(self) -> list[tuple[int, int]] | None:
        """List the addresses that the graph may write and that it did not allocate; None if they
        are not known, or the host's."""
        others: list[NodeGroup] = []
        for group in self.groups:
            if not self.ports.issuperset(self._handles[group.first : group.last]):
                others.append(group)
        if any(group.accesses is None for group in others):
            return None
        spans = {(a.start, a.stop) for g in others for a in g.touched() if a.writes}
        own = [(start, start + nbytes) for start, nbytes in self.blocks]
        found = [
            (start, stop)
            for start, stop in sorted(spans)
            if LEAST_ADDRESS <= start < stop and not _inside(start, stop, own)
        ]
        return found if all(nodes.is_device_memory(start) for start, _ in found) else None


def _inside(start: int, stop: int, blocks: Sequence[tuple[int, int]]) -> bool:
    return any(first <= start and stop <= last for first, last in blocks)


def _worth(order: Dependencies) -> bool:
    return order.longest <= _WORTH * order.nodes
