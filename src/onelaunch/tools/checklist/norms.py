"""Steps on norms and the layers before them: one layer for both, or a bias less."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from onelaunch.tools.checklist.layers import (
    CONVOLUTIONS,
    TRANSPOSED,
    has_hooks,
    is_plain,
    parameter,
)
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import NotPossible, Subject
from onelaunch.tools.doctor.slow.record import Norm, Record


class Feeds:
    """Pairs of a layer and the norm that it alone feeds in a run.

    Layer and norm run once each, and nothing else reads the layer's result.
    """

    def __init__(self, subject: Subject, record: Record) -> None:
        self._modules = subject.by_path()
        self._norms = Counter(norm.path for norm in record.norms)
        self._layers = Counter(product.path for product in record.products)

    def layer(self, norm: Norm) -> nn.Module | None:
        """Return the layer that feeds a norm, and it alone."""
        product = norm.product
        if product is None or product.made.reads != 1 or self._layers[product.path] != 1:
            return None
        module = self._modules.get(product.path)
        return module if is_plain(module, (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)) else None

    def module(self, norm: Norm) -> _BatchNorm | None:
        module = self._modules.get(norm.path)
        once = self._norms[norm.path] == 1 and not has_hooks(module)
        return module if isinstance(module, _BatchNorm) and once else None


@torch.no_grad()
def _fold(subject: Subject) -> str:
    record = subject.follow()
    norms = [n for n in record.norms if n.kind == "BatchNorm" and not n.own]
    if not norms:
        raise NotPossible("no BatchNorm with running statistics runs in it")
    feeds, folded = Feeds(subject, record), 0
    for norm in norms:
        layer, module = feeds.layer(norm), feeds.module(norm)
        rest = None if module is None else _rest(module)
        if layer is None or module is None or rest is None or not _foldable(layer):
            continue
        fold_into(layer, module)
        subject.put(module, rest)
        folded += 1
    if not folded:
        raise NotPossible(f"none of its {len(norms)} batch norms is all that a layer feeds")
    return f"{folded} of {len(norms)} norms"


def fold_into(layer: nn.Module, norm: _BatchNorm) -> None:
    """Let a convolution or linear layer do a batch norm after it, computed in float64."""
    assert isinstance(layer, (_ConvNd, nn.Linear))
    weight, bias, mean, variance, *affine = (
        _wide(t)
        for t in (
            *(layer.weight, layer.bias, norm.running_mean, norm.running_var),
            *(norm.weight, norm.bias),
        )
    )
    fuse: Any = fuse_conv_bn_weights if isinstance(layer, _ConvNd) else fuse_linear_bn_weights
    transposed = (True,) if isinstance(layer, _ConvTransposeNd) else ()
    made = fuse(weight, bias, mean, variance, norm.eps, *affine, *transposed)
    layer.weight, layer.bias = (parameter(t, layer) for t in made)


def _wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().double()


def _foldable(layer: nn.Module) -> bool:
    """Return whether a channel's weights are in one dimension: not in a transposed convolution of
    groups."""
    return not (isinstance(layer, _ConvTransposeNd) and layer.groups != 1)


def _rest(norm: _BatchNorm) -> nn.Module | None:
    """Return the module that stays in the place of a folded norm; None if that is not known."""
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return nn.Identity()
    drop, act = getattr(norm, "drop", None), getattr(norm, "act", None)
    if isinstance(drop, nn.Module) and isinstance(act, nn.Module):  # timm's BatchNormAct2d
        return nn.Sequential(drop, act)
    return None


@torch.no_grad()
def _drop_bias(subject: Subject) -> str:
    record = subject.follow()
    feeds, dropped, biased = Feeds(subject, record), 0, 0
    for norm in record.norms:
        product = norm.product
        if product is None or not norm.each_channel or not product.bias:
            continue
        if product.kind != "convolution":  # a matrix product adds it by the way
            continue
        biased += 1
        layer = feeds.layer(norm)
        if not isinstance(layer, _ConvNd) or layer.bias is None:
            continue
        if not norm.own and not _shift_mean(feeds.module(norm), layer.bias):
            continue
        layer.bias = None
        dropped += 1
    if not biased:
        raise NotPossible("no convolution before a norm has a bias")
    if not dropped:
        raise NotPossible(f"none of {biased} such norms is all that its convolution feeds")
    return f"{dropped} of {biased} biases"


def _shift_mean(norm: _BatchNorm | None, bias: Tensor) -> bool:
    """Let the running mean of a norm hold the bias before it."""
    if norm is None or norm.running_mean is None:
        return False
    norm.running_mean = norm.running_mean - bias
    return True


FOLD = Step("fold-batchnorm", "BatchNorm folded into the layers before", _fold, rounds=True)
DROP_BIAS = Step("drop-bias", "no bias before a norm", _drop_bias, rounds=True)
