"""The step on sums of parallel convolutions, as RepVGG and MobileOne train them: one convolution.

A module whose forward takes one argument and adds such branches is traced by torch.fx, and the sum
in its graph becomes one convolution. Kernels of other sizes are set into the largest, and an
identity is a kernel of ones.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from onelaunch.tools.checklist.layers import CONVOLUTIONS, has_hooks, is_plain, like
from onelaunch.tools.checklist.norms import fold_into
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import NotPossible, Subject

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ADDS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add)


@dataclass
class Branch:
    """One term of a sum: a convolution or none, then a batch norm or none.

    Attributes:
        source: what it reads.
    """

    source: fx.Node
    convolution: _ConvNd | None
    norm: _BatchNorm | None


@torch.no_grad()
def _merge_sums(subject: Subject) -> str:
    merged = 0
    for module in reversed(subject.modules()):  # children before what holds them
        traced = _traced(module)
        if traced is None:
            continue
        count = sum(_merge(traced, add) for add in _sums(traced))
        if count:
            traced.graph.eliminate_dead_code()
            traced.delete_all_unused_submodules()
            traced.recompile()
            subject.put(module, traced.train(module.training))
            merged += count
    if not merged:
        raise NotPossible("no sum of parallel convolutions was found")
    return f"{merged} sums of branches"


def _traced(module: nn.Module) -> fx.GraphModule | None:
    """Trace a module; None for one of torch's, with hooks, of several arguments, or where fx
    cannot."""
    if type(module).__module__.startswith("torch.") or not any(module.children()):
        return None
    if has_hooks(module):  # the graph would run without them
        return None
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = [p.kind for p in parameters]
    if kinds != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
        return None
    try:
        tracer = _Tracer()
        graph = tracer.trace(module)
        return fx.GraphModule(tracer.root, graph, type(module).__name__)
    except Exception:  # noqa: BLE001  code that asks the values of a tensor may raise anything
        return None


class _Tracer(fx.Tracer):
    """A tracer that leaves modules with hooks whole: inside of them it would run the hooks once."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return has_hooks(m) or super().is_leaf_module(m, module_qualified_name)


def _sums(traced: fx.GraphModule) -> list[fx.Node]:
    """List the outermost sums."""
    adds = [node for node in traced.graph.nodes if _is_add(node)]
    return [node for node in adds if not (len(node.users) == 1 and _is_add(next(iter(node.users))))]


def _is_add(node: fx.Node) -> bool:
    called = node.op == "call_function" and node.target in _ADDS
    method = node.op == "call_method" and node.target in ("add", "add_")
    return (called or method) and len(node.args) == 2 and not node.kwargs


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    for term in node.args:
        if isinstance(term, fx.Node):
            if _is_add(term) and len(term.users) == 1:
                yield from _terms(term)
            else:
                yield term
        elif term != 0:  # of a number the sum stays as it is
            raise _Unfit


class _Unfit(Exception):
    """A sum is of another kind."""


def _merge(traced: fx.GraphModule, add: fx.Node) -> bool:
    """Merge branches of a sum that read the same input into a convolution; False if none fit."""
    try:
        terms = list(_terms(add))
    except _Unfit:
        return False
    branches = [(term, _branch(traced, term)) for term in terms]
    for source in dict.fromkeys(b.source for _, b in branches if b.convolution is not None):
        found = [(t, b) for t, b in branches if b.source is source]
        layers = _fitting([b for _, b in found])
        if layers is not None:
            break
    else:
        return False
    one = _one(layers, [b for _, b in found if b in layers or b.convolution is None])
    name = f"merged_{add.name}"
    traced.add_submodule(name, one)
    gone = {t for t, b in found if b in layers or b.convolution is None}
    with traced.graph.inserting_before(add):
        total = traced.graph.call_module(name, (source,))
        for term in terms:
            if term not in gone:
                total = traced.graph.call_function(operator.add, (total, term))
    add.replace_all_uses_with(total)
    return True


def _branch(traced: fx.GraphModule, term: fx.Node) -> Branch:
    """Read a term backwards: norm, convolution, input. What is neither is its own input."""
    modules = dict(traced.named_modules())
    norm = convolution = None
    node = term
    while node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        module = modules[str(node.target)]
        if node is not term and len(node.users) != 1:
            break
        if is_plain(module, (nn.Identity,)):
            pass
        elif is_plain(module, _NORMS) and norm is None and not module.training:
            assert isinstance(module, _BatchNorm)
            if module.running_mean is None:
                break
            norm = module
        elif is_plain(module, CONVOLUTIONS):
            assert isinstance(module, _ConvNd)
            convolution = module
            node = _input(node)
            break
        else:
            break
        node = _input(node)
    return Branch(node, convolution, norm)


