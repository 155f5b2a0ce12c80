"""Operations that keep each element by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import tensors
from onelaunch.padding.taint.rules.call import Planes, TaintedCall, everywhere, rerun, spread

POINTWISE = frozenset(
    {
        *("_to_copy", "copy", "clone", "detach", "alias", "lift", "lift_fresh", "where"),
        *("floor_divide", "hardswish", "_prelu_kernel", "masked_fill", "log_sigmoid_forward"),
    }
)
"""Pointwise operations that torch does not tag so."""


def pointwise(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join the inputs' planes, broadcast."""
    found = call.none
    for t in tensors((call.args, call.kwargs)):
        found = found | taint(t)
    return [found]


def filled(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint nothing: the result does not depend on the input's values."""
    return [torch.tensor(False, device="cpu") for _ in call.results]


def product(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join the planes; a known 0 times anything is known. It stays padding: a mean counts it."""
    (found,) = pointwise(call, taint)
    if taint is call.unknown:
        for value in call.args:
            found = found & ~call.zero(value)
    return [found]


def choice(call: TaintedCall) -> Sequence[Any]:
    """Return the mask of `where` or `masked_fill`, and the values where it is true and false."""
    return call.args if call.packet == "where" else [call.args[i] for i in (1, 2, 0)]


def chosen(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Take, for `where` and `masked_fill`, only the plane of the chosen value; join both if another
    call may choose otherwise."""
    mask, yes, no = choice(call)
    yes, no = taint(yes), taint(no)
    picked = torch.where(call.value(mask).bool(), yes, no)
    return [taint(mask) | torch.where(call.unknown(mask), yes | no, picked)]


def halved(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join, for `glu`, the two halves of a dimension."""
    t, dim = call.args[0], call.argument("dim", -1)
    real = call.real(t)
    same = real is not None and real[dim] == t.shape[dim]
    return (rerun if same else everywhere)(call, taint)


def searched(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Join, for `searchsorted(sequence, values)`, each value with its row of the sequence."""
    sequence, sorter = call.args[0], call.argument("sorter")
    row = taint(sequence) if sorter is None else taint(sequence) | taint(sorter)
    return [taint(call.args[1]) | row.any(-1, keepdim=True)]


def by_element(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint by element of the first argument; elements of the others matter for all."""
    found = taint(call.args[0]) | spread(call, taint, call.args[0])
    return [found for _ in call.results]


def loss(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint a loss by element, or the single number for all elements."""
    (found,) = pointwise(call, taint)
    return [found if call.argument("reduction", 1) == 0 else found.any()]


def negative_log_likelihood(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `nll_loss` of (N, C, ...) by targets; ignored ones do not count in a sum."""
    scores, target, weight = call.args[:3]
    classes = 1 if scores.dim() > 1 else 0
    found = taint(scores).any(classes) | taint(target)
    if weight is not None:
        found = found | taint(weight).any()
    if call.argument("reduction", 1) == 0:
        return [found, taint(target).any()]
    ignored = (call.value(target) == call.argument("ignore_index", -100)) & ~call.unknown(target)
    return [(found & ~ignored).any() for _ in call.results]
