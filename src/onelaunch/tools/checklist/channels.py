"""The step on channel counts that are no multiple of 8: zeros fill them up.

Tensor cores take 8 channels of 16 bits at a time. A layer gets rows of zeros, whose results are cut
off again, and columns of zeros, for which its input is filled up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from onelaunch.tools.checklist.layers import CONVOLUTIONS, is_plain, like
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import NotPossible, Subject

_LAYERS = (nn.Linear, *CONVOLUTIONS)
MULTIPLE = 8
_IMAGE = 4
"""Channels of an image, which has fewer than a tensor core takes anyway."""


class Padded(nn.Module):
    """A linear layer or convolution with channels of zeros, for inputs and results without them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        made: Any = layer
        outputs, inputs = made.weight.shape[:2]
        more_in, more_out = _missing(inputs), _missing(outputs)
        window = made.weight.dim() - 2
        fill = [0, 0] * window + [0, more_in]
        kind = "channels" if isinstance(layer, _ConvNd) else "features"
        numbers = {f"in_{kind}": inputs + more_in, f"out_{kind}": outputs + more_out}
        weight = F.pad(made.weight, [*fill, 0, more_out])
        bias = None if made.bias is None else F.pad(made.bias, [0, more_out])
        self.layer = like(layer, weight, bias, **numbers)
        self.fill = fill if more_in else None
        self.outputs = outputs if more_out else None
        self.channels = -1 - window

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x if self.fill is None else F.pad(x, self.fill))
        return y if self.outputs is None else y.narrow(self.channels, 0, self.outputs)


@torch.no_grad()
def _pad(subject: Subject) -> str:
    roots = subject.roots
    all_layers = [m for m in subject.modules() if is_plain(m, _LAYERS)]
    layers = [m for m in all_layers if _is_odd(m)]
    inner = [m for m in layers if not any(m is root for root in roots)]
    if not layers:
        raise NotPossible(f"its channel counts are multiples of {MULTIPLE}")
    if not inner:
        raise NotPossible("the layer is the callable itself")
    for layer in inner:
        subject.put(layer, Padded(layer).train(layer.training))
    if not subject.after or subject.after[-1] is not contiguous:
        subject.after.append(contiguous)
    return f"{len(inner)} of {len(all_layers)} layers"


def contiguous(t: Tensor) -> Tensor:
    """Copy a result that is a part of a larger tensor, as the last layer's may be."""
    last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
    return t if last else t.contiguous()


def _is_odd(layer: Any) -> bool:
    if getattr(layer, "groups", 1) != 1:
        return False
    outputs, inputs = layer.weight.shape[:2]
    return bool(_missing(inputs) or _missing(outputs))


def _missing(channels: int) -> int:
    return -channels % MULTIPLE if channels > _IMAGE else 0


PAD_CHANNELS = Step("pad-channels", "channel counts filled up to multiples of 8", _pad)
