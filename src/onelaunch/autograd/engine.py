"""Backwards from given gradients, without what `torch.autograd` imports to compare their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge


def gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    given: Sequence[Tensor],
    *,
    keep_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Do `torch.autograd.grad`, which imports sympy at its first call: 1 s. An input that no output
    depends on has None. The engine itself checks sizes and dtypes. `given`: the gradients of the
    outputs, of their sizes. `keep_graph`: as torch's `retain_graph`."""
    if torch.overrides.has_torch_function((*outputs, *inputs)):  # a class or a mode has its say
        return torch.autograd.grad(
            outputs, inputs, given, retain_graph=keep_graph, allow_unused=True
        )
    ends = tuple(outputs), tuple(given), keep_graph, False, tuple(inputs)
    return _engine_run_backward(*ends, True, accumulate_grad=False)


def accumulate(
    edges: Sequence[GradientEdge], given: Sequence[Tensor], *, creates_graph: bool
) -> None:
    """Do `torch.autograd.backward` for edges alike. It keeps the graph if it creates graphs."""
    ends = *roots(edges, given), creates_graph, creates_graph, ()
    _engine_run_backward(*ends, allow_unreachable=True, accumulate_grad=True)


def roots(
    edges: Sequence[GradientEdge], given: Sequence[Tensor]
) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
    """Return where a backward begins, and its gradients. The engine does not count a single root
    among the nodes that it runs, and hooks on several tensors ask for these. So there are two."""
    if len(edges) > 1:
        return tuple(edges), tuple(given)
    nothing = torch.empty(0, device=given[0].device)
    return (*edges, get_gradient_edge(nothing.requires_grad_())), (*given, nothing.detach())
