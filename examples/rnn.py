"""A recurrent cell, 64 inputs to 32 hidden units, with a linear head, on (10, 64)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.placement import Call, ready


class RNN(nn.Module):
    """float32 (batch, 64) to (batch, 10); the batch is read as one sequence, as `nn.RNN` does."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.head(states)


def model() -> Call:
    return ready(RNN(), torch.randn(10, 64))
