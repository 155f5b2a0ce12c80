"""Inputs beside those given, to find an engine that is right on those alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onelaunch.call import tree
from onelaunch.tools.bench.workload import (
    Inputs,
    Workload,
    each_tensor,
    is_data,
    reals,
    resample,
    with_,
)

Number = Callable[[Tensor, Tensor], Tensor]
"""A function of the given numbers and of fresh numbers, both float64, that returns a draw's."""

SCALE = 100.0


@dataclass(frozen=True)
class Draw:
    """A way to make inputs from those given.

    Integers, booleans and masks keep their values, since other indices may be out of range. They
    are shuffled, or all set to the least or the greatest value. For masks see `is_data`.

    Attributes:
        name: the word for it in the row of an engine that fails it.
        numbers: makes other floats.
        whole: picks the value for integers, booleans and masks, their least or greatest; None
            shuffles them.
        within: True if floats, too, stay between the least and the greatest given.
    """

    name: str
    numbers: Number
    whole: Callable[[Tensor], Tensor] | None = None
    within: bool = False

    def of(self, t: Tensor, generator: torch.Generator) -> Tensor:
        """Make other values for one tensor."""
        fresh = resample(generator, t)
        if t.numel() == 0 or (self.whole is None and not is_data(t)):
            return fresh
        if not is_data(t):
            assert self.whole is not None
            edge = self.whole(reals(t))
            return with_(t, torch.full_like(reals(t), edge.item()))
        values = self.numbers(reals(t).double(), reals(fresh).double())
        limits = torch.finfo(t.dtype)
        return with_(t, values.clamp(limits.min, limits.max))


DRAWS = (
    Draw("random", lambda _, fresh: fresh, within=True),
    Draw("negated", lambda given, _: -given),
    Draw("zeros", lambda given, _: torch.zeros_like(given)),
    Draw("large", lambda _, fresh: fresh * SCALE),
    Draw("small", lambda _, fresh: fresh / SCALE),
    Draw("least", lambda given, _: given.amin().expand_as(given), torch.amin, within=True),
    Draw("greatest", lambda given, _: given.amax().expand_as(given), torch.amax, within=True),
    Draw("positive", lambda _, fresh: fresh.abs()),
    Draw("negative", lambda _, fresh: -fresh.abs()),
)
"""The most telling first, for a callable so slow that the time is up before the last."""


def draws(workload: Workload, generator: torch.Generator) -> Iterator[tuple[Draw, Inputs]]:
    """Make the inputs of each draw that the arguments allow, leaving out those made before.

    The sizes stay those given: engines are compared on them alone.
    """
    given = workload.args, workload.kwargs
    found = [given]
    floats = any(is_data(t) for t in tree.flatten(given).tensors)
    for draw in DRAWS:
        if draw is not DRAWS[0] and draw.whole is None and not floats:
            continue
        inputs = each_tensor(given, functools.partial(draw.of, generator=generator))
        if draw is not DRAWS[0] and any(_equal(inputs, other) for other in found):
            continue
        found.append(inputs)
        yield draw, inputs


def nudged(draw: Draw, inputs: Inputs, given: Inputs, generator: torch.Generator) -> Inputs:
    """Move the last bit of each number in `inputs`, as it is in numbers of the size given."""
    flat = tree.flatten(inputs)

    def nudge(t: Tensor, first: Tensor) -> Tensor:
        if not is_data(first):
            return t.detach().clone()
        values, sizes = reals(t).double(), reals(first).double()
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64, device="cpu")
        step = torch.finfo(t.dtype).eps * noise.clamp(-1, 1).to(values.device)
        moved = values + step * (values.abs() + sizes.abs().mean())
        return with_(t, moved.clamp(*sizes.aminmax()) if draw.within else moved)

    moved = [nudge(*pair) for pair in zip(flat.tensors, tree.flatten(given).tensors, strict=True)]
    return tree.unflatten(flat.tree, moved)


def _equal(some: Inputs, others: Inputs) -> bool:
    pairs = zip(tree.flatten(some).tensors, tree.flatten(others).tensors, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
