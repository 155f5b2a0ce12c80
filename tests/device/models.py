"""Small models that several tables test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, replays


class Norms(nn.Module):
    """Convolution and BatchNorm, whose statistics advance once per call."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.linear(x))))


class Scaled(nn.Module):
    """Has a plain attribute, a property, a method, and a child."""

    kind = "scaled"

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(4, 4, device=device)
        self.scale = 2.0

    @property
    def width(self) -> int:
        return self.linear.in_features

    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) * self.scale


def recorded(model: nn.Module, rand: Rand, **options: Any) -> Any:
    fast = ol.graph(model, warmup=1, **options)
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 5, 4))
    assert replays(fast) > 0
    return fast
