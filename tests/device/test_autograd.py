"""Gradients: of one module, and of callables that run a backward themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.capture import survivors
from onelaunch.watch.ledger import Ledger

from .drop_in import Rand, alike, assert_same, drop_in, on_cpu_and_cuda, replays
from .training import Made, Optimized, train


@pytest.mark.filterwarnings("ignore:.*OL303")
def test_a_graph_over_a_view_that_was_written_behind_it(rand: Rand) -> None:
    """A backward over it raises in eager; a call does not."""

    def f(x: Tensor) -> Tensor:
        y = x.view_as(x)
        with torch.enable_grad():
            z = y.clamp(-2, 2)
        x.copy_(x.argmax())
        return z

    fast = ol.graph(f, warmup=1)
    for i in range(4):
        x, y = rand(i, 4).requires_grad_(), rand(i, 4).requires_grad_()
        with torch.no_grad():
            assert_same(fast(x), f(y))
        assert_same(x, y)


class Keeps(nn.Module):
    """Keeps what its backward reads as well: of before the call."""

    def __init__(self, kind: str, device: torch.device) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.kind, self.seen = kind, None
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Any = {"parameter": self.outer.weight.detach()[0], "buffer": self.scale[1:]}
        self.seen = chosen.get(self.kind, [x * 2, self.outer.weight.detach()[0], self.scale])
        return self.outer(self.inner(x)) * self.scale


@pytest.mark.parametrize("kind", ["parameter", "buffer", "several"])
def test_a_view_of_a_parameter_or_buffer_is_stored(
    device: torch.device, rand: Rand, kind: str
) -> None:
    def step(model: Any, i: int) -> Any:
        loss = model(rand(i, 3, 4)).square().sum()
        loss.backward()
        return loss, model.seen

    model = Keeps(kind, device)
    fast = train(model, step, recordings=1 if kind != "several" else None)
    kept = fast.seen if kind != "several" else fast.seen[1]
    base: Any = fast.scale if kind == "buffer" else fast.outer.weight
    assert kept.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_grad_mode_with_nothing_that_requires_grad_is_recorded(rand: Rand) -> None:
    drop_in(lambda x: x * 2, lambda i: (rand(i, 4),), mode=torch.enable_grad)


def test_an_output_detached_inside_is_recorded(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 2, device=device)
    drop_in(lambda x: model(x).detach(), lambda i: (rand(i, 3, 4),), mode=torch.enable_grad)


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_create_graph_inside_is_right_refused_or_eager(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (g,) = torch.autograd.grad((z**3).sum(), z)
        return g

    with contextlib.suppress(ol.CaptureError):
        alike(ol.graph(f, warmup=1), f, rand, 4)


@pytest.mark.parametrize("mode", ["grad", "no grad"])
def test_a_gradient_dropped_or_replaced_between_calls(rand: Rand, mode: str) -> None:
    """The callable accumulates into `.grad`, which the caller resets as it pleases."""

    def world() -> Any:
        weight = nn.Parameter(rand(60, 4))

        def f(x: Tensor) -> Tensor:
            with torch.enable_grad():
                loss = (weight * weight * x).sum()
                loss.backward()
            return loss.detach()

        return weight, f

    (weight, f), (expected, eager) = world(), world()
    fast = ol.graph(f, warmup=1)
    with torch.set_grad_enabled(mode == "grad"):
        for i in range(12):
            for w in (weight, expected):
                if i == 4:
                    w.grad = None
                if i == 8:
                    w.grad = torch.ones_like(w)
            try:
                assert_same(fast(rand(i, 4)), eager(rand(i, 4)))
            except ol.CaptureError:
                return
            assert_same(weight.grad, expected.grad)


def test_a_gradient_read_and_replaced(rand: Rand) -> None:
    weight = nn.Parameter(rand(60, 4))

    def f(x: Tensor) -> Tensor:
        assert weight.grad is not None
        return x * weight.grad

    fast = ol.graph(f, warmup=1)
    for weight.grad in (rand(61, 4), rand(62, 4)):
        alike(fast, f, rand, 4, calls=4)


def _recurrent(rand: Rand, kind: type[nn.RNNBase], kept: bool) -> Callable[[Any, int], Any]:
    """A step over a sequence, from a hidden state of the caller's where that is `kept`."""

    def step(model: Any, i: int) -> Any:
        x, h = rand(i, 3, 6, 4).requires_grad_(), rand(10 + i, 4, 3, 5).requires_grad_()
        hidden = (h, h * 2) if kind is nn.LSTM else h
        y, last = model(x, hidden) if kept else model(x)
        loss = y.square().mean() + (last[1] if kind is nn.LSTM else last).sum()
        model.zero_grad()
        loss.backward()
        return loss.detach(), y.detach(), x.grad, h.grad

    return step


# `train` copies the model, and of a copy torch says so in plain eager.
_in_pieces = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")


