"""Hooks that were put on direct leaves after their forward, and the run of the engine that calls
them.

The node of a recording has no edges to these leaves. So their hooks run in another run of the
engine, over the sums of all gradients. What would notice two runs is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from onelaunch.errors import GraphError
from onelaunch.source import line_of
from onelaunch.state.hooks import read_hooks, read_last_hooks

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
    """Return the edge over which another run of the engine calls a leaf's hooks.

    Raises:
        GraphError: OL112, this run calls one of them, too.
    """
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
    """Refuse a leaf's hook on several tensors that a run of the engine called for another.

    Raises:
        GraphError: OL112.
    """
    for hook in (read_hooks(leaf) or {}).values():
        if _cells_of(hook).get("ran_hook", {}).get(backward):
            raise _of_late_hook(leaf, hook)


def _cells_of(hook: object) -> dict[str, Any]:
    """Return the variables of a hook of several tensors, `register_multi_grad_hook`; nothing for
    another hook."""
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
