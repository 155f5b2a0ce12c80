"""Single layers and functions, the smallest things worth one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.placement import Call, device, ready


def linear_small() -> Call:
    """Linear 10-64-10 on one vector."""
    return ready(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(10))


def linear() -> Call:
    """Linear(1000, 500) on a batch of 32."""
    return ready(nn.Linear(1000, 500), torch.randn(32, 1000))


def conv() -> Call:
    """Conv2d(3, 64, 3) on 16 images of 224x224."""
    return ready(nn.Conv2d(3, 64, 3), torch.randn(16, 3, 224, 224))


def sine() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
    """sin(2x) on five numbers."""

    def sin_2x(x: Tensor) -> Tensor:
        return torch.sin(2 * x)

    return sin_2x, (torch.randn(5, device=device()),)


def conv2d() -> tuple[Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]:
    """A convolution of (4, 3, 32, 32) with a kernel (16, 3, 3, 3) that is an argument."""

    def convolve(images: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(images, kernel)

    where = device()
    return convolve, (
        torch.randn(4, 3, 32, 32, device=where),
        torch.randn(16, 3, 3, 3, device=where),
    )
