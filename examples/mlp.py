"""A multi-layer perceptron, 1024-512-256-10, on a batch of 32."""

from __future__ import annotations

import torch
from torch import nn

from examples.placement import Call, ready


class MLP(nn.Sequential):
    """float32 (batch, 1024) to logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(1024, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )


def model() -> Call:
    return ready(MLP(), torch.randn(32, 1024))
