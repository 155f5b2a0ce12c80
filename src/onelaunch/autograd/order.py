"""The order in which a backward reaches leaves, whose hooks are Python that may notice it.

The node of a recording has all gradients at once, and the engine would choose its own order of
leaves. So leaves with hooks hang behind nodes of views, made in eager's order from last to first.
The engine first runs the ready node that was made last.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from torch import Tensor

from onelaunch.autograd.graph_walk import AccumulateGrad
from onelaunch.state.hooks import Hooked, has_hooks
from onelaunch.state.slots import is_leaf

Node = Any


class InOrder:
    """The inputs of a recording's node, in each call. `outputs`: the results where the captured
    graph begins. `ends`: the leaves where it ends, in the order of the inputs. `parameters`: the
    inputs that are the same in each call, which come last."""

    def __init__(
        self, outputs: Sequence[Tensor], ends: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> None:
        self._outputs, self._ends, self._parameters = outputs, ends, parameters
        self._hooked = Hooked(parameters)
        self._order: list[int] | None = None
        """Positions of the inputs in the order in which eager's backward reaches them."""

    def of(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the inputs of the node. If a leaf has hooks, all leaves are behind views."""
        leaves = [*arguments, *self._parameters]
        if not (self._hooked() or any(map(has_hooks, arguments))):
            return leaves
        if self._order is None:
            places = {id(t): place for place, t in enumerate(self._ends[: len(leaves)])}
            order = (places.get(id(t)) for t in leaves_in_order(self._outputs))
            self._order = [place for place in order if place is not None]
        for place in reversed(self._order):
            if is_leaf(leaves[place]):
                leaves[place] = leaves[place].view_as(leaves[place])
        return leaves


def leaves_in_order(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves behind outputs, in the order in which a backward reaches them."""
    roots = list(dict.fromkeys(t.grad_fn for t in outputs if t.grad_fn is not None))
    waits = _edges_to(roots)
    ready: list[_Ready] = []
    for node in roots:
        if not waits[node]:
            heappush(ready, _Ready(node._sequence_nr(), node))
    leaves: list[Tensor] = []
    while ready:
        node = heappop(ready).node
        if isinstance(node, AccumulateGrad):
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None:
                waits[following] -= 1
                if not waits[following]:
                    heappush(ready, _Ready(following._sequence_nr(), following))
    return leaves


def _edges_to(roots: Sequence[Node]) -> dict[Node, int]:
    """Return node -> number of edges to it from nodes behind the roots."""
    count = dict.fromkeys(roots, 0)
    stack = list(roots)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None:
                continue
            if following not in count:
                count[following] = 0
                stack.append(following)
            count[following] += 1
    return count


class _Ready(NamedTuple):
    """A node that the engine may run. `heapq` makes the moves of C++'s `std::priority_queue`, which
    decide between nodes of equal rank, such as leaves."""

    number: int
    node: Node

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        """Return whether this node goes first: greater sequence numbers do."""
        return self.number > other[0]
