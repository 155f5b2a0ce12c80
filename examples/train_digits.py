"""The small CNN trained on real handwritten digits, eagerly and as one launch per step.

    python -m examples.train_digits

Both start from one seed and see the same batches. Printed: the loss of each epoch, the accuracy on
digits that were not trained on, and the time. Needs `scikit-learn`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onelaunch as ol
from examples.cnn import CNN
from examples.digits import accuracy, digits

EPOCHS = 12
BATCH = 50
SEED = 0
TEST = 297


@dataclass
class Result:
    """One training.

    Attributes:
        losses: the mean loss of each epoch.
        accuracy: on the digits kept aside.
        seconds: of the epochs, the first of which holds the warm-up and the capture.
        steps: of an epoch.
        replays: how many steps of all were one launch.
    """

    losses: list[float]
    accuracy: float
    seconds: list[float]
    steps: int
    replays: int


def split() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and to test on, in an order of their own."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(images), generator=generator).to(images.device)
    images, labels = images[order], labels[order]
    return images[TEST:], labels[TEST:], images[:TEST], labels[:TEST]


def train(graphed: bool, epochs: int = EPOCHS) -> Result:
    """Train from the seed."""
    images, labels, test_images, test_labels = split()
    torch.manual_seed(SEED)
    model = CNN().to(images.device)
    # The kinds of Adam that count their steps in a tensor.
    kind: dict[str, Any] = {"capturable": True} if images.is_cuda else {"fused": True}
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, **kind)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = ol.graph(step) if graphed else step
    generator = torch.Generator().manual_seed(SEED)
    losses: list[float] = []
    seconds: list[float] = []
    steps: list[Tensor] = []
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        x, y = images[order], labels[order]
        started = time.perf_counter()
        batches = zip(x.split(BATCH), y.split(BATCH), strict=True)
        steps = [run(a, b) for a, b in batches]
        losses.append(torch.stack(steps).mean().item())
        seconds.append(time.perf_counter() - started)
    right = accuracy(model, test_images, test_labels)
    replays = sum(recording.replays for recording in run.recordings) if graphed else 0
    return Result(losses, right, seconds, len(steps), replays)


def main(epochs: int = EPOCHS) -> tuple[Result, Result]:
    """Train both ways and print them side by side."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True  # else two eager runs on a GPU may differ, too
    try:
        train(graphed=False, epochs=1)  # libraries loaded
        print(f"training for {epochs} epochs: eagerly", end="", flush=True)
        eager = train(graphed=False, epochs=epochs)
        print(", as one launch per step", flush=True)
        ours = train(graphed=True, epochs=epochs)
    finally:
        torch.backends.cudnn.deterministic = before
    print("epoch   loss, eager   loss, onelaunch")
    for i, (a, b) in enumerate(zip(eager.losses, ours.losses, strict=True)):
        print(f"{i + 1:5}   {a:11.6f}   {b:15.6f}")
    for name, result in (("eager", eager), ("onelaunch", ours)):
        per_step = result.seconds[-1] / result.steps * 1e6
        print(
            f"{name:10} reads {result.accuracy:.1%} of {TEST} new digits; "
            f"{sum(result.seconds):.2f} s, {per_step:,.0f} us per step in the last epoch"
        )
    print(f"the loss curves are {'equal' if eager.losses == ours.losses else 'not equal'}")
    return eager, ours


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    main(parser.parse_args().epochs)
