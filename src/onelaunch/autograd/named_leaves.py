"""`torch.autograd.grad` and ``backward(inputs=...)`` of leaves to which no edge of a graph
leads, and their hooks.

Under ``gradients="direct"`` the engine does not know that the node of a recording has a parameter's
gradient. A call that names such a parameter therefore asks for the node's anchor too, which leads
the engine there. The node finds the named leaves in its thread's state.

Hooks that were put on such leaves after their forward run in another run of the engine, over the
sums of all gradients. A hook that would notice two runs is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from onelaunch.autograd.engine import roots
from onelaunch.autograd.graph_walk import AccumulateGrad
from onelaunch.driver.function_modes import EngineSubstitute, wrap_engine
from onelaunch.errors import GraphError
from onelaunch.source import line_of
from onelaunch.state.hooks import read_hooks, read_last_hooks
from onelaunch.unwinding import function_modes

if TYPE_CHECKING:
    from onelaunch.autograd.accumulate import Anchors

_C: Any = torch._C
_UNUSED = (
    "The differentiated Tensor at index {} appears to not have been used in the graph. Set "
    "allow_unused=True if this is the desired behavior."
)


_leading: WeakIdKeyDictionary = WeakTensorKeyDictionary()
"""Leaf -> weak set of the anchors of nodes that have its gradient."""


class NamedLeaves:
    """The leaves that one backward asks for, and their gradients. `leaves`: leaves without edges.
    `accumulates`: True if the gradients go into the leaves, False if to the caller."""

    def __init__(self, leaves: Sequence[Tensor], accumulates: bool) -> None:
        self._ids = {id(leaf) for leaf in leaves}
        self.accumulates = accumulates
        self._sums: dict[int, Tensor] = {}
        self._hooked: dict[int, tuple[Tensor, GradientEdge]] = {}
        """The leaves whose hooks the engine has still to run."""
        self._backward = -1

    def __contains__(self, leaf: Tensor) -> bool:
        return id(leaf) in self._ids

    def add(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add gradients from one node to the wanted leaves. Raises `GraphError`: OL112, a hook of a
        leaf would not see the sum."""
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None and leaf in self:
                if read_hooks(leaf):
                    self._hooked[id(leaf)] = leaf, edge_to(leaf)
                    self._backward = backward_id()
                held = self._sums.get(id(leaf))
                self._sums[id(leaf)] = gradient if held is None else held + gradient

    def run_hooks(self, run_backward: Callable[..., Any], create_graph: bool) -> None:
        """Have the engine run the hooks of leaves over their sums. Raises `GraphError`: OL112, one
        of the hooks ran already, for a leaf that is not direct."""
        if not self._hooked:
            return
        leaves, edges = zip(*self._hooked.values(), strict=True)
        for leaf in leaves:
            refuse_hooks_run(leaf, self._backward)
        ends = roots(edges, [self._sums[id(leaf)] for leaf in leaves])
        sums = run_backward(*ends, create_graph, create_graph, leaves, accumulate_grad=False)
        self._sums.update(zip(map(id, leaves), sums, strict=True))

    def total(self, leaf: Tensor, of_engine: Tensor | None) -> Tensor | None:
        """Return a leaf's gradient, with the engine's own share from its edges."""
        own = self._sums.get(id(leaf))
        if own is None or of_engine is None:
            return of_engine if own is None else own
        return of_engine + own


class _Asking(TorchFunctionMode):
    """A mode that tells the engine's threads, which get the caller's modes, which leaves it wants.
    It changes nothing."""

    def __init__(self, asked: NamedLeaves | None) -> None:
        super().__init__()
        self.asked = asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def named_leaves() -> NamedLeaves | None:
    """Return the leaves without edges that the backward of this thread asks for by name."""
    for mode in reversed(function_modes()):
        if isinstance(mode, _Asking):
            return mode.asked
    return None


def lead_to(leaves: Sequence[Tensor], anchors: Anchors) -> None:
    """Have the engine find the nodes over these anchors where a call asks for a leaf."""
    for leaf in leaves:
        if leaf not in _leading:
            _leading[leaf] = weakref.WeakSet()
        _leading[leaf].add(anchors)
    _install()


