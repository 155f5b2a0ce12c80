"""The step on layers that read one input, as an attention's query, key and value: one layer.

The first of them that runs computes all and keeps the others' parts until they ask. One that is
asked with another input computes by itself, so the rest of the model may do as it likes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from onelaunch.tools.checklist.layers import CONVOLUTIONS, is_plain, like
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import NotPossible, Subject

_LAYERS = (nn.Linear, *CONVOLUTIONS)
_ALIKE = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")


class Together(nn.Module):
    """Several layers that read the same input, as one layer.

    Attributes:
        kept: the input of a call under way and the parts of its result.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        first: Any = layers[0]
        self.layer = _concatenated(layers)
        self.dim = 1 if isinstance(first, _ConvNd) else -1
        self.sizes = [layer.weight.shape[0] for layer in layers if isinstance(layer.weight, Tensor)]
        self.kept: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the result of one of the layers."""
        kept = self.kept
        if index == 0:
            parts = self.layer(x).split(self.sizes, self.dim)
            self.kept = (x, parts)
            return parts[0]
        last = index == len(self.sizes) - 1
        if kept is not None and kept[0] is x:
            if last:
                self.kept = None
            return kept[1][index]
        return self.layer(x).split(self.sizes, self.dim)[index]


class TogetherPart(nn.Module):
    """One of the layers in `Together`, which is a child of the first alone."""

    def __init__(self, together: Together, index: int) -> None:
        super().__init__()
        self.index = index
        self._others = (together,)
        if index == 0:
            self.together = together

    def forward(self, x: Tensor) -> Tensor:
        return self._others[0].part(self.index, x)


@torch.no_grad()
def _merge_parallel(subject: Subject) -> str:
    record = subject.follow()
    modules = subject.by_path()
    ran = Counter(product.path for product in record.products)
    groups: dict[tuple[object, ...], list[nn.Module]] = {}
    for product in record.products:
        layer = modules.get(product.path)
        if layer is not None and is_plain(layer, _LAYERS) and ran[product.path] == 1:
            alike = tuple(getattr(layer, name, None) for name in _ALIKE)
            of_groups = isinstance(layer, _ConvNd) and layer.groups != 1
            if not of_groups and not any(layer is root for root in subject.roots):
                key = (id(product.source), product.view, type(layer), alike, product.dtype)
                groups.setdefault(key, []).append(layer)
    found = [layers for layers in groups.values() if len(layers) > 1]
    if not found:
        raise NotPossible("no two layers that could be one read the same input")
    for layers in found:
        together = Together(layers)
        for i, layer in enumerate(layers):
            subject.put(layer, TogetherPart(together, i).train(layer.training))
    return f"{sum(map(len, found))} layers as {len(found)}"


def _concatenated(layers: list[nn.Module]) -> nn.Module:
    """Make a layer of all output channels, one after the other."""
    many: list[Any] = list(layers)
    weight = torch.cat([layer.weight for layer in many])
    bias = None
    if any(layer.bias is not None for layer in many):
        each = [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            for layer in many
        ]
        bias = torch.cat(each)
    name = "out_channels" if isinstance(layers[0], _ConvNd) else "out_features"
    return like(layers[0], weight, bias, **{name: len(weight)})


PARALLEL = Step("merge-branches:parallel", "layers of one input as one layer", _merge_parallel)
