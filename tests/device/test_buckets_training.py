"""Training with buckets: forward and backward at padded sizes, gradients those of the real rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, refused, replays


class Words(nn.Module):
    """Tokens (batch, length) with a mask to one number for each sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids))
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores.masked_fill(mask[:, None, :] == 0, -1e9)
        x = x + scores.softmax(-1) @ self.v(x)
        x = x / x.norm(dim=-1, keepdim=True)  # whose gradient at zero is NaN
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def same_parameters(a: nn.Module, b: nn.Module, tolerance: float = 1e-4) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(
            p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


@pytest.mark.thorough
def test_a_hundred_steps_of_random_sizes(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(1)
    eager = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    eager = eager.to(device)
    model = copy.deepcopy(eager)
    fast = ol.graph(model, buckets=ol.Buckets(0, (4, 8, 16)), warmup=1)
    sizes = torch.randint(1, 17, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    ours = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9)
    for step, n in enumerate(sizes):
        x, y = rand(step, n, 5), rand(step + 500, n, 2)
        for run, optimizer in ((fast, ours), (eager, theirs)):
            optimizer.zero_grad()
            F.mse_loss(run(x), y).backward()
            optimizer.step()
    same_parameters(model, eager)
    assert len(fast.recordings) == 3, "\n".join(r.why for r in fast.recordings)
    assert replays(fast) >= 90


def test_batch_and_length(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(1)
    eager = Words().to(device)
    model = copy.deepcopy(eager)
    buckets = ol.Buckets((0, 1), ((2, 4), (4, 8)), pad={"mask": (None, 0)})
    fast = ol.graph(model, buckets=buckets, warmup=1)
    # Not Adam: it divides by what is rounding alone in the gradient of the keys' bias.
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    for step in range(40):
        batch = int(torch.randint(1, 5, (), generator=generator))
        length = int(torch.randint(1, 9, (), generator=generator))
        ids, y = rand(step, batch, length, dtype=torch.int64), rand(step, batch, 1)
        mask = torch.ones_like(ids)
        mask[0, 1:] = 0
        for run, optimizer in ((fast, ours), (eager, theirs)):
            optimizer.zero_grad()
            F.mse_loss(run(ids, mask), y).backward()
            optimizer.step()
    same_parameters(model, eager, 1e-3)
    assert replays(fast) >= 20


def test_gradients_of_arguments_are_those_of_real_rows(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return (x / x.norm(dim=1, keepdim=True)).exp()

    fast = ol.graph(f, buckets=ol.Buckets(0, (4, 8)), warmup=1)
    for n in (3, 3, 3, 7, 7, 8, 1):
        x, y = (rand(n, n, 5).requires_grad_() for _ in range(2))
        weights = rand(n + 50, n, 5)
        (fast(x) * weights).sum().backward()
        (f(y) * weights).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, y.grad)
        assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("rows", [1, 2])
def test_results_are_laid_out_as_in_eager(device: torch.device, rand: Rand, rows: int) -> None:
    """A dimension of size 1 may have any stride, and is to have eager's."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).to(device)
    fast = ol.graph(model, buckets=ol.Buckets(1, (4, 8)), warmup=1)
    for i, n in enumerate((3, 2, 1, 5, 7, 4, 1)):
        x = rand(i, rows, n, 4)
        y, expected = fast(x), model(x)
        assert y.stride() == expected.stride()
        assert not y.is_leaf
        y.sum().backward()
    assert replays(fast) == 5


def test_several_forwards_before_a_backward(device: torch.device, rand: Rand) -> None:
    eager = nn.Linear(5, 3).to(device)
    model = copy.deepcopy(eager)
    fast = ol.graph(model, buckets=ol.Buckets(0, (4, 8)), warmup=1)
    for step in range(4):
        xs = [rand(step + i, n, 5) for i, n in enumerate((3, 2, 7))]
        for run, module in ((fast, model), (eager, eager)):
            module.zero_grad()
            sum(run(x).sin().sum() for x in xs).backward()
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_dropout_is_refused_with_what_serves(device: torch.device, rand: Rand) -> None:
    """A padded row would draw too."""
    buckets = ol.Buckets(dim=0, sizes=(4,))
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout()).to(device).train()
    fast = ol.graph(model, buckets=buckets, warmup=1)
    error = refused(fast, rand(0, 3, 3), match=r"OL140.*random numbers")
    assert error.fix == "call `.eval()`, set dropout to 0, or say `independent=True`"

    def replayed(model: nn.Module, **options: Any) -> int:
        buckets = ol.Buckets(dim=0, sizes=(4,), **options)
        fast: Any = ol.graph(model, buckets=buckets, warmup=1)
        for i in range(4):
            fast(rand(i, 3, 3))
        return replays(fast)

    assert replayed(model, independent=True) == 3
    assert replayed(model.eval()) == 3
    model[1].p = 0.0
    assert replayed(model.train()) == 3
