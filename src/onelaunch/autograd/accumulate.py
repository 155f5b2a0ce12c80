"""Gradients that a backward adds to `.grad` directly, without the engine.

The engine spends 3 us for each parameter that is an input of a node: it follows the edge, visits
the AccumulateGrad node and guards its stream. Under ``gradients="direct"`` the node of a recording
has no edges to its parameters, and does the work of AccumulateGrad for all at once. A whole step
accumulates inside its recording: see `capture/effects.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from onelaunch.autograd.engine import accumulate
from onelaunch.autograd.named_leaves import (
    backward_id,
    edge_to,
    lead_to,
    named_leaves,
    refuse_hooks_run,
    wants,
    will_run,
)
from onelaunch.call.wrappers import is_wrapped
from onelaunch.state.hooks import Hooked, has_hooks, node_hooks
from onelaunch.state.slots import is_leaf

_INSIDE = "leaf variable has been moved into the graph interior"


def takes_directly(t: Tensor) -> bool:
    """Return whether `t` is a leaf without hooks on it or on its node."""
    return is_leaf(t) and not has_hooks(t) and not any(node_hooks([t]))


class Anchors:
    """Leaves that make a node part of every backward and never get a gradient. At the end of a
    backward the caller's stream waits for the leaves' streams. So each stream with forwards has an
    anchor. `leaves`: the direct leaves of the node."""

    def __init__(
        self, device: torch.device, stream: Callable[[], int], leaves: Sequence[Tensor]
    ) -> None:
        self._device = device
        self._stream = stream
        self._by_stream: dict[int, Tensor] = {}
        self.hooked = Hooked(leaves)  # a check whether a direct leaf has hooks by now
        if leaves:
            lead_to(leaves, self)

    def of_this_stream(self) -> Tensor:
        stream = self._stream()
        if stream not in self._by_stream:
            self._by_stream[stream] = torch.zeros((), device=self._device, requires_grad=True)
        return self._by_stream[stream]

    def all(self) -> Sequence[Tensor]:
        return list(self._by_stream.values())


def _is_backward(node: Any) -> bool:
    """Return whether the engine accumulates into all leaves, in a node over an anchor. It does not
    in `torch.autograd.grad` or under ``inputs=``."""
    return will_run(node.next_functions[0][0])


def wanted_gradients(node: Any, direct: Sequence[Tensor]) -> list[bool]:
    """Return whether the engine wants each gradient: of a node's inputs, then of its `direct`
    leaves. The first input of a node with such leaves is an anchor."""
    edges = [following for following, _ in node.next_functions]
    asked = named_leaves() if direct else None
    if asked is not None:
        rest = [leaf in asked for leaf in direct]
    else:
        rest = [_is_backward(node)] * len(direct) if direct else []
    return [e is not None and wants(e) for e in edges[1 if direct else 0 :]] + rest


def give_directly(
    node: Any, anchors: Anchors, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> None:
    """Give leaves their gradients, as far as this backward wants them."""
    asked = named_leaves()
    if asked is None:
        if _is_backward(node):
            _accumulate(leaves, gradients, anchors.hooked())
    elif asked.accumulates:
        pairs = zip(leaves, gradients, strict=True)
        kept = [g if leaf in asked else None for leaf, g in pairs]
        _accumulate(leaves, kept, anchors.hooked())
    else:
        asked.add(leaves, gradients)


def _accumulate(leaves: Sequence[Any], gradients: Sequence[Tensor | None], hooked: bool) -> None:
    """Add each gradient to its leaf's, as the engine would, and skip leaves frozen since. In grad
    mode gradients have graphs, and are added out of place, as in eager."""
    kept: list[Tensor] = []
    added: list[Tensor] = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        if hooked and not takes_directly(leaf):
            _defer(leaf, gradient)
            continue
        if not leaf.requires_grad:
            continue
        if not leaf.is_leaf:
            raise RuntimeError(_INSIDE)
        held = leaf.grad
        if held is None:
            leaf.grad = gradient
        elif torch.is_grad_enabled():
            leaf.grad = held + gradient
        else:
            kept.append(held)
            added.append(gradient)
    if kept:
        torch._foreach_add_(kept, added)


class _DeferredGradients:
    """Gradients of leaves that got hooks after the forward, kept until the end of one backward.
    Hooks see the sum of all gradients of their leaf."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[GradientEdge, Tensor]] = {}
        self._leaves: list[Tensor] = []
        self._backward = backward_id()
        self._creates_graph = torch.is_grad_enabled()

    def add(self, leaf: Tensor, edge: GradientEdge, gradient: Tensor) -> None:
        if id(leaf) in self._sums:
            gradient = self._sums[id(leaf)][1] + gradient
        else:
            self._leaves.append(leaf)
        self._sums[id(leaf)] = edge, gradient

    def __call__(self) -> None:
        """Have the engine run the hooks and accumulate. Raises `GraphError`: OL112, one of the
        hooks ran already, for a leaf that is not direct."""
        for leaf in self._leaves:
            refuse_hooks_run(leaf, self._backward)
        edges, gradients = zip(*self._sums.values(), strict=True)
        accumulate(edges, gradients, creates_graph=self._creates_graph)


_deferred: weakref.WeakValueDictionary[int, _DeferredGradients] = weakref.WeakValueDictionary()
"""id of a backward -> its deferred gradients, which the engine keeps alive."""


def _defer(leaf: Tensor, gradient: Tensor) -> None:
    edge = edge_to(leaf)
    deferred = _deferred.get(backward_id())
    if deferred is None:
        deferred = _deferred[backward_id()] = _DeferredGradients()
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(deferred)
    deferred.add(leaf, edge, gradient)


def laid_out(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Return `gradient` as AccumulateGrad gives it: with a dense leaf's strides, and no view."""
    if gradient is None or is_wrapped(gradient):
        return gradient
    if gradient._is_view() and not gradient.requires_grad:
        gradient = gradient.detach()
    dense = torch.empty_like(leaf, device="meta")  # contiguous where the leaf has gaps
    if gradient.stride() == dense.stride():
        return gradient
    return torch.empty_strided(
        leaf.shape, dense.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
