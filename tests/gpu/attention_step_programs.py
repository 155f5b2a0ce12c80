"""Training with attention by a kernel that is chosen by its name, with dropout: in pairs, in whole
steps, under checkpoints and in buckets. Each program is to be run in a process of its own.

``python -m tests.gpu.attention_step_programs NAME KERNEL DTYPE [KIND]`` ends with 0 where the
program was as it says: equal to eager bit for bit, and the generator where eager leaves it.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import onelaunch as ol
from tests.device.drop_in import assert_same, random_tensor, replays
from tests.device.steps import Training, as_eager, batch
from tests.device.test_attention import Checkpointed, alike
from tests.device.training import train

DEVICE = torch.device("cuda", 0)
OPERATORS = {
    "FLASH_ATTENTION": "aten::_scaled_dot_product_flash_attention",
    "EFFICIENT_ATTENTION": "aten::_scaled_dot_product_efficient_attention",
    "CUDNN_ATTENTION": "aten::_scaled_dot_product_cudnn_attention",
}
PLACES = ("inside", "around")
"""Where the kernel is chosen: in each layer, or once around forward and backward."""
SIZES = (2, 1, 4, 3, 2, 4, 1, 3, 4, 2)
"""Rows of each call; the first for a bucket of 2 and of 4 fill it, so that no warm-up is padded."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def random_state() -> Tensor:
    return torch.cuda.get_rng_state(DEVICE)


