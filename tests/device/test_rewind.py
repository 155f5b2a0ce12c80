"""Random state that a callable saves and sets: checkpoints with dropout in them, `fork_rng`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol

from .drop_in import assert_same, random_tensor, replays
from .steps import Randomness, Training, as_eager
from .training import Rand, train


class Block(nn.Module):
    """A part with dropout in it, checkpointed, between other uses of random numbers."""

    def __init__(self, reentrant: bool, p: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 8))
        self.last = nn.Dropout(p)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.last(y) + x


def stack(device: torch.device, reentrant: bool, p: float = 0.5) -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [Block(reentrant, p) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 3)).to(device)


def alike(device: torch.device, program: Callable[[Any, int], Any]) -> Any:
    """Train a stack both ways, each with a stream of random numbers that nobody seeds."""
    models = stack(device, reentrant=False), stack(device, reentrant=False)
    fast = ol.graph(models[1], warmup=1)
    random = Randomness(device), Randomness(device)
    for i in range(7):
        found: list[Any] = []
        for model, called, stream in zip(models, (models[0], fast), random, strict=True):
            with stream:
                result = program(called, i)
            found.append([result, [p.grad for p in model.parameters()]])
        assert_same(found[1], found[0], f"call {i}")
    assert_same(random[1].draw(device), random[0].draw(device), "random state")
    return fast


def test_dropout_in_a_checkpoint(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        model(x).square().mean().backward()
        return x.grad

    fast = alike(device, program)
    assert len(fast.recordings) == 1
    assert fast.recordings[0].replays == 6


def test_a_reentrant_checkpoint_is_refused_in_a_forward(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(stack(device, reentrant=True), warmup=1)
    fast(rand(0, 5, 4).requires_grad_()).sum().backward()
    with pytest.raises(ol.CaptureError, match="use_reentrant=False") as caught:
        fast(rand(1, 5, 4).requires_grad_())
    assert caught.value.code == "OL116"


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_checkpoint_of_a_whole_step(device: torch.device, reentrant: bool) -> None:
    def job() -> Training:
        model = stack(device, reentrant)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (nn.functional.dropout(model(x), 0.2) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss + torch.rand_like(loss)

        return Training(model, [optimizer], step)

    as_eager(job, device)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the one inside
def test_a_backward_inside_the_backward_is_refused(device: torch.device, rand: Rand) -> None:
    inner = nn.Linear(4, 4).to(device)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            ctx.save_for_backward(x)
            return inner(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                y = inner(x)
            torch.autograd.backward(y, g)
            return x.grad

    model = nn.Linear(4, 4).to(device)
    fast = ol.graph(lambda x: Again.apply(model(x)), warmup=1)
    eager = ol.graph(lambda x: Again.apply(model(x)), warmup=1, on_refusal="eager")
    for _ in range(2):
        fast(rand(0, 5, 4)).sum().backward()
    with pytest.raises(ol.CaptureError, match="a leaf of shape") as caught:
        fast(rand(0, 5, 4)).sum().backward()
    assert caught.value.code == "OL116"
    for i in range(6):
        inner.zero_grad()
        with nullcontext() if i != 2 else pytest.warns(ol.GraphWarning, match="OL306"):
            eager(rand(i, 5, 4)).sum().backward()
        got, inner.weight.grad = inner.weight.grad, None
        Again.apply(model(rand(i, 5, 4))).sum().backward()
        assert_same(got, inner.weight.grad, f"call {i}")


def test_several_forwards_before_their_backwards(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> None:
        model.zero_grad()
        losses = [model(rand(10 * i + k, 5, 4)).square().mean() for k in range(3)]
        for loss in losses:
            loss.backward()

    fast = alike(device, program)
    assert len(fast.recordings) == 3


def test_a_second_backward_draws_the_same_once_more(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        loss = model(x).square().mean()
        once = torch.autograd.grad(loss, x, retain_graph=True)
        torch.rand(3, device=device)  # the stream goes on meanwhile
        return once, torch.autograd.grad(loss, x)

    alike(device, program)


def test_a_seed_before_each_call(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> None:
        model.zero_grad()
        model(rand(i, 5, 4)).square().mean().backward()

    train(stack(device, reentrant=False), program)


def test_a_checkpoint_in_a_checkpoint(device: torch.device) -> None:
    def job() -> Training:
        inner = stack(device, reentrant=False)
        optimizer = torch.optim.SGD(inner.parameters(), 0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            found: Any = checkpoint(inner, x, use_reentrant=False)
            loss = (found - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return Training(inner, [optimizer], step)

    as_eager(job, device)


def test_a_checkpoint_that_draws_nothing(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        x = rand(i, 5, 4).requires_grad_()
        model(x).square().mean().backward()
        return x.grad

    train(stack(device, reentrant=False, p=0.0), program)


def as_eager_draws(device: torch.device, f: Callable[[Tensor], list[Tensor]]) -> None:
    """Five calls both ways, each with a stream of random numbers that nobody seeds."""
    fast = ol.graph(f, warmup=1)
    random = Randomness(device), Randomness(device)
    for i in range(5):
        x = random_tensor(i, 5, device=device)
        with random[0]:
            expected = f(x)
        with random[1]:
            assert_same(fast(x), expected, f"call {i}")
    assert_same(random[1].draw(device), random[0].draw(device), "random state")
    assert replays(fast) == 4


def test_numbers_drawn_in_a_fork(device: torch.device) -> None:
    devices = [device] if device.type == "cuda" else []

    def f(x: Tensor) -> list[Tensor]:
        drawn = [torch.rand_like(x)]
        with torch.random.fork_rng(devices):
            drawn += [torch.rand_like(x), torch.rand_like(x)]
        return [*drawn, torch.rand_like(x)]

    as_eager_draws(device, f)


def test_a_state_that_is_set_twice(device: torch.device) -> None:
    module: Any = torch.cuda if device.type == "cuda" else torch

    def f(x: Tensor) -> list[Tensor]:
        torch.rand_like(x)
        state = module.get_rng_state()
        drawn = [torch.rand_like(x)]
        for _ in range(2):
            module.set_rng_state(state)
            drawn.append(torch.rand_like(x))
        assert len(drawn) == 3
        return [*drawn, torch.rand_like(x)]

    as_eager_draws(device, f)


def test_a_state_of_before_the_call_is_refused(device: torch.device) -> None:
    module: Any = torch.cuda if device.type == "cuda" else torch
    state = module.get_rng_state()

    def f(x: Tensor) -> Tensor:
        module.set_rng_state(state)
        return x + torch.rand_like(x)

    fast = ol.graph(f, warmup=1)
    x = random_tensor(1, 5, device=device)
    fast(x)
    with pytest.raises(ol.CaptureError, match=r"module\.set_rng_state\(state\)") as caught:
        fast(x)
    assert caught.value.code == "OL106"
