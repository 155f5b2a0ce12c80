"""Operations that keep each element by itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import tensors
from onelaunch.padding.taint.rules.call import See, TaintedCall, everywhere


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Whether each element of the result depends on the elements at its own place alone."""
    packet = str(func).removeprefix("aten.").partition(".")[0]
    return torch.Tag.pointwise in func.tags or packet.removesuffix("_") in POINTWISE


POINTWISE = frozenset(
    {
        *("_to_copy", "copy", "clone", "detach", "alias", "lift", "lift_fresh", "where"),
        *("floor_divide", "hardswish", "_prelu_kernel", "masked_fill", "log_sigmoid_forward"),
    }
)
"""Those that torch does not tag so."""


def pointwise(call: TaintedCall, see: See) -> list[Tensor]:
    """The inputs' planes, broadcast and joined."""
    shape = call.results[0].shape
    found = torch.zeros((), dtype=torch.bool, device="cpu")
    for t in tensors((call.args, call.kwargs)):
        found = found.to(see(t).device) | see(t)
    return [found.broadcast_to(shape)]


def filled(call: TaintedCall, see: See) -> list[Tensor]:
    """Nothing of the input's values remains."""
    return [torch.zeros(t.shape, dtype=torch.bool, device="cpu") for t in call.results]


def copied(call: TaintedCall, see: See) -> list[Tensor]:
    return [see(call.args[1]).broadcast_to(call.results[0].shape)]


def product(call: TaintedCall, see: See) -> list[Tensor]:
    """A known 0 times anything is 0 at every call. Padding it remains: a mean counts it."""
    (found,) = pointwise(call, see)
    if see is call.unknown:
        for value in call.args:
            found = found & ~call.zero(value)
    return [found]


def chosen(call: TaintedCall, see: See) -> list[Tensor]:
    """`where`: of the two values only the one chosen counts."""
    mask, yes, no = call.args
    picked = either(call, mask, see(yes), see(no))
    return [(see(mask) | picked).broadcast_to(call.results[0].shape)]


def masked_fill(call: TaintedCall, see: See) -> list[Tensor]:
    t, mask, value = call.args
    picked = either(call, mask, see(value), see(t))
    return [(see(mask) | picked).broadcast_to(call.results[0].shape)]


def either(call: TaintedCall, mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """What a mask chooses; both where another call may choose otherwise."""
    picked = torch.where(call.value(mask).bool(), yes, no)
    return torch.where(call.unknown(mask), yes | no, picked)


def halved(call: TaintedCall, see: See) -> list[Tensor]:
    """`glu`: one half of a dimension times the other."""
    t, dim = call.args[0], call.argument("dim", -1)
    real = call.real(t)
    if real is None or real[dim] != t.shape[dim]:
        return everywhere(call, see)
    one, other = see(t).chunk(2, dim)
    return [one | other]


def sorted_into(call: TaintedCall, see: See) -> list[Tensor]:
    """`bucketize` and `isin`: each value among all of the others."""
    others = tensors((call.args[1:], call.kwargs))
    found = see(call.args[0]).broadcast_to(call.results[0].shape)
    return [found | any(bool(see(t).any()) for t in others)]


def searched(call: TaintedCall, see: See) -> list[Tensor]:
    """`searchsorted(sequence, values)`, row by row where there are rows of both."""
    sequence, sorter = call.args[0], call.argument("sorter")
    row = see(sequence) if sorter is None else see(sequence) | see(sorter)
    row = row.any(-1, keepdim=True)
    return [(see(call.args[1]) | row).broadcast_to(call.results[0].shape)]


def quantized(call: TaintedCall, see: See) -> list[Tensor]:
    """Element by element, with scales of the whole."""
    found = see(call.args[0])
    spread = any(bool(see(t).any()) for t in tensors((call.args[1:], call.kwargs)))
    return [found | spread for _ in call.results]


def loss(call: TaintedCall, see: See) -> list[Tensor]:
    """A loss for each element, or all of them in one number."""
    planes = [see(t) for t in tensors((call.args, call.kwargs))]
    found = planes[0]
    for plane in planes[1:]:
        found = found | plane
    if call.argument("reduction", 1) != 0:
        found = found.any()
    return [found.broadcast_to(call.results[0].shape)]


def negative_log_likelihood(call: TaintedCall, see: See) -> list[Tensor]:
    """`nll_loss` of (N, C, ...): a row for each target; ignored ones do not count in a sum."""
    scores, target, weight = call.args[:3]
    classes = 1 if scores.dim() > 1 else 0
    found = see(scores).any(classes) | see(target)
    if weight is not None:
        found = found | see(weight).any()
    if call.argument("reduction", 1) == 0:
        return [found, see(target).any().broadcast_to(call.results[1].shape)]
    ignored = (call.value(target) == call.argument("ignore_index", -100)) & ~call.unknown(target)
    found = (found & ~ignored).any()
    return [found.broadcast_to(r.shape) for r in call.results]