def chosen(kernel: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if kernel is None else sdpa_kernel(getattr(SDPBackend, kernel))


class Attention(nn.Module):
    """Words (batch, 64, 64): two heads of attention, between two linear layers."""

    def __init__(self, kernel: str | None) -> None:
        super().__init__()
        self.inner, self.out, self.kernel = nn.Linear(64, 192), nn.Linear(64, 64), kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        with chosen(self.kernel):
            y = attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Words(nn.Module):
    """Rows of 4 float32 numbers to words of another dtype, and those to 3 numbers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4096), body, nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype)).unflatten(1, (64, 64))
        return self.last(self.body(x).mean(1)).float()


def layers(kernel: str, dtype: str, kind: str = "plain", place: str = "inside") -> nn.Module:
    torch.manual_seed(3)
    made: list[nn.Module] = [Attention(kernel if place == "inside" else None) for _ in range(2)]
    if kind == "checkpoint":
        made = [Checkpointed(layer) for layer in made]
    return nn.Sequential(*made).to(DEVICE, getattr(torch, dtype))


def words(i: int, rows: int, dtype: str) -> Tensor:
    return random_tensor(i, rows, 64, 64, device=DEVICE, dtype=getattr(torch, dtype))


def check(kernel: str, dtype: str) -> None:
    """In eager the layers run the kernel of that name and no other, and it draws."""
    names: list[str] = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    model, x = layers(kernel, dtype), words(0, 2, dtype)
    with Listener():
        first = model(x)
    before = random_state()
    assert not torch.equal(model(x), first)
    assert not torch.equal(random_state(), before)
    found = [n for n in names if n.startswith("aten::_scaled_dot_product")]
    assert found == [OPERATORS[kernel]] * 2, names


def trained(kernel: str, dtype: str, place: str) -> Callable[[Any, int], Any]:
    """An ordinary step with a model, the optimizer's part by hand."""

    def program(model: Any, i: int, rows: int = 2) -> Any:
        model.zero_grad()
        x = words(i, rows, dtype).requires_grad_()
        with chosen(kernel if place == "around" else None):
            loss = model(x).float().square().mean()
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad.any()
                p.sub_(p.grad, alpha=0.1)
        return loss, x.grad, random_state()

    return program


def job(kernel: str, dtype: str, kind: str, place: str) -> Training:
    """A whole step."""
    model = Words(layers(kernel, dtype, kind, place)).to(DEVICE, getattr(torch, dtype))
    torch.manual_seed(5)
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with chosen(kernel if place == "around" else None):
            loss = F.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


def pair(kernel: str, dtype: str, kind: str) -> None:
    for place in PLACES:
        model = layers(kernel, dtype, kind, place)
        alike(DEVICE, model, trained(kernel, dtype, place))


def step(kernel: str, dtype: str, kind: str) -> None:
    for place in PLACES:
        as_eager(lambda p=place: job(kernel, dtype, kind, p), DEVICE, rows=lambda i: 2)


def varied(kernel: str, dtype: str) -> Callable[[Any, int], Any]:
    """An ordinary step with another number of rows in each call."""
    program: Any = trained(kernel, dtype, "inside")
    return lambda model, i: program(model, i, SIZES[i])


def steps_of_sizes(kernel: str, dtype: str, **options: Any) -> None:
    """Whole steps with another number of rows in each call."""
    as_eager(
        lambda: job(kernel, dtype, "plain", "inside"),
        DEVICE,
        calls=len(SIZES),
        rows=lambda i: SIZES[i],
        warmup=1,
        **options,
    )


def buckets_of_each_size(kernel: str, dtype: str) -> None:
    """Nothing is padded, so that nothing is drawn for padded rows."""
    buckets, calls = ol.Buckets(0, (1, 2, 3, 4)), len(SIZES)
    model = layers(kernel, dtype)
    fast = alike(DEVICE, model, varied(kernel, dtype), calls=calls, buckets=buckets)
    assert len(fast.recordings) == 4, [r.why for r in fast.recordings]
    steps_of_sizes(kernel, dtype, recordings=4, min_replays=calls - 4, buckets=buckets)


def buckets_refused(kernel: str, dtype: str) -> None:
    """A padded row draws as well. The refusal leaves the random state as it was, and a loop that
    goes on eagerly is eager's."""
    options: dict[str, Any] = {"buckets": ol.Buckets(0, (2, 4)), "warmup": 1}
    fast: Any = ol.graph(layers(kernel, dtype), **options)
    fast(words(0, 1, dtype))
    before = random_state()
    with pytest.raises(ol.CaptureError, match=r"OL140.*attention"):
        fast(words(1, 2, dtype))
    assert torch.equal(random_state(), before)
    whole: Any = ol.graph(job(kernel, dtype, "plain", "inside").step, **options)
    whole(*batch(0, DEVICE, 1))
    before = random_state()
    with pytest.raises(ol.CaptureError, match="OL140"):
        whole(*batch(1, DEVICE, 2))
    assert torch.equal(random_state(), before)

    eagerly: dict[str, Any] = {"buckets": options["buckets"], "on_refusal": "eager"}
    program = varied(kernel, dtype)
    train(layers(kernel, dtype), program, steps=len(SIZES), recordings=0, **eagerly)
    steps_of_sizes(kernel, dtype, recordings=0, min_replays=0, **eagerly)


def buckets_independent(kernel: str, dtype: str) -> None:
    """Where the caller asserts that rows are independent, a replay is eager at the bucket's size,
    and its random state afterwards is that."""
    model = layers(kernel, dtype)
    other = copy.deepcopy(model)
    fast: Any = ol.graph(other, buckets=ol.Buckets(0, (2, 4), independent=True), warmup=1)

    def step(called: Any, own: nn.Module, x: Tensor, rows: int, seed: int) -> Any:
        own.zero_grad()
        torch.manual_seed(seed)
        loss = called(x)[:rows].float().square().mean()
        loss.backward()
        return loss, [p.grad for p in own.parameters()], random_state()

    for i, n in enumerate(SIZES):
        x = words(i, n, dtype)
        padded = torch.cat([x, x[-1:].expand(n % 2, -1, -1)])  # to 2 or 4 rows
        got, expected = step(fast, other, x, n, i), step(model, model, padded, n, i)
        assert_same(got, expected, f"call {i}")
    assert replays(fast) == len(SIZES) - 2


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    check(*sys.argv[2:4])
    globals()[sys.argv[1]](*sys.argv[2:])
