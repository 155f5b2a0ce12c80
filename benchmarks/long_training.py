"""A long run of training with changing batch sizes, learning rate and accumulation, beside eager.

    python -m benchmarks.long_training --steps 1000

Whole steps as recordings, and forward and backward as a pair under an eager optimizer. What is
asked: the same parameters in the end, and not a byte more than after the first quarter.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import OneCycleLR

import onelaunch as ol
from examples.placement import device

Check = Literal["step", "pair"]
CHECKS: tuple[Check, ...] = ("step", "pair")
SIZES = (8, 16, 24, 64)
PARTS = (1, 2, 4)  # into which a batch is split, their gradients accumulated
FEATURES = 64
CLASSES = 10


@dataclass
class Run:
    """What one way of training left.

    Attributes:
        parameters: those of the network, then the state of its optimizer.
        losses: the loss of every hundredth step.
        grown_bytes: allocated and reserved at the end above what they were after a quarter.
        recordings: how many there were after a quarter and at the end.
    """

    parameters: list[Tensor]
    losses: list[float]
    grown_bytes: tuple[int, int]
    recordings: tuple[int, int]
    seconds: float


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Inputs, labels that depend on them, and into how many parts they are to be split."""
    choice = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(4096, FEATURES, generator=generator).to(device())
    labels = pool[:, :CLASSES].argmax(1)
    for _ in range(steps):
        size, start = choice.choice(SIZES), choice.randrange(4000)
        yield pool[start : start + size], labels[start : start + size], choice.choice(PARTS)


def train(check: Check, steps: int, graphed: bool) -> Run:
    """Train from one seed."""
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    model = nn.Sequential(*layers).to(device())
    options = {"capturable": True} if device().type == "cuda" else {"fused": True}
    optimizer = Adam(model.parameters(), lr=1e-3, **options)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    run: Callable[[Tensor, Tensor, int], Tensor]
    fast: Any = None
    forward: Any = model
    if graphed and check == "pair":
        forward = fast = ol.graph(model)

    def step(x: Tensor, y: Tensor, parts: int) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(forward(a), b) / parts
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torch.stack(losses).sum()

    run = step
    if graphed and check == "step":
        run = fast = ol.graph(step)

    def recordings() -> int:
        return len(fast.recordings) if fast is not None else 0

    losses: list[float] = []
    settled, counted = (0, 0), 0
    started = time.perf_counter()
    for i, (x, y, parts) in enumerate(batches(steps)):
        loss = run(x, y, parts)
        schedule.step()
        if i % 100 == 0:
            losses.append(loss.item())
        if i == steps // 4:
            settled, counted = held_bytes(), recordings()
    ended = held_bytes()
    state = [v for s in optimizer.state.values() for v in s.values()]
    return Run(
        parameters=[t.detach().clone() for t in (*model.parameters(), *state)],
        losses=losses,
        grown_bytes=(ended[0] - settled[0], ended[1] - settled[1]),
        recordings=(counted, recordings()),
        seconds=time.perf_counter() - started,
    )


def held_bytes() -> tuple[int, int]:
    """Allocated and reserved on the GPU; nothing is counted without one."""
    gc.collect()
    if device().type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def run_long(check: Check, steps: int) -> dict[str, Any]:
    """Train eagerly and graphed; what differs, as data."""
    eager, ours = train(check, steps, graphed=False), train(check, steps, graphed=True)
    pairs = list(zip(ours.parameters, eager.parameters, strict=True))
    off = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    return {
        "check": check,
        "steps": steps,
        "parameters equal": all(torch.equal(a, b) for a, b in pairs),
        "largest difference": off,
        "losses equal": ours.losses == eager.losses,
        "first and last loss": [ours.losses[0], ours.losses[-1]],
        "allocated growth bytes": ours.grown_bytes[0],
        "reserved growth bytes": ours.grown_bytes[1],
        "recordings after a quarter": ours.recordings[0],
        "recordings": ours.recordings[1],
        "eager seconds": round(eager.seconds, 2),
        "onelaunch seconds": round(ours.seconds, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    asked = parser.parse_args().steps
    for name in CHECKS:
        print(run_long(name, asked))
