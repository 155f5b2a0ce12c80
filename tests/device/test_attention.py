"""Memory-efficient attention: its seeds are on the host in eager, and on the device in a capture.

Its backward reads them where they are; outside of a capture, on the device, that ends the process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onelaunch as ol

from .drop_in import assert_same, on_accelerators, replays
from .steps import Randomness, Training, as_eager, batch, training_of
from .training import Rand

pytestmark = on_accelerators
_operator = torch.ops.aten._scaled_dot_product_efficient_attention
_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return _operator(q, k, v, None, True, p)[0]


class ByHand(torch.autograd.Function):
    """The operator and its backward, called by a function of the user's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        out, sums, seed, offset = _operator(q, k, v, None, True, p)
        ctx.save_for_backward(q, k, v, out, sums, seed, offset)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, sums, seed, offset = ctx.saved_tensors
        wanted = [True, True, True, False]
        found = _backward(
            grad, q, k, v, None, out, sums, philox_seed=seed, philox_offset=offset,
            dropout_p=ctx.p, grad_input_mask=wanted
        )  # fmt: skip
        return (*found[:3], None)


class Attention(nn.Module):
    """Words (batch, length, 8): two heads of attention with dropout, between two linear layers."""

    def __init__(self, p: float, how: Callable[..., Tensor] = attention) -> None:
        super().__init__()
        self.inner, self.out, self.p, self.how = nn.Linear(8, 24), nn.Linear(8, 8), p, how

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            t.reshape(n, length, 2, 4).transpose(1, 2) for t in self.inner(x).chunk(3, dim=-1)
        )
        p = self.p if self.training else 0.0
        y = self.how(q, k, v, p).transpose(1, 2).reshape(n, length, 8)
        return x + self.out(y)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


def stack(device: torch.device, p: float, kind: str = "plain") -> nn.Module:
    torch.manual_seed(3)
    how: Any = ByHand.apply if kind == "by hand" else attention
    layers: list[nn.Module] = [Attention(p, how) for _ in range(2)]
    if kind == "checkpoint":
        layers = [Checkpointed(layer) for layer in layers]
    return nn.Sequential(*layers, nn.Dropout(p)).to(device)


def alike(
    device: torch.device,
    model: nn.Module,
    program: Callable[[Any, int], Any],
    *,
    calls: int = 6,
    **options: Any,
) -> Any:
    """Run a program with a model and with its graphed twin, each with a stream of random numbers
    that nobody seeds; compare results, gradients, and where the streams end."""
    models = model, copy.deepcopy(model)
    fast = ol.graph(models[1], warmup=1, **options)
    random = Randomness(device), Randomness(device)
    for i in range(calls):
        found: list[Any] = []
        for own, called, stream in zip(models, (models[0], fast), random, strict=True):
            with stream:
                own.zero_grad()
                found.append([program(called, i), [p.grad for p in own.parameters()]])
        assert_same(found[1], found[0], f"call {i}")
    assert_same(random[1].draw(device), random[0].draw(device), "random state")
    assert replays(fast) > 0
    return fast


KINDS = pytest.mark.parametrize("kind", ["plain", "by hand", "checkpoint"])
DROPOUT = pytest.mark.parametrize("p", [0.0, 0.4])


@DROPOUT
@KINDS
def test_an_ordinary_loop(device: torch.device, rand: Rand, kind: str, p: float) -> None:
    def program(model: Any, i: int) -> Any:
        x = rand(i, 2, 8, 8).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        return loss, x.grad

    alike(device, stack(device, p, kind), program)


