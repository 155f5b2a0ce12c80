"""Steps to 16 and 8 bits."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.unit.checklist_steps import apart, contents, refusal, same, take

X = torch.randn(4, 32)


class Pair(NamedTuple):
    logits: Tensor
    index: Tensor


class Net(nn.Module):
    """Results in a dict: floats, integers, a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        y = self.inner(x) * scale
        return {"y": y, "pair": Pair(y, y.argmax(-1)), "name": "net"}


SCALE = torch.ones(16)


@pytest.mark.parametrize("way", ["bf16", "bf16-autocast", "fp16", "fp16-autocast"])
def test_results_keep_dtype_and_structure(way: str) -> None:
    model = Net().eval()
    before = contents(model)
    found = take(model, (X,), f"half:{way}", scale=SCALE).call(X, scale=SCALE)
    expected = model(X, scale=SCALE)
    assert found.keys() == expected.keys()
    assert found["name"] == "net"
    assert type(found["pair"]) is Pair
    assert found["y"].dtype == torch.float32
    assert found["pair"].index.dtype == torch.int64
    assert 1e-5 < apart(found["y"], expected["y"]) < 2e-2
    assert same(model, before)


def test_a_cast_model_is_cast_once() -> None:
    built: Any = take(nn.Sequential(nn.Linear(32, 16)), (X,), "half:bf16").call
    assert {p.dtype for p in built.fn.parameters()} == {torch.bfloat16}
    built: Any = take(nn.Sequential(nn.Linear(32, 16)), (X,), "half:bf16-autocast").call
    assert {p.dtype for p in built.fn.parameters()} == {torch.float32}


@pytest.mark.parametrize("way", ["dynamic", "weight-only"])
def test_linear_layers_in_int8(way: str) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.Linear(16, 3)).eval()
    before = contents(model)
    built = take(model, (X,), "inference-mode", f"int8:{way}")
    assert built.did[f"int8:{way}"] == "2 of 3 linear layers"
    result = built.call(X)
    assert 1e-4 < apart(result, model(X)) < 0.05
    assert same(model, before)
    assert type(model[0].weight) is nn.Parameter


def test_merged_layers_in_int8() -> None:
    pytest.importorskip("torchao", reason="needs torchao")

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], -1)

    model = Heads().eval()
    built = take(model, (X,), "inference-mode", "merge-branches:parallel", "int8:weight-only")
    assert apart(built.call(X), model(X)) < 0.05


def test_int8_without_torchao_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    model = nn.Linear(32, 16)
    assert refusal(model, (X,), "int8:dynamic") == "torchao is not installed"


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchao as absent as where it is not installed."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else find(name, *a)
    )
    monkeypatch.setitem(sys.modules, "torchao", None)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["dynamic", "weight-only"])
def test_linear_layers_in_fp8(way: str) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)).eval().cuda()
    x = torch.randn(32, 64, device="cuda")
    built = take(model, (x,), "inference-mode", "half:bf16", f"fp8:{way}")
    assert apart(built.call(x), model(x)) < 0.1