class _LeafFindingEngine(EngineSubstitute):
    """An engine that finds leaves without edges."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        inputs: Sequence[Any] = args[4] if len(args) > 4 else kwargs.get("inputs", ())
        if not inputs and not _C._len_torch_function_stack():  # nearly all
            return self.engine.run_backward(*args, **kwargs)
        ends = enumerate(map(_leaf, inputs))
        leaves = {place: leaf for place, leaf in ends if leaf is not None}
        if leaves:
            return self._asked(leaves, *args, **kwargs)
        if named_leaves() is None:
            return self.engine.run_backward(*args, **kwargs)
        with _Asking(None):  # inside of a backward that asks
            return self.engine.run_backward(*args, **kwargs)

    def _asked(
        self,
        leaves: Mapping[int, Tensor],
        outputs: Any,
        gradients: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        asked = NamedLeaves(list(leaves.values()), accumulate_grad)
        leading = {anchors for leaf in leaves.values() for anchors in _leading[leaf]}
        ends = [anchor for anchors in leading for anchor in anchors.all()]
        with _Asking(asked):
            results = self.engine.run_backward(
                outputs,
                gradients,
                keep_graph,
                create_graph,
                (*inputs, *ends),
                allow_unreachable=True,
                accumulate_grad=accumulate_grad,
            )
        if accumulate_grad:
            return results
        asked.run_hooks(self.engine.run_backward, create_graph)
        results = list(results[: len(inputs)])
        with torch.set_grad_enabled(create_graph):
            for place, leaf in leaves.items():
                results[place] = asked.total(leaf, results[place])
        for place, g in enumerate(results) if not allow_unreachable else ():
            if g is None:
                raise RuntimeError(_UNUSED.format(place))
        return tuple(results)


def _leaf(end: Any) -> Tensor | None:
    """Return the leaf without edges that a call asks for, or None. A call names the leaf, or the
    node that accumulates its gradient."""
    node: Any = end.node if isinstance(end, GradientEdge) else None
    leaf = node.variable if isinstance(node, AccumulateGrad) else end
    return leaf if isinstance(leaf, Tensor) and leaf in _leading else None


@functools.cache
def _install() -> None:
    wrap_engine(_LeafFindingEngine)


will_run: Callable[[Any], bool] = cast(Any, torch._C)._will_engine_execute_node
backward_id: Callable[[], int] = cast(Any, torch._C)._current_graph_task_id

_MULTI = torch.autograd.graph.register_multi_grad_hook.__qualname__ + "."


def wants(node: Any) -> bool:
    """Return whether the engine wants the gradient of a node."""
    try:
        return will_run(node)
    except RuntimeError:  # `torch.autograd.grad` asks for this leaf, whose node does not run
        return True


def edge_to(leaf: Tensor) -> GradientEdge:
    """Return the edge over which another run of the engine calls a leaf's hooks. Raises
    `GraphError`: OL112, this run calls one of them, too."""
    frozen = not leaf.requires_grad
    edge = torch.autograd.graph.get_gradient_edge(leaf.requires_grad_())
    if frozen:
        leaf.requires_grad_(False)
    hooks = [*(read_hooks(leaf) or {}).values(), *(read_last_hooks(leaf) or {}).values()]
    if wants(edge.node):
        raise _of_late_hook(leaf, hooks[-1] if hooks else None)
    for hook in hooks:
        if any(map(will_run, _cells_of(hook).get("grad_fns", ()))):
            raise _of_late_hook(leaf, hook)
    return edge


def refuse_hooks_run(leaf: Tensor, backward: int) -> None:
    """Refuse a leaf's hook on several tensors that a run of the engine called for another."""
    for hook in (read_hooks(leaf) or {}).values():
        if _cells_of(hook).get("ran_hook", {}).get(backward):
            raise _of_late_hook(leaf, hook)


def _cells_of(hook: object) -> dict[str, Any]:
    """Return the variables of `register_multi_grad_hook`'s hook; of others nothing."""
    if not isinstance(hook, FunctionType) or not hook.__code__.co_qualname.startswith(_MULTI):
        return {}
    cells = (cell.cell_contents for cell in hook.__closure__ or ())
    return dict(zip(hook.__code__.co_freevars, cells, strict=True))


def _of_late_hook(leaf: Tensor, hook: object) -> GraphError:
    what = f"a hook on a parameter of shape {list(leaf.shape)}, put there after the forward"
    why = "other code contributes to its gradient, and the hook would not see the sum"
    if cells := _cells_of(hook):
        hook = cells["fn"]
        why = "it is on other parameters too, whose gradients come in another run of the engine"
    fix = 'put it there before the forward, or leave `gradients="direct"` off'
    place = None if hook is None else line_of(hook)
    return GraphError("OL112", what, where=place, why=why, fix=fix)
