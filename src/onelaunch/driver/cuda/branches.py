"""The true edges of a captured graph, where they pay."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from onelaunch.beside import is_beside
from onelaunch.driver.cuda import nodes, trial
from onelaunch.driver.cuda.lanes import LEAST_ADDRESS
from onelaunch.driver.cuda.memory import joined
from onelaunch.driver.cuda.workspaces import Workspaces
from onelaunch.driver.edges import Dependencies, NodeGroup
from onelaunch.driver.schedule import Parallel, Schedule

LEAST_GAIN = 1.02  # the gain from which branches replace the chain under ``"auto"``
_WORTH = 0.95  # the longest chain, as a part of all nodes, above which a recording stays a chain
_WIDTHS = 4, 8, 16  # the numbers of lanes to try besides as many as there may be
_LONGER = 1.3  # the most that fewer lanes may lengthen the longest chain by, to be tried


@dataclass
class Branches:
    """The operations of a graph that is a chain so far."""

    graph: torch.cuda.CUDAGraph
    index: int
    groups: list[NodeGroup]  # the nodes of each operation
    blocks: list[tuple[int, int]]  # the (address, bytes) of each block that the capture allocated
    ports: set[int]  # the nodes that bring inputs in and take outputs out
    runnable: bool  # false if no part of it may run before its first launch
    _handles: list[int] = field(init=False)
    _early: dict[tuple[int, int], int] = field(init=False)
    """The edges of kernels that start while the one before ends, with their data."""

    def __post_init__(self) -> None:
        raw = self.graph.raw_cuda_graph()
        self._handles = nodes.handles(raw)
        self._early = {edge: data for edge, data in nodes.edges(raw).items() if data}

    def chain(self) -> None:
        """Let each node wait for the one before it, as it was captured."""
        chain = {edge: self._early.get(edge, 0) for edge in pairwise(self._handles)}
        nodes.connect(self.graph.raw_cuda_graph(), chain)

    def settle(self, parallel: Parallel) -> Schedule | None:
        """Give the graph its edges, and instantiate it, unless the chain is as good. Return the
        lanes. Runs on the current stream, with the tensors that the ports point at. Memory is
        afterwards as it was, but for what the capture allocated."""
        narrow = [replace(group, hidden=[]) for group in self.groups]
        if not _worth(Dependencies(narrow)):
            return None
        lasting = self._lasting() if self.runnable and not is_beside() else None
        if lasting is None or not trial.fits(lasting, self.index):
            return None if parallel == "auto" else self._connected(parallel)
        with trial.preserved(lasting, self.index):
            device = torch.device("cuda", self.index)
            with self._plain() as executable:
                Workspaces(self.groups, self._handles, executable, self.blocks, device).share()
            return self._connected(parallel)

    @contextmanager
    def _plain(self) -> Generator[int]:
        """Yield an executable of the chain, without early kernels, to turn nodes off."""
        if not self._early:
            yield self.graph.raw_cuda_graph_exec()
            return
        nodes.connect(self.graph.raw_cuda_graph(), dict.fromkeys(pairwise(self._handles), 0))
        try:
            with nodes.instantiated(self.graph.raw_cuda_graph()) as executable:
                yield executable
        finally:
            self.chain()

    def _connected(self, parallel: Parallel) -> Schedule | None:
        order = Dependencies(self.groups)
        if not _worth(order):
            return None
        gain = None
        if parallel == "auto":
            order, gain = self._fastest([order, *_narrowed(order)])
            if gain < LEAST_GAIN:
                self.chain()
                return None
        self._connect(order)
        self.graph.instantiate()
        return replace(order.schedule(), gain=gain)

    def _connect(self, order: Dependencies) -> None:
        """Give the graph the edges of an order. No kernel starts early there: a program's own may
        wait for the kernel before alone, which is right in the order of one stream only."""
        handles = self._handles
        edges = ((handles[a], handles[b]) for a, b in order.edges())
        nodes.connect(self.graph.raw_cuda_graph(), dict.fromkeys(edges, 0))

    def _fastest(self, orders: Sequence[Dependencies]) -> tuple[Dependencies, float]:
        """Return the order that runs fastest, and its gain over the chain."""
        with ExitStack() as stack:
            executables = [self.graph.raw_cuda_graph_exec()]
            for order in orders:
                self._connect(order)
                executable = nodes.instantiated(self.graph.raw_cuda_graph())
                executables.append(stack.enter_context(executable))
            ports = [node for node in self._handles if node in self.ports]
            chain, *others = trial.times(executables, ports, self.index)
        best = min(others)
        return orders[others.index(best)], chain / best

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
        own = joined((start, start + nbytes) for start, nbytes in self.blocks)
        lasting = [
            (start, stop)
            for start, stop in sorted(spans)
            if LEAST_ADDRESS <= start < stop and not own.contains(start, stop)
        ]
        return lasting if all(nodes.is_device_memory(start) for start, _ in lasting) else None


def _narrowed(order: Dependencies) -> list[Dependencies]:
    """Return orders with fewer lanes and not a much longer chain: many take the host longer to
    launch. No node is known to last longer than another."""
    width = order.schedule().width
    orders = [order.narrowed(fewer) for fewer in _WIDTHS if fewer < width]
    return [narrow for narrow in orders if narrow.longest <= _LONGER * order.longest]


def _worth(order: Dependencies) -> bool:
    return order.longest <= _WORTH * order.nodes
