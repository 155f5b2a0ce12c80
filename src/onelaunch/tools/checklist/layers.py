"""Layers that may be rewritten, and layers made from them."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_plain(module: nn.Module | None, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is of one of these classes, not of a subclass, and without hooks."""
    return type(module) in kinds and not has_hooks(module)


def has_hooks(module: nn.Module | None) -> bool:
    """Return whether a call of a module is more than the forward of its class."""
    return module is not None and bool(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    )


def like(layer: M, weight: Tensor, bias: Tensor | None, **numbers: int) -> M:
    """Make a layer like another with other tensors, in the dtype of its own; `numbers` are its
    attributes that change with them."""
    made = copy.copy(layer)
    made._parameters = {}  # a copy shares it
    for name, t in (("weight", weight), ("bias", bias)):
        made.register_parameter(name, None if t is None else parameter(t, layer))
    for name, number in numbers.items():
        setattr(made, name, number)
    return made


def parameter(t: Tensor, layer: nn.Module) -> nn.Parameter:
    """Make a parameter of the dtype and grad mode of a layer's weight."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return nn.Parameter(t.detach().to(weight.dtype), weight.requires_grad)
