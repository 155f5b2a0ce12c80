"""A small convolutional network for 28x28 images, on a batch of one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.placement import Call, ready


class CNN(nn.Module):
    """float32 (batch, 1, 28, 28) to logits (batch, 10): two convolutions, each with a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 7 * 7, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.head(torch.relu(self.hidden(x.flatten(1))))


def model() -> Call:
    return ready(CNN(), torch.randn(1, 1, 28, 28))
