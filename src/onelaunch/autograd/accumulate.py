"""Gradients that a backward adds to `.grad` directly, without the engine.

The engine spends 3 us for each parameter that is an input of a node: it follows the edge, visits
the AccumulateGrad node and guards its stream. Under ``gradients="direct"`` the node of a recording
has no edges to its parameters; `accumulate` does the work of AccumulateGrad for all at once. A
whole step accumulates inside its recording: see `capture/effects.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.call.wrappers import is_wrapped
from onelaunch.errors import GraphError
from onelaunch.source import line_of
from onelaunch.state.slots import is_leaf, read_gradient, read_hooks, read_last_hooks

_INSIDE = "leaf variable has been moved into the graph interior"

_will_run: Callable[[Any], bool] = cast(Any, torch._C)._will_engine_execute_node
_backward_id: Callable[[], int] = cast(Any, torch._C)._current_graph_task_id


def takes_directly(t: Tensor) -> bool:
    """Return whether only AccumulateGrad uses the gradient of `t`: a leaf without hooks."""
    return is_leaf(t) and not read_hooks(t) and not read_last_hooks(t)


class Anchors:
    """Leaves that make a node part of every backward and never get a gradient.

    At the end of a backward the caller's stream waits for the leaves' streams, so there is an
    anchor for each stream that forwards come from.
    """

    def __init__(self, device: torch.device, stream: Callable[[], int]) -> None:
        self._device = device
        self._stream = stream
        self._by_stream: dict[int, Tensor] = {}

    def of_this_stream(self) -> Tensor:
        """Return the anchor of this thread's current stream."""
        stream = self._stream()
        if stream not in self._by_stream:
            self._by_stream[stream] = torch.zeros((), device=self._device, requires_grad=True)
        return self._by_stream[stream]


def is_backward(node: Any) -> bool:
    """Return whether the engine accumulates into all leaves, in a node over an anchor; it does not
    in `torch.autograd.grad` or under ``inputs=``."""
    return _will_run(node.next_functions[0][0])


def wanted_gradients(node: Any, direct: int) -> list[bool]:
    """Return whether the engine wants the gradient of each input of a node, then of each of its
    `direct` leaves. If there are such leaves, the node's first input is an anchor."""
    edges = [following for following, _ in node.next_functions]
    rest = [is_backward(node)] * direct if direct else []
    return [e is not None and _will_run(e) for e in edges[1 if direct else 0 :]] + rest


def accumulate(leaves: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    """Add each gradient to its leaf's, as the engine would; skip leaves frozen since. In grad mode
    gradients have graphs, and are added out of place, as in eager."""
    kept: list[Tensor] = []
    added: list[Tensor] = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
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
    """The gradients of leaves that got hooks after the forward, kept until the end of one backward:
    hooks see the sum of all its gradients."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._grad_mode = torch.is_grad_enabled()

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add a gradient from one node."""
        if id(leaf) in self._sums:
            gradient = self._sums[id(leaf)][1] + gradient
        self._sums[id(leaf)] = leaf, gradient

    def __call__(self) -> None:
        """Run the hooks and accumulate, as the engine does at each leaf."""
        with torch.set_grad_enabled(self._grad_mode):
            for leaf, gradient in self._sums.values():
                for hook in list((read_hooks(leaf) or {}).values()):
                    changed = hook(gradient)
                    gradient = gradient if changed is None else changed
                if not leaf.requires_grad:
                    continue
                _add(leaf, gradient)
                for hook in list((read_last_hooks(leaf) or {}).values()):
                    hook(leaf)


_deferred: weakref.WeakValueDictionary[int, _DeferredGradients] = weakref.WeakValueDictionary()
"""id of a backward -> its deferred gradients, which the engine keeps alive."""


def _defer(leaf: Tensor, gradient: Tensor) -> None:
    frozen = not leaf.requires_grad
    node = torch.autograd.graph.get_gradient_edge(leaf.requires_grad_()).node
    if frozen:
        leaf.requires_grad_(False)
    if _will_run(node):
        what = f"a hook on a parameter of shape {list(leaf.shape)}, put there after the forward"
        why = "other code contributes to its gradient, and the hook would not see the sum"
        fix = 'put it there before the forward, or leave `gradients="direct"` off'
        hooks = [*(read_hooks(leaf) or {}).values(), *(read_last_hooks(leaf) or {}).values()]
        place = line_of(hooks[-1]) if hooks else None
        raise GraphError("OL112", what, where=place, why=why, fix=fix)
    deferred = _deferred.get(_backward_id())
    if deferred is None:
        deferred = _deferred[_backward_id()] = _DeferredGradients()
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(deferred)
    deferred.add(leaf, gradient)


def _add(leaf: Tensor, gradient: Tensor) -> None:
    held = read_gradient(leaf)
    if held is None:
        leaf.grad = gradient
    elif torch.is_grad_enabled():
        leaf.grad = held + gradient
    else:
        held.add_(gradient)


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
