"""Small models that several tables test."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
