"""Gradients that a backward adds to `.grad` itself.

For each parameter that is an input of a node the engine spends 3 us: it follows the edge, visits
the AccumulateGrad node and guards its stream. Under ``gradients="direct"`` the node of a recording
has no edges to its parameters; it does here, for all of them at once, what AccumulateGrad does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.call.dtensor import is_wrapped
from onelaunch.errors import GraphError
from onelaunch.state.slots import read_gradient, read_hooks, read_last_hooks

_INSIDE = "leaf variable has been moved into the graph interior"

_executes: Callable[[Any], bool] = cast(Any, torch._C)._will_engine_execute_node
_task: Callable[[], int] = cast(Any, torch._C)._current_graph_task_id


def takes_directly(t: Tensor) -> bool:
    """Whether nobody but AccumulateGrad sees the gradient of `t`: a leaf without hooks."""
    return t.is_leaf and not read_hooks(t) and not read_last_hooks(t)


class Anchors:
    """Leaves that make a node part of every backward, and never get a gradient.

    At the end of a backward the caller's stream waits for the streams of the leaves, so there is
    one of each stream that forwards come from.
    """

    def __init__(self, device: torch.device, stream: Callable[[], int]) -> None:
        self._device = device
        self._stream = stream
        self._of: dict[int, Tensor] = {}

    def of_this_stream(self) -> Tensor:
        """The one of the stream that this thread works on."""
        stream = self._stream()
        if stream not in self._of:
            self._of[stream] = torch.zeros((), device=self._device, requires_grad=True)
        return self._of[stream]


def is_backward(node: Any) -> bool:
    """Whether the engine is to accumulate gradients in all leaves, in a node over an anchor; not in
    `torch.autograd.grad` or under ``inputs=``."""
    return _executes(node.next_functions[0][0])


def executed(node: Any, direct: int) -> list[bool]:
    """Which of a node's inputs the engine wants gradients of, and after them of the leaves that it
    serves directly, in a node over an anchor then."""
    edges = [following for following, _ in node.next_functions]
    rest = [is_backward(node)] * direct if direct else []
    return [e is not None and _executes(e) for e in edges[1 if direct else 0 :]] + rest


def accumulate(leaves: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    """Add each gradient to its leaf's, as the engine would: nothing to one that was frozen since.
    Those in grad mode have a graph of their own, and are added out of place, as in eager."""
    kept: list[Tensor] = []
    added: list[Tensor] = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            _put_off(leaf, gradient)
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


class _Late:
    """Gradients for leaves that got hooks after the forward, until the end of one backward: hooks
    see the sum of all that comes in it."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._grad_mode = torch.is_grad_enabled()

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        """Note what one node gives."""
        if id(leaf) in self._sums:
            gradient = self._sums[id(leaf)][1] + gradient
        self._sums[id(leaf)] = leaf, gradient

    def __call__(self) -> None:
        """Do what the engine does at the leaf."""
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


_late: weakref.WeakValueDictionary[int, _Late] = weakref.WeakValueDictionary()
"""By backward, whose engine holds them."""


def _put_off(leaf: Tensor, gradient: Tensor) -> None:
    frozen = not leaf.requires_grad
    node = torch.autograd.graph.get_gradient_edge(leaf.requires_grad_()).node
    if frozen:
        leaf.requires_grad_(False)
    if _executes(node):
        what = f"a hook on a parameter of shape {list(leaf.shape)}, put there after the forward"
        why = "other code contributes to its gradient, and the hook would not see the sum"
        fix = 'put it there before the forward, or leave `gradients="direct"` off'
        raise GraphError("OL112", what, why=why, fix=fix)
    late = _late.get(_task())
    if late is None:
        late = _late[_task()] = _Late()
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(late)
    late.add(leaf, gradient)


def _add(leaf: Tensor, gradient: Tensor) -> None:
    held = read_gradient(leaf)
    if held is None:
        leaf.grad = gradient
    elif torch.is_grad_enabled():
        leaf.grad = held + gradient
    else:
        held.add_(gradient)


def laid_out(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """`gradient` with the strides that AccumulateGrad gives it: those of a dense leaf."""
    if gradient is None or is_wrapped(gradient):
        return gradient
    dense = torch.empty_like(leaf, device="meta")  # contiguous where the leaf has gaps
    if gradient.stride() == dense.stride():
        return gradient
    return torch.empty_strided(
        leaf.shape, dense.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
