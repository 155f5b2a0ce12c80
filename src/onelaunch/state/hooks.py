"""Hooks that a backward runs: of tensors, of the nodes that accumulate gradients, and of the graph
behind a tensor.

Torch shows the hooks of a node to a new hook alone, and frees a leaf's node when nobody holds it.
So the hooks put on nodes are counted, and nodes are searched only after the count has changed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import function
from torch.utils.hooks import RemovableHandle

from onelaunch.identity import id
from onelaunch.state.slots import node_of

_C: Any = torch._C
_Mixin: Any = getattr(function, "_HookMixin")  # noqa: B009
_Handle: Any = RemovableHandle

read_hooks: Any = _C.TensorBase._backward_hooks.__get__
read_last_hooks: Any = _C.TensorBase._post_accumulate_grad_hooks.__get__
"""The dicts of a tensor's hooks, or None: 0.05 us each."""

Hooks = dict[int, Callable[..., object]]


def handles_made() -> int:
    """Return the number of hooks of any kind put anywhere in the process: 0.1 us."""
    return _Handle.next_id - _of_nodes.probes


class _NodeHooks:
    """A count of the hooks put on nodes, by a substitute for torch's function that puts a hook."""

    def __init__(self) -> None:
        self.count = 0
        self.probes = 0
        """The number of temporary hooks of `node_hooks`."""
        self._put: Final = _Mixin._register_hook

    def put(self, hooks: Hooks | None, hook: Callable[..., object]) -> tuple[Hooks, Any]:
        if hook is _nothing:
            self.probes += 1
        else:
            self.count += 1
        return self._put(hooks, hook)


_of_nodes = _NodeHooks()
_Mixin._register_hook = staticmethod(_of_nodes.put)


def node_hooks_put() -> int:
    """Return the number of hooks put on nodes so far: 0.05 us."""
    return _of_nodes.count


def same_hooks(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Return a check that a backward runs the hooks that it runs now: 0.1 us for each tensor; after
    a hook was put on any node, 5 us for each.

    Tensors inside of a graph behind the given tensors cannot be found. Where there are any, a hook
    put anywhere fails the check.
    """
    hooks, last_hooks = list(map(read_hooks, tensors)), list(map(read_last_hooks, tensors))
    seen, handles = node_hooks_put(), handles_made()
    of_nodes = list(node_hooks(tensors))
    ends = {id(node_of(t) or t) for t in tensors}
    hides = len(of_nodes) > 2 * len(ends)
    # A tensor keeps the dict of a hook that was taken off; a new hook on a node is counted.
    own = [entries for entries in (*hooks, *last_hooks) if entries is not None]
    # A node that nobody holds goes, and the dict of its hooks with it.
    kept_by_nodes = [weakref.ref(entries) for entries in of_nodes if entries]

    def known_keys() -> list[list[int]]:
        return [*map(list, own), *(list(ref() or ()) for ref in kept_by_nodes)]

    def all_keys(of_nodes: Sequence[Hooks]) -> list[list[int]]:
        own = (*map(read_hooks, tensors), *map(read_last_hooks, tensors))
        return [list(entries or ()) for entries in (*own, *of_nodes)]

    keys, expected = known_keys(), all_keys(of_nodes)
    watches_keys = bool(keys)
    del of_nodes

    def same() -> bool:
        nonlocal seen
        now = node_hooks_put()
        if (
            now == seen
            and (not hides or handles_made() == handles)
            and all(map(operator.is_, map(read_hooks, tensors), hooks))
            and all(map(operator.is_, map(read_last_hooks, tensors), last_hooks))
            and (not watches_keys or known_keys() == keys)
        ):
            return True
        if hides and handles_made() != handles:
            return False
        if all_keys(list(node_hooks(tensors))) != expected:
            return False
        seen = now
        return True

    return same


class Hooked:
    """A check whether any tensor, or a node that accumulates its gradient, has a hook. It looks
    after a hook was put somewhere: 0.1 us for each tensor."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._handles = self._put_on_nodes = -1
        self._any = self._any_on_nodes = False

    def __call__(self) -> bool:
        if handles_made() != self._handles:
            self._handles, put = handles_made(), node_hooks_put()
            if put != self._put_on_nodes:
                self._put_on_nodes, self._any_on_nodes = put, any(node_hooks(self._tensors))
            self._any = self._any_on_nodes or any(map(has_hooks, self._tensors))
        return self._any


def has_hooks(t: Tensor) -> bool:
    """Return whether a tensor itself has hooks: 0.1 us."""
    return bool(read_hooks(t) or read_last_hooks(t))


def node_hooks(tensors: Sequence[Tensor]) -> Iterator[Hooks]:
    """Return the hooks before and after each node that a backward from tensors runs."""
    for node in _nodes(tensors):
        for register in (node.register_prehook, node.register_hook):
            handle = register(_nothing)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            yield hooks


def _nothing(*_: object) -> None:
    """Change no gradient."""


def _nodes(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the nodes behind tensors; behind a leaf is the node that accumulates its gradient."""
    graded = [t for t in tensors if t.requires_grad and (t.is_leaf or node_of(t) is not None)]
    if not graded:
        return []
    with torch.enable_grad():
        # One node behind all tensors, which torch's modes do not see.
        first = _C._functions.DelayedError("", len(graded))(*graded)
    first = first[0] if isinstance(first, tuple) else first
    nodes: dict[Any, None] = {}
    stack = [node for node, _ in first.grad_fn.next_functions][::-1]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            stack.extend(following for following, _ in node.next_functions)
    return list(nodes)