def _input(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _fitting(branches: list[Branch]) -> list[Branch] | None:
    """Return the convolutions among branches that fit into the largest of them; None if there is
    nothing to merge, or an identity that does not fit."""
    largest = _largest(branches)
    fit = [b for b in branches if b.convolution and _fits(largest, b.convolution)]
    identities = [b for b in branches if b.convolution is None]
    if identities and not _keeps_size(largest):
        return None
    return fit if len(fit) + len(identities) > 1 else None


def _largest(branches: list[Branch]) -> _ConvNd:
    return max(filter(None, (b.convolution for b in branches)), key=_taps)


def _taps(convolution: _ConvNd) -> int:
    return math.prod(convolution.kernel_size)


def _fits(large: _ConvNd, small: _ConvNd) -> bool:
    if type(large) is not type(small) or {large.padding_mode, small.padding_mode} != {"zeros"}:
        return False
    same = ("stride", "groups", "in_channels", "out_channels")
    if any(getattr(large, name) != getattr(small, name) for name in same):
        return False
    return all(place is not None for place in _places(large, small))


def _keeps_size(convolution: _ConvNd) -> bool:
    """Return whether an identity is a kernel of this convolution's size."""
    one = {1} == set(convolution.stride) and convolution.padding_mode == "zeros"
    same = convolution.in_channels == convolution.out_channels
    centred = all(
        k % 2 == 1 and 2 * p == d * (k - 1)
        for k, p, d in zip(
            convolution.kernel_size, _padding(convolution), convolution.dilation, strict=True
        )
    )
    return one and same and centred


def _padding(convolution: _ConvNd) -> tuple[int, ...]:
    if isinstance(convolution.padding, str):
        if convolution.padding == "valid":
            return (0,) * len(convolution.kernel_size)
        totals = zip(convolution.kernel_size, convolution.dilation, strict=True)
        # With an even total torch pads both sides alike; an odd one fits nothing here.
        return tuple(d * (k - 1) // 2 if d * (k - 1) % 2 == 0 else -1 for k, d in totals)
    return tuple(convolution.padding)


def _places(large: _ConvNd, small: _ConvNd) -> list[list[int] | None]:
    """Return, for each dimension, the places of the small kernel's taps in the large one; None if
    they are between its own, or the results differ in size."""
    found: list[list[int] | None] = []
    for k, d, p, k2, d2, p2 in zip(
        *(large.kernel_size, large.dilation, _padding(large)),
        *(small.kernel_size, small.dilation, _padding(small)),
        strict=True,
    ):
        at = [divmod(d2 * i - p2 + p, d) for i in range(k2)]
        inside = all(rest == 0 and 0 <= index < k for index, rest in at)
        same = 2 * p - d * (k - 1) == 2 * p2 - d2 * (k2 - 1) and min(p, p2) >= 0
        found.append([index for index, _ in at] if inside and same else None)
    return found


def _one(layers: list[Branch], branches: list[Branch]) -> _ConvNd:
    """Add the kernels and biases of branches in float64."""
    large = _largest(layers)
    weight = torch.zeros_like(large.weight, dtype=torch.float64)
    bias = weight.new_zeros(large.out_channels)
    for branch in branches:
        source = branch.convolution or _identity(large)
        convolution = copy.deepcopy(source).double()
        if branch.norm is not None:
            fold_into(convolution, branch.norm)
        for taps in product(*(enumerate(at or ()) for at in _places(large, convolution))):
            here, there = zip(*taps, strict=True)
            weight[(..., *there)] += convolution.weight[(..., *here)]
        if convolution.bias is not None:
            bias += convolution.bias
    return like(large, weight, bias)


def _identity(large: _ConvNd) -> _ConvNd:
    """Make the convolution that gives its input, with the channels and groups of another."""
    each = large.in_channels // large.groups
    weight = torch.zeros_like(large.weight)
    for channel in range(large.out_channels):
        middle = (size // 2 for size in large.kernel_size)
        weight[(channel, channel % each, *middle)] = 1
    return like(large, weight, None)


SUMS = Step(
    "merge-branches:sums", "sums of convolutions as one convolution", _merge_sums, rounds=True
)
