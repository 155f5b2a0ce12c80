"""The small CNN, trained for a few seconds on real handwritten digits. Needs `scikit-learn`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.cnn import CNN
from examples.placement import Call, device

EPOCHS = 8
BATCH = 64


def digits() -> tuple[Tensor, Tensor]:
    """1,797 digits of 8x8, enlarged to float32 (n, 1, 28, 28) in [0, 1], and their labels (n,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, size=(28, 28), mode="bilinear")
    return images.to(device()), torch.tensor(data.target).to(device())


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """A few passes of Adam over shuffled batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images), generator=order).to(images.device).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The part of the images that the model reads right."""
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def model() -> Call:
    """The network trained on all but the last 297 digits, and the first of those to read."""
    torch.manual_seed(0)
    images, labels = digits()
    net = CNN().to(images.device)
    train(net, images[:1500], labels[:1500])
    right = accuracy(net, images[1500:], labels[1500:])
    print(f"digits: trained on 1500 images; reads {right:.1%} of the 297 it has not seen.")
    return net, (images[1500:1501],)
