"""Calls of torch's norms and dropouts, read by the names of their arguments."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from onelaunch.tools.doctor.run import FunctionCall
from onelaunch.tools.doctor.slow.flow import Flow
from onelaunch.tools.doctor.slow.products import Product
from onelaunch.tools.doctor.slow.record import Norm
from onelaunch.tools.profiler.counting import plain

_ATTENTION: Any = F.scaled_dot_product_attention
_DROPOUTS = frozenset(
    {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        *(F.alpha_dropout, F.feature_alpha_dropout),
    }
)
_NORMS = frozenset({F.batch_norm, F.instance_norm, F.group_norm})
CONCERNS: frozenset[Any] = frozenset({_ATTENTION, *_DROPOUTS, *_NORMS})


def for_training(event: FunctionCall) -> str | None:
    """Describe the work of a call that only training needs; None for none."""
    if event.function is _ATTENTION:
        args, kwargs = event.args, event.kwargs
        drops = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return "drops values" if drops > 0 else None
    given = _arguments(event)
    if event.function in _DROPOUTS:
        return "drops values" if given["training"] and given["p"] > 0 else None
    if event.function is F.batch_norm and given["training"] and given["running_mean"] is not None:
        return "takes the statistics of the batch and changes the running ones"
    return None


def norm(event: FunctionCall, flow: Flow, path: str) -> Norm | None:
    """Describe a call of a norm; None for another function."""
    if event.function not in _NORMS:
        return None
    given = _arguments(event)
    x: Tensor = given["input"]
    running = given.get("running_mean") is not None
    each = True
    if event.function is F.batch_norm:
        kind, own = "BatchNorm", bool(given["training"]) or not running
    elif event.function is F.instance_norm:
        kind, own = "InstanceNorm", bool(given["use_input_stats"])
    else:
        kind, own = "GroupNorm", True
        each = x.dim() > 1 and given["num_groups"] == x.shape[1]
    return Norm(
        kind=kind,
        path=path,
        spot=event.spot(),
        own=own,
        running=running,
        each_channel=each,
        product=_channel_for_channel(x, flow.of(x).product) if plain(x) else None,
    )


def _channel_for_channel(x: Tensor, product: Product | None) -> Product | None:
    """Return the layer whose result `x` is, if the channels of both are the same dimension."""
    if product is None or not product.fixed or x.dim() < 2:
        return None
    same = x.shape[1] == product.outputs and x.stride(1) == product.strides[product.channels]
    return product if same and x.numel() == math.prod(product.result) else None


def _arguments(event: FunctionCall) -> dict[str, Any]:
    bound = _signature(event.function).bind(*event.args, **event.kwargs)
    bound.apply_defaults()
    return bound.arguments


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)
