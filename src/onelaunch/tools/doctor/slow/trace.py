"""The origins of the values of a run that a rule asks for: layers, sums of layers, copies."""

from __future__ import annotations

from torch import Tensor

from onelaunch.tools.doctor.run import RanOperation
from onelaunch.tools.doctor.slow.flow import FlowStep, Value
from onelaunch.tools.doctor.slow.products import Product
from onelaunch.tools.doctor.slow.record import Record, Sum
from onelaunch.tools.doctor.spot import Spot
from onelaunch.tools.profiler.counting import plain

# Batch norms: the number of their argument `training`; None: they have none, and do not.
_BATCH_NORMS = {
    "aten::native_batch_norm": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
    "aten::_native_batch_norm_legit_no_training": None,
    "aten::_batch_norm_no_update": None,
}
_COPIES = frozenset({"aten::_to_copy", "aten::clone"})
_SUMS = frozenset({"aten::add.Tensor", "aten::add_.Tensor"})


def trace_product(record: Record, product: Product) -> None:
    """Note a product, and that its result comes from it."""
    record.products.append(product)
    made, window = product.made, product.window
    made.product = product
    if window is None or window.transposed or not product.fixed:
        return
    made.branches = (product,)
    earlier = product.source.after
    if window.groups == product.inputs > 1:
        made.after = product
    elif earlier is not None and _is_pointwise(product):
        record.pairs.append((earlier, product))


def trace(
    record: Record, event: RanOperation, sources: list[Value], step: FlowStep, spot: Spot
) -> None:
    """Note the origin of the result of an operation that is no product.

    Args:
        sources: the values of its arguments that are tensors, in their order.
    """
    op, made = event.op, step.made[0]
    if op.name in _COPIES and len(sources) == 1:
        made.owner = sources[0].owner
    elif op.name in _SUMS:
        _trace_sum(record, event, sources, made, spot)
    elif op.base in _BATCH_NORMS and not _takes_statistics(event):
        made.branches = sources[0].branches
        made.links = (*sources[0].links, sources[0])
    changing = [value for value in sources if value.owner is None]
    results, x = plain(event.result), plain(event.args)
    if len(changing) == 1 and results and results[0].shape == x[0].shape:
        made.after = changing[0].after


def _trace_sum(
    record: Record, event: RanOperation, sources: list[Value], made: Value, spot: Spot
) -> None:
    terms = [a for a in event.args[:2] if isinstance(a, Tensor)]
    same = len(terms) == 2 and terms[0].shape == terms[1].shape
    if len(terms) == 1:  # and a number, which would be part of the bias
        made.branches, made.links = sources[0].branches, (*sources[0].links, sources[0])
    elif same and len(sources) == 2 and event.kwargs.get("alpha", 1) == 1:
        left, right = sources
        branches = (*left.branches, *right.branches)
        if left.branches and right.branches and _can_merge(branches):
            made.branches = branches
            made.links = (*left.links, *right.links, left, right)
            record.sums.append(Sum(spot, branches, made.links))


def _takes_statistics(event: RanOperation) -> bool:
    index = _BATCH_NORMS[event.op.base]
    return index is not None and bool(event.args[index])


def _is_pointwise(product: Product) -> bool:
    window = product.window
    assert window is not None
    ones = all(size == 1 for size in (*product.weight[2:], *window.stride))
    return ones and window.groups == 1 and not any(window.padding)


def _can_merge(branches: tuple[Product, ...]) -> bool:
    """Return whether convolutions of the same input can be merged: their windows advance alike and
    have the same centre. The smaller kernels are padded with zeros."""
    first = branches[0]
    return all(_alike(first, other) for other in branches[1:])


def _alike(first: Product, other: Product) -> bool:
    a, b = first.window, other.window
    assert a is not None
    assert b is not None
    if first.source is not other.source or first.view != other.view:
        return False
    if first.dtype != other.dtype or first.result != other.result:
        return False
    if (a.stride, a.groups) != (b.stride, b.groups):
        return False
    kernels, paddings = (first.weight[2:], other.weight[2:]), (a.padding, b.padding)
    return all(map(_same_centre, *kernels, *paddings, a.dilation, b.dilation))


def _same_centre(k0: int, k1: int, p0: int, p1: int, d0: int, d1: int) -> bool:
    if 1 not in (k0, k1) and d0 != d1:
        return False
    step = d0 if k0 > 1 else d1
    return d0 * (k0 - 1) - 2 * p0 == d1 * (k1 - 1) - 2 * p1 and (p0 - p1) % step == 0