@KINDS
def test_backwards_that_stay_eager(device: torch.device, rand: Rand, kind: str) -> None:
    """No recording stands for them: another layout, a mode, anomaly detection, a second one."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    def program(model: Any, i: int) -> Any:
        y = model(rand(i, 2, 8, 8))
        if i % 4 == 0:
            y.backward(rand(i, 8, 8, 2).permute(2, 0, 1))
        elif i % 4 == 1:
            with Mode():
                y.sum().backward()
        elif i % 4 == 2:
            y.sum().backward(retain_graph=True)
            y.square().sum().backward()
        else:
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                y.sum().backward()
        return y

    alike(device, stack(device, 0.4, kind), program, calls=9)


def test_gradients_that_are_kept(device: torch.device, rand: Rand) -> None:
    kept: list[Any] = []

    def program(model: Any, i: int) -> Any:
        ys = [model(rand(10 * i + j, 2, 8, 8)) for j in range(2)]
        found = [torch.autograd.grad(y.sum(), list(model.parameters())) for y in reversed(ys)]
        kept.append(found)
        return found

    alike(device, stack(device, 0.4), program, max_in_flight=2)


def whole_step(device: torch.device, kind: str, p: float) -> Training:
    model = nn.Sequential(nn.Linear(4, 64), nn.Unflatten(1, (8, 8)), stack(device, p, kind))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(64, 3)).to(device)
    torch.manual_seed(5)
    for q in model.parameters():
        nn.init.normal_(q, 0.0, 0.1) if q.dim() > 1 else nn.init.zeros_(q)
    capturable = {"capturable": True} if device.type != "cpu" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **capturable)
    return training_of(model, optimizer)


@DROPOUT
@KINDS
def test_a_whole_step(device: torch.device, kind: str, p: float) -> None:
    as_eager(lambda: whole_step(device, kind, p), device)


# Dynamo keeps it from being shown, which does not keep it from being an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_a_whole_step_that_is_compiled(device: torch.device, p: float) -> None:
    """It is watched outside of a capture, where the backward reads the seeds on the host. Inductor
    draws other numbers than eager: with dropout, two of them are compared."""
    jobs = whole_step(device, "plain", p), whole_step(device, "plain", p)
    first: Any = ol.graph(jobs[0].step, compile=True)
    second: Any = ol.graph(jobs[1].step, compile=True) if p else jobs[1].step
    random = Randomness(device), Randomness(device)
    for i in range(9):
        with random[0]:
            got = first(*batch(i, device))
        with random[1]:
            expected = second(*batch(i, device))
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        assert got.isfinite()
        for a, b in zip(jobs[0].model.parameters(), jobs[1].model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert replays(first) >= 4
    assert not first.recordings[0].retries  # Dynamo's marks on parameters are no change of state
    assert first.stats().warmup_calls == 4  # one makes the optimizer's state


def test_buckets(device: torch.device, rand: Rand) -> None:
    """Without dropout: a padded row draws as well."""
    torch.manual_seed(3)
    model = nn.Sequential(Attention(0.0), Attention(0.0)).to(device)
    other = copy.deepcopy(model)
    fast = ol.graph(other, buckets=ol.Buckets(0, (2, 4)), warmup=1)
    for i, n in enumerate([2, 1, 4, 3, 2, 4, 1]):
        for m in (model, fast):
            m.zero_grad()
            m(rand(i, n, 8, 8)).square().mean().backward()
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    assert replays(fast) >= 4


@pytest.mark.cpu
@DROPOUT
def test_a_seed_that_is_returned(device: torch.device, rand: Rand, p: float) -> None:
    """Eager has it on the host; what a backward of the caller's would read there."""

    def f(x: Tensor) -> Any:
        return _operator(x, x, x, None, True, p)

    fast = ol.graph(f, warmup=1)
    x = rand(1, 2, 2, 8, 4)
    assert fast(x)[2].device.type == "cpu"
    with pytest.raises(ol.CaptureError, match=r"OL104.*seed of a backward"):
        fast(x)


@pytest.mark.cpu
@pytest.mark.usefixtures("compiled")
def test_a_seed_that_compiled_code_returns(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: _operator(x, x, x, None, True, 0.4), warmup=2, compile=True)

    def calls() -> None:
        for i in range(4):
            assert fast(rand(i, 2, 2, 8, 4))[2].device.type == "cpu"

    with pytest.raises(ol.CaptureError, match=r"OL104.*a host tensor is returned"):
        calls()
