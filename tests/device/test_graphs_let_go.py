"""No part of onelaunch keeps the autograd graph of a run that is over.

An AccumulateGrad node works on the stream where it was made for as long as a graph holds it, so one
that outlives its run would have the next backward wait for another stream, and warn.
"""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.testing.ports import Ports

from .drop_in import Rand


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Nothing may wait for the collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def is_kept(p: Tensor) -> bool:
    """Whether a graph holds the AccumulateGrad node of `p`; marks the node."""
    node: Any = p.expand_as(p).grad_fn
    marks = node.next_functions[0][0].metadata
    return bool(marks.setdefault("calls", []).append(0) or len(marks["calls"]) > 1)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sqrt()


def test_proofs_of_a_bucket(device: torch.device, rand: Rand) -> None:
    model = Root().to(device)
    fast = ol.graph(model, buckets=ol.Buckets(0, (8,), pad={"x": 1}), warmup=1)
    for n in (5, 5, 3):
        fast(rand(n, n, 4).abs() + 0.1).sum().backward()
        assert not is_kept(model.w)


def test_a_capture_that_finds_out_that_results_require_grad(
    device: torch.device, rand: Rand
) -> None:
    """It hands on the gradient too, which is another after each `zero_grad`: captured anew."""
    model = Root().to(device)
    fast = ol.graph(lambda x: (model(x), model.w.grad), warmup=1)
    for i in range(10):
        if i % 4 == 3:
            model.zero_grad()
        y, grad = fast(rand(i, 3, 4).abs() + 0.1)
        assert grad is model.w.grad
        y.sum().backward()
        del y, grad
        assert not is_kept(model.w)


def reads(model: Root, x: Tensor) -> Tensor:
    return model(x) * model(x).sum().item()


def draws_on_the_host(model: Root, x: Tensor) -> Tensor:
    return model(x) * torch.rand(4, device="cpu").to(x.device)


def seeds(model: Root, x: Tensor) -> Tensor:
    y = model(x)
    torch.random.default_generator.set_state(torch.random.default_generator.get_state())
    return y


def fails(model: Root, x: Tensor) -> Tensor:
    raise ValueError(model(x).shape)


REFUSED: dict[str, Callable[[Root, Tensor], Tensor]] = {
    "a host read": reads,
    "random numbers of the host": draws_on_the_host,
    "a generator's state": seeds,
    "an error of its own": fails,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("step", [False, True], ids=["pair", "step"])
def test_refusals(device: torch.device, rand: Rand, name: str, step: bool) -> None:
    model = Root().to(device)

    def f(x: Tensor) -> Tensor:
        y = REFUSED[name](model, x)
        if step:
            model.zero_grad()
            y.sum().backward()
            return y.detach()
        return y

    fast = ol.graph(f, warmup=1)
    for i in range(4):
        with contextlib.suppress(ol.CaptureError, ValueError):
            fast(rand(i, 5, 4).abs())
        assert not is_kept(model.w), i


def asks(x: Tensor) -> Tensor:
    """Is refused until it is told that it is captured, as the masks of transformers are."""
    if not torch.cuda.is_current_stream_capturing() and bool((x > -9).all()):
        return x * 1
    return x


def catches(x: Tensor) -> Tensor:
    with contextlib.suppress(ol.CaptureError):
        x.sum().item()
    return x


def draws_in_python(x: Tensor) -> Tensor:
    return x * random.random()


@pytest.fixture
def captures_keep_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the emulated device hold the tensors of their call, as those of CUDA do."""
    add_port = Ports.input

    def keep(self: Any, source: Tensor, *args: Any) -> None:
        self.examples = [*getattr(self, "examples", ()), source]
        add_port(self, source, *args)

    monkeypatch.setattr(Ports, "input", keep)


@pytest.mark.usefixtures("captures_keep_examples")
@pytest.mark.parametrize("ask", [asks, catches, draws_in_python])
@pytest.mark.parametrize("on_refusal", ["raise", "eager"])
def test_callers_of_what_is_refused(
    device: torch.device, rand: Rand, ask: Callable[[Tensor], Tensor], on_refusal: str
) -> None:
    """A refusal holds the frames that it passed through, and these hold those around them."""
    model = Root().to(device)
    fast = ol.graph(lambda x: model(ask(x)), warmup=1, on_refusal=on_refusal)
    held: list[weakref.ref[Tensor]] = []

    def call(i: int) -> None:
        x = rand(i, 5, 4).abs()
        held.append(weakref.ref(x))
        with contextlib.suppress(ol.CaptureError):
            y = fast(x)
            held.append(weakref.ref(y))
            y.sum().backward()

    for i in range(5):
        with warnings.catch_warnings(action="ignore"):
            call(i)
        assert not any(t() is not None for t in held), i
        assert not is_kept(model.w), i


def test_a_node_that_the_callable_looked_at(device: torch.device, rand: Rand) -> None:
    model = Root().to(device)

    def f(x: Tensor) -> Tensor:
        y = model(x)
        node: Any = y.grad_fn
        return y * len(node.next_functions[0][0].next_functions)

    fast = ol.graph(f, warmup=1)
    for i in range(4):
        fast(rand(i, 5, 4).abs()).sum().backward()
        assert not is_kept(model.w), i
