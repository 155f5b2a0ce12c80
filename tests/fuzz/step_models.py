"""What the training of `steps` is made of: layers in the middle of a model, and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "Tanh": nn.Tanh,
    "Dropout": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.4)),
    "BatchNorm": lambda: nn.BatchNorm1d(6),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "Linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU()),
    "exp": lambda: Exp(),
    "square": lambda: Square(),
    "in place backward": lambda: Applied(InPlace),
    "Python backward": lambda: Applied(Scaled),
}
OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "SGD": lambda p, device: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p, device: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda p, device: torch.optim.SGD(
        p, lr=0.05, momentum=0.8, nesterov=True, foreach=False
    ),
    "Adam": lambda p, device: torch.optim.Adam(p, lr=0.01, capturable=device, fused=not device),
    "AdamW": lambda p, device: torch.optim.AdamW(
        p, lr=0.01, amsgrad=True, capturable=device, fused=not device
    ),
    "RMSprop": lambda p, device: torch.optim.RMSprop(p, lr=0.01, capturable=device),
}


class Exp(nn.Module):
    """Its backward reads its own result."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0.1).exp()


class Square(nn.Module):
    """Has a parameter that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + (x * self.scale) ** 2 * 0.1


class InPlace(torch.autograd.Function):
    """Its backward writes to what its forward saved, as cross entropies in chunks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad)


class Scaled(torch.autograd.Function):
    """The last of a loss, it is the first that the engine's thread runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # type: ignore[return-value]
