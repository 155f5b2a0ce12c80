"""Layers of torch that draw in training: attention, recurrent layers, RReLU, kinds of dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .steps import Training, as_eager, training_of
from .test_attention import Checkpointed, alike
from .training import Rand

# `alike` copies the model, and of a copy torch says so in plain eager.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")


class Layer(nn.Module):
    """Words (batch, length, 8) through a layer of torch's, with what it gives beside them."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.MultiheadAttention):
            y, weights = self.inner(x, x, x, **self.options)
            return torch.tanh(x + y if weights is None else x + y + weights.sum())
        found = self.inner(x)
        # What RReLU saves must not be the last that a checkpoint runs again: torch stops there,
        # before its kernel has filled it.
        return torch.tanh(x + (found[0] if isinstance(found, tuple) else found))


def recurrent(kind: Any) -> Callable[[], nn.Module]:
    return lambda: Layer(kind(8, 8, num_layers=2, dropout=0.4, batch_first=True))


def attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Layer(nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True), **options)


_RECURRENT = ("RNN", "LSTM", "GRU")
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": attention(need_weights=False),
    "attention and weights": attention(),
    "RNN": recurrent(nn.RNN),
    "LSTM": recurrent(nn.LSTM),
    "GRU": recurrent(nn.GRU),
    "RReLU": lambda: Layer(nn.RReLU()),
    "RReLU in place": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(inplace=True)),
    "AlphaDropout": lambda: Layer(nn.AlphaDropout(0.3)),
    "Dropout1d": lambda: Layer(nn.Dropout1d(0.4)),
}


# Torch has no kernels for the cells of these on a device like the emulated one.
_PLACES = [(d, n) for d in ("cpu", "tape") for n in LAYERS]
_ON_CUDA = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in LAYERS]
EACH = pytest.mark.parametrize(("device", "name"), [*_PLACES, *_ON_CUDA], indirect=["device"])
GRAPHED = pytest.mark.parametrize(  # cuDNN seeds the dropout of recurrent layers on the host
    ("device", "name"),
    [*_PLACES, *(p for p in _ON_CUDA if p.values[1] not in _RECURRENT)],
    indirect=["device"],
)
CHECKPOINTED = pytest.mark.parametrize("checkpointed", [False, True])


def model_of(name: str, device: torch.device, checkpointed: bool) -> nn.Module:
    torch.manual_seed(3)
    layers = [LAYERS[name]() for _ in range(2)]
    if checkpointed:
        layers = [Checkpointed(layer) for layer in layers]
    return nn.Sequential(*layers, nn.Dropout(0.4)).to(device)


@GRAPHED
@CHECKPOINTED
def test_pairs(device: torch.device, rand: Rand, name: str, checkpointed: bool) -> None:
    def program(model: Any, i: int) -> Any:
        x = rand(i, 2, 4, 8).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        return loss, x.grad

    alike(device, model_of(name, device, checkpointed), program)


@GRAPHED
@CHECKPOINTED
def test_whole_steps(device: torch.device, name: str, checkpointed: bool) -> None:
    def job() -> Training:
        torch.manual_seed(5)
        inner = model_of(name, device, checkpointed)
        model = nn.Sequential(nn.Linear(4, 32), nn.Unflatten(1, (4, 8)), inner)
        model = nn.Sequential(model, nn.Flatten(), nn.Linear(32, 3)).to(device)
        return training_of(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    as_eager(job, device)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", _RECURRENT)
def test_dropout_of_cudnn_is_refused(device: torch.device, rand: Rand, name: str) -> None:
    fast: Any = ol.graph(model_of(name, device, checkpointed=False), warmup=1)

    def train() -> None:
        for i in range(4):
            fast(rand(i, 2, 8, 8)).sum().backward()

    with pytest.raises(ol.CaptureError, match=r"OL106[\s\S]*nn.Dropout between"):
        train()


@EACH
@pytest.mark.parametrize("whole", [False, True])
def test_buckets_are_refused(device: torch.device, rand: Rand, name: str, whole: bool) -> None:
    """A padded row draws as well, and the real rows other numbers."""
    model = nn.Sequential(nn.Linear(8, 8), LAYERS[name]()).to(device)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    fast: Any = ol.graph(step if whole else model, buckets=ol.Buckets(0, (2, 4)), warmup=1)
    fast(rand(0, 1, 8, 8))
    with pytest.raises(ol.CaptureError, match="OL140.*runs its backward" if whole else "OL140"):
        fast(rand(1, 2, 8, 8))


def test_buckets_name_the_dropout_of_attention(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    fast = ol.graph(f, buckets=ol.Buckets(0, (4,)), warmup=1)
    with torch.no_grad():
        fast(rand(0, 2, 2, 8, 8))
        with pytest.raises(ol.CaptureError, match="drawn for the padded rows too") as caught:
            fast(rand(1, 2, 2, 8, 8))
    assert "independent=True" in caught.value.fix