@_in_pieces
@pytest.mark.parametrize("kept", [False, True])
def test_a_recurrent_layer(device: torch.device, rand: Rand, kept: bool) -> None:
    _trains(device, rand, nn.RNN, kept)


@_in_pieces
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_gated_layer(
    device: torch.device, rand: Rand, kind: type[nn.RNNBase], kept: bool
) -> None:
    _trains(device, rand, kind, kept)


def _trains(device: torch.device, rand: Rand, kind: Any, kept: bool) -> None:
    torch.manual_seed(0)
    model = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True, device=device)
    fast: Any = train(model, Optimized(_sgd, _stepped(_recurrent(rand, kind, kept))), steps=7)
    assert replays(fast) == 6
    weights = list(fast.parameters())
    assert all(a is b for a, b in zip(fast._flat_weights, weights, strict=True))
    assert all(a() is b for a, b in zip(fast._flat_weight_refs, weights, strict=True))


@_in_pieces
def test_a_recurrent_layer_with_another_weight(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(0)
    step = _recurrent(rand, nn.RNN, kept=False)

    def replaced(model: Any, i: int) -> Any:
        if i == 3:
            model.weight_hh_l0 = nn.Parameter(model.weight_hh_l0.detach() * 2)
        return step(model, i)

    fast = train(nn.RNN(4, 5, batch_first=True, device=device), replaced, steps=8)
    assert replays(fast) >= 3


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def _stepped(step: Callable[[Any, int], Any]) -> Callable[..., Any]:
    def run(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Any:
        result = step(model, i)
        optimizer.step()
        return result

    return run


# Sparse gradients.


def _looked_up(rand: Rand) -> Any:
    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(_ids(rand, i)).square().mean()
        loss.backward()
        assert model.weight.grad.layout is torch.sparse_coo
        optimizer.step()
        return loss.detach()

    return step


@on_cpu_and_cuda  # torch has no sparse tensors on a device like the emulated one
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_are_refused(
    device: torch.device, rand: Rand, kind: Any, optimizer: Any
) -> None:
    program = Optimized(lambda p: optimizer(p, 0.1), _looked_up(rand))
    with pytest.raises(ol.CaptureError, match="sparse=False") as caught:
        train(kind(8, 4, sparse=True).to(device), program)
    assert caught.value.code == "OL109"
    assert caught.value.where is not None
    assert "model(_ids(rand, i))" in caught.value.where
    eager = {"recordings": 0, "on_refusal": "eager"}
    with pytest.warns(ol.GraphWarning, match="OL109"):
        train(kind(8, 4, sparse=True).to(device), program, **eager)
    train(kind(8, 4, sparse=True).to(device).requires_grad_(False), lambda m, i: m(_ids(rand, i)))


def _ids(rand: Rand, i: int) -> Tensor:
    return rand(i, 3, 5, dtype=torch.int64)


class Sparsely(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        places = torch.zeros(1, 1, dtype=torch.int64, device=g.device)
        return torch.sparse_coo_tensor(places, g.sum().view(1), (4,), check_invariants=False), None


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_sparse_gradient_of_ones_own(device: torch.device, rand: Rand) -> None:
    def own() -> nn.Module:
        return Made(lambda m, x: Sparsely.apply(m.weight, x), weight=rand(50, 4))

    def program(model: Any, i: int) -> Tensor:
        model.zero_grad()
        model(rand(i, 3)).square().mean().backward()
        return model.weight.grad.to_dense()

    with pytest.raises(ol.CaptureError, match="sparse_coo") as caught:
        train(own(), program)
    assert caught.value.code == "OL109"
    with pytest.warns(ol.GraphWarning, match="OL306"):
        train(own(), program, on_refusal="eager")


@pytest.mark.parametrize("whole", [False, True], ids=["pair", "step"])
def test_a_backward_is_captured_fast(
    device: torch.device, rand: Rand, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look at a tensor of a backward's operations passes through a function mode, and however
    many tensors are saved, the heap is searched once or twice."""
    passing: list[bool] = []
    searched: list[int] = []
    note, search = Ledger.note, survivors.gc.get_referrers

    def noted(self: Ledger, *args: Any) -> set[int]:
        passing.append(torch._C._is_torch_function_enabled())  # pyright: ignore
        return note(self, *args)

    def counted(*objects: object) -> list[object]:
        searched.append(len(objects))
        return search(*objects)

    monkeypatch.setattr(Ledger, "note", noted)
    monkeypatch.setattr(survivors.gc, "get_referrers", counted)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(10)))
    model.to(device)

    def step(x: Tensor) -> Tensor:
        loss = (fast if not whole else model)(x).square().mean()
        loss.backward()
        return loss.detach()

    fast: Any = ol.graph(step if whole else model, warmup=1)
    for i in range(4):
        (fast if whole else step)(rand(i, 3, 4))
    assert replays(fast) > 0
    assert len(passing) > 40
    assert not any(passing)
    assert len(searched) <= 2
