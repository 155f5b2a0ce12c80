"""Rules on norms: what they repeat at each call, and what they make of the layer before."""

from __future__ import annotations

from onelaunch.finding import Finding
from onelaunch.tools.doctor.slow.products import Product
from onelaunch.tools.doctor.slow.record import Norm, Record, named
from onelaunch.tools.rules import RULES

_DROP = "pass `bias=False`"
_FOLD = (
    f"{_DROP}; of a trained layer: `with torch.no_grad(): norm.running_mean -= layer.bias`, then "
    "`layer.bias = None`"
)


def bias_before_norm(record: Record) -> list[Finding]:
    """OL607: the bias of a convolution that the norm cancels, or could hold itself.

    Statistics of the channel itself take it away, with the mean. Running ones do not, but their
    mean can be less by it. (A matrix product adds the bias of a linear layer by the way.)
    """
    biased = [n for n in record.norms if n.each_channel and _is_biased(_layer(n))]
    if not biased:
        return []
    names = named([p.path for n in biased if (p := n.product)], "convolutions")
    cancelled = [n for n in biased if n.own]
    kinds = " or ".join(dict.fromkeys(n.kind for n in biased))
    if len(cancelled) == len(biased):
        why = f"the {kinds} after it takes it away with the mean"
    elif cancelled:
        why = f"the {kinds} after it takes it away, or can hold it in its running mean"
    else:
        why = f"the {kinds} after it can hold it in its running mean"
    what = f"bias before a norm: {names}; {why}"
    fix = _DROP if len(cancelled) == len(biased) else _FOLD
    return [biased[0].spot.finding("OL607", what, fix, "run")]


def unfolded_batchnorm(record: Record) -> list[Finding]:
    """OL608: batch norms with running statistics that the layer before could do."""
    unfolded = [n for n in record.norms if n.kind == "BatchNorm" and not n.own and _layer(n)]
    if not unfolded:
        return []
    names = named([n.path for n in unfolded], "batch norms")
    what = f"unfolded BatchNorm, which the layer before could do: {names}"
    linear = all(p.kind == "linear" for n in unfolded if (p := n.product))
    fix = RULES["OL608"].fix.replace("conv_bn", "linear_bn") if linear else RULES["OL608"].fix
    layer = next((p.path for n in unfolded[:1] if (p := n.product)), "")
    if layer and unfolded[0].path:
        fix = fix.replace("parent[0]", _code(layer)).replace("parent[1]", _code(unfolded[0].path))
    return [unfolded[0].spot.finding("OL608", what, fix, "run")]


def inference_statistics(record: Record) -> list[Finding]:
    """OL609: norms that compute statistics at each call, where the class can keep running ones."""
    computing = [n for n in record.norms if n.own and not n.running and n.kind != "GroupNorm"]
    if not computing:
        return []
    names = named([n.path for n in computing], "norms")
    kinds = " and ".join(dict.fromkeys(n.kind for n in computing))
    what = f"{kinds} without running statistics computes them at each call: {names}"
    return [computing[0].spot.finding("OL609", what, None, "run")]


def _code(path: str) -> str:
    """Write the path of a module as Python has it: ``"stem.0"`` as ``"model.stem[0]"``."""
    steps = (f"[{step}]" if step.isdigit() else f".{step}" for step in path.split("."))
    return f"model{''.join(steps)}"


def _layer(norm: Norm) -> Product | None:
    """Return the layer before a norm, if the norm alone reads its result."""
    layer = norm.product
    return layer if layer is not None and layer.made.reads == 1 else None


def _is_biased(layer: Product | None) -> bool:
    return layer is not None and layer.kind == "convolution" and layer.bias
