"""Random modules and losses: gradients equal to eager's, bit for bit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, on_cpu_and_cuda, random_tensor, replays
from .training import state_of

WIDTH = 4
LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "relu in place": lambda: InPlace(),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.3),
    "scale": lambda: Scale(),
    "residual": lambda: Residual(),
}
LOSSES: dict[str, Any] = {
    "sum": lambda y: y.sum(),
    "mean square": lambda y: y.square().mean(),
    "max": lambda y: y.amax(),
    "first column": lambda y: y[:, 0].exp().sum(),
    "smooth l1": lambda y: nn.functional.smooth_l1_loss(y, torch.ones_like(y)),
    "transposed": lambda y: (y.t() @ y).norm(),
}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return x * self.weight + x.detach() / (1 + self.steps)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 0).relu_()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.inner(x)) * x


@on_cpu_and_cuda
@pytest.mark.usefixtures("device")
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    losses=st.lists(st.sampled_from(sorted(LOSSES)), min_size=1, max_size=2),
    takes=st.integers(1, 2),
    wants=st.booleans(),
    clears=st.sampled_from(["to none", "to zero", "never"]),
    seed=st.integers(0, 1000),
)
@pytest.mark.thorough
def test_gradients_of_random_modules(
    device: torch.device,
    names: list[str],
    losses: list[str],
    takes: int,
    wants: bool,
    clears: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(LAYERS[name]() for name in names)).to(device)
    other = copy.deepcopy(model)
    fast = ol.graph(other, warmup=1, max_in_flight=8)
    trained = [p for p in model.parameters() if p.requires_grad]
    for i in range(4):
        inputs: list[list[Tensor]] = []
        for m in (model, fast):
            torch.manual_seed(seed + i)
            if clears != "never":
                m.zero_grad(set_to_none=clears == "to none")
            # One use of each: eager adds up the uses of a tensor in another order, and rounds.
            names_of = losses * takes
            xs = [random_tensor(10 * i + k, 3, WIDTH, device=device) for k in range(len(names_of))]
            xs = [x.requires_grad_(wants) for x in xs]
            total = sum(LOSSES[name](m(x)) for name, x in zip(names_of, xs, strict=True))
            if wants or trained:
                assert isinstance(total, Tensor)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    total.backward()
            inputs.append(xs)
        for x, y in zip(*inputs, strict=True):
            assert_same(y.grad, x.grad)
        assert_same(state_of(other), state_of(model), f"step {i}")
    assert replays(fast) >= 3
