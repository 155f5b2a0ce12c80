"""ResNet-50 and ResNeXt-101 32x8d, as the papers have them (arXiv:1512.03385, arXiv:1611.05431)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.placement import Call, ready

EXPANSION = 4


def conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    """A convolution that keeps the size (but for its stride) and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (grouped, strided), 1x1 up, around a shortcut."""

    def __init__(self, inputs: int, planes: int, stride: int, groups: int, width: int) -> None:
        super().__init__()
        inner = planes * width // 64 * groups
        outputs = planes * EXPANSION
        self.reduce = conv_norm(inputs, inner, 1)
        self.spatial = conv_norm(inner, inner, 3, stride, groups)
        self.expand = conv_norm(inner, outputs, 1)
        changes = stride != 1 or inputs != outputs
        self.shortcut = conv_norm(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.reduce(x))
        y = torch.relu(self.spatial(y))
        return torch.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """float32 (batch, 3, height, width) to logits (batch, classes).

    Args:
        depths: blocks in each of the four stages.
        groups: groups of the 3x3 convolutions; 32 makes a ResNeXt.
        width: channels of a group in the first stage, for 64 planes.
        classes: number of logits.
    """

    def __init__(
        self,
        depths: tuple[int, int, int, int],
        groups: int = 1,
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = conv_norm(3, 64, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            planes = 64 * 2**stage
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, planes, stride, groups, width))
                channels = planes * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(images)))
        return self.head(self.blocks(x).mean((2, 3)))


def resnet50() -> ResNet:
    return ResNet((3, 4, 6, 3))


def resnext101_32x8d(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 23, 3), groups=32, width=8, classes=classes)


def model() -> Call:
    """ResNet-50 on one image of 224x224."""
    return ready(resnet50(), torch.randn(1, 3, 224, 224))


def small() -> Call:
    """ResNet-50 on one image of 64x64."""
    return ready(resnet50(), torch.randn(1, 3, 64, 64))


def resnext() -> Call:
    """ResNeXt-101 32x8d with two classes on 64 images of 7x7."""
    return ready(resnext101_32x8d(classes=2), torch.randn(64, 3, 7, 7))
