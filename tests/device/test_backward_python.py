"""Python that runs in a backward: an `autograd.Function`, hooks, a checkpoint's recomputation."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol
from tests.fuzz.host_values import with_gradient

from .drop_in import (
    Rand,
    assert_same,
    drop_in_worlds,
    gradients_alike,
    on_accelerators,
    refused,
    replays,
)

TABLE = torch.tensor([1.0, 2.0, 3.0])
SETTINGS: dict[str, Any] = {"scale": 2.0}


def zeroed(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[:, [0, 1]] = 0.0
    return grad


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda g: g * torch.tensor([1.0, 2.0, 3.0], device=g.device),
    "table": lambda g: g * TABLE.to(g.device),
    "number": lambda g: g * torch.tensor(2.5),
    "list": lambda g: g[:, [2, 1, 0]],
    "assigned": zeroed,
    "scale": lambda g: g * SETTINGS["scale"],
}


def recomputed(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return (x * torch.tensor([1.0, 2.0, 3.0], device=x.device)).sin() * torch.tensor(0.5)

    return checkpoint(inner, x, use_reentrant=False)


def hooked(x: Tensor) -> Tensor:
    y = x * 3
    y.register_hook(lambda g: g * torch.tensor([1.0, 2.0, 3.0], device=g.device))
    return y * 1


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: with_gradient(change) for name, change in CHANGES.items()},
    "recomputed": recomputed,
    "number on the left": lambda x: torch.tensor(1.0) / (x * x + 5),
    "larger": lambda x: torch.maximum(x * 2, torch.tensor(0.1)),
    "double": lambda x: x.double() / torch.tensor(3.0, dtype=torch.float64),
}


def train(fast: Any, rand: Rand) -> None:
    for i in range(8):
        fast(rand(i, 2, 3).requires_grad_()).sum().backward()


def backwards(fast: Any) -> int:
    """Return the number of backwards that are graphs."""
    return sum(len(entry.captured.pair.backwards()) for entry in fast._table.entries)


@on_accelerators
@pytest.mark.parametrize("name", PROGRAMS)
def test_its_backward_is_a_graph(name: str, rand: Rand) -> None:
    fast = ol.graph(PROGRAMS[name], warmup=1)
    gradients_alike(fast, PROGRAMS[name], rand, 2, 3, calls=6)
    assert len(fast.recordings) == 1
    assert replays(fast) == 5
    assert backwards(fast) == 1


@on_accelerators
@pytest.mark.filterwarnings(r"ignore:\[OL308\]")
@pytest.mark.parametrize("name", [*PROGRAMS, "hooked"])
def test_in_a_whole_step(device: torch.device, name: str, rand: Rand) -> None:
    f = hooked if name == "hooked" else PROGRAMS[name]

    def stepping() -> Callable[[Tensor], Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device)

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = f(model(x)).square().mean()
            if len(x) == 2:
                loss.backward()
                grads = [p.grad for p in model.parameters()]
            else:
                grads = torch.autograd.grad(loss, [*model.parameters()])
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    assert g is not None
                    p.sub_(0.1 * g)
            return loss.detach()

        return step

    eager, fast = stepping(), ol.graph(stepping(), warmup=1)
    for i in range(10):
        x = rand(i, 2 + i % 2, 3)
        assert_same(fast(x), eager(x), f"call {i}")
    assert replays(fast) == 8


class Scaled(torch.autograd.Function):
    """A loss that C++ differentiates nothing of: its gradient is Python's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = ctx.scale()  # before any operation
        return gradient * factor, None


def hooked_by(loss: Tensor, scale: Callable[[], float]) -> Tensor:
    loss.register_hook(lambda g: g * scale())
    return loss


def unpacked_by(loss: Tensor, scale: Callable[[], float]) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * scale()):
        return loss.square()


def hooked_node(loss: Tensor, scale: Callable[[], float]) -> Tensor:
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda gradients: (gradients[0] * scale(),))
    return loss


def recomputed_by(loss: Tensor, scale: Callable[[], float]) -> Tensor:
    return checkpoint(lambda t: t * t * scale(), loss, use_reentrant=True)


FIRST: dict[str, Callable[[Tensor, Callable[[], float]], Tensor]] = {
    "function": Scaled.apply,
    "hook": hooked_by,
    "unpack": unpacked_by,
    "node": hooked_node,
    "checkpoint": recomputed_by,
    "compiled": lambda loss, scale: Scaled.apply(
        torch.compile(cube, backend="aot_eager")(loss), scale
    ),
}


def cube(t: Tensor) -> Tensor:
    return t**3


@pytest.mark.filterwarnings(r"ignore:\[OL308\]")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks for
@pytest.mark.parametrize("first", FIRST)
def test_what_it_reads_before_any_operation(
    device: torch.device, first: str, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread for a device is watched from its first frame on."""

    def world() -> tuple[Any, Any]:
        weight = nn.Parameter(torch.ones(3, device=device))

        def step(x: Tensor) -> Tensor:
            weight.grad = None
            FIRST[first]((weight * x).sum(), lambda: SETTINGS["scale"]).backward()
            assert weight.grad is not None
            return weight.grad.clone()

        return step, lambda i: (rand(i, 3),)

    def between(i: int, step: Any) -> None:
        monkeypatch.setitem(SETTINGS, "scale", 2.0 + (i >= 4))

    drop_in_worlds(world, calls=8, recordings=2, mode=torch.enable_grad, between=between)


def test_what_it_reads_is_compared(rand: Rand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, tables and attributes, by the backward itself."""

    class Owner:
        scale = 2.0

    owner, table = Owner(), torch.ones(3)

    def change(grad: Tensor) -> Tensor:
        return grad * SETTINGS["scale"] * owner.scale * table.to(grad.device)

    f = with_gradient(change)
    fast = ol.graph(f, warmup=1)
    for act in (
        lambda: None,
        lambda: monkeypatch.setitem(SETTINGS, "scale", 5.0),
        lambda: setattr(owner, "scale", 7.0),
        lambda: table.mul_(3),
        lambda: monkeypatch.setitem(SETTINGS, "scale", 2.0),
    ):
        act()
        gradients_alike(fast, f, rand, 2, 3)
    assert len(fast.recordings) == 1
    assert backwards(fast) == 1


@pytest.mark.parametrize("on_refusal", ["raise", "eager"])
def test_a_number_that_it_moves_on_is_refused(rand: Rand, on_refusal: Any) -> None:
    """And stays as eager leaves it."""
    state = {"calls": 0}

    def change(grad: Tensor) -> Tensor:
        state["calls"] += 1
        return grad * state["calls"]

    fast = ol.graph(with_gradient(change), warmup=1, on_refusal=on_refusal)

    def train() -> None:
        for i in range(6):
            x = rand(i, 2, 3).requires_grad_()
            fast(x).sum().backward()
            assert_same(x.grad, torch.full_like(x, i + 1.0).detach(), f"call {i}")

    if on_refusal == "raise":
        with pytest.raises(ol.CaptureError, match="OL118"):
            train()
    else:
        with pytest.warns(ol.GraphWarning, match="OL306"):
            train()


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "a gradient": lambda g: g,
    "a tensor that it makes": lambda g: g * 3,
    "in a list": lambda g: [g * 3],
    "in a closure": lambda g: lambda: g,
    "a list": lambda g: [g.shape[0]],
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_backward_that_stores_is_refused(rand: Rand, keep: Callable[[Tensor], Any]) -> None:
    """No replay would store another."""
    store: dict[str, Any] = {"last": None}

    def change(grad: Tensor) -> Tensor:
        store["last"] = keep(grad)
        return grad * 2

    train_and_refuse(with_gradient(change), rand)


def test_a_backward_that_stores_what_the_forward_saved_is_refused(rand: Rand) -> None:
    store: dict[str, Any] = {"last": None}

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (store["last"],) = ctx.saved_tensors
            return grad * 2 * store["last"]

    train_and_refuse(Square.apply, rand)


def test_a_checkpoint_whose_part_stores_is_refused(device: torch.device, rand: Rand) -> None:
    """A router does so with its loss, in its forward and once more in the backward."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.last = y.detach()
            return y.sin()

    router = Router().to(device)
    train_and_refuse(lambda x: checkpoint(router, x, use_reentrant=False), rand)


def train_and_refuse(f: Callable[[Tensor], Tensor], rand: Rand) -> None:
    fast = ol.graph(f, warmup=1)

    def train() -> None:
        for i in range(6):
            fast(rand(i, 2, 3).requires_grad_()).sum().backward()

    with pytest.raises(ol.CaptureError, match="a backward stores") as caught:
        train()
    assert caught.value.code == "OL118"


@pytest.mark.cpu
@pytest.mark.parametrize("values", [40, 2])
def test_a_number_that_the_caller_changes_before_each_backward(rand: Rand, values: int) -> None:
    """As a schedule does with the strength of a gradient reversal."""
    state = {"strength": 0.0}
    f = with_gradient(lambda grad: -state["strength"] * grad)
    fast = ol.graph(f)

    def train() -> None:
        for i in range(40):
            state["strength"] = 0.1 * (i % values)
            gradients_alike(fast, f, rand, 2, 3, calls=1)

    with pytest.warns(ol.GraphWarning, match="OL306.*strength") as caught:
        train()
    assert len(caught) == 1
    assert replays(fast) == 37


@pytest.mark.cpu
def test_a_list_that_the_caller_lengthens_before_each_backward(rand: Rand) -> None:
    scales = [1.0]
    f = with_gradient(lambda grad: grad * len(scales))
    fast = ol.graph(f)

    def train() -> None:
        for _ in range(40):
            scales.append(1.0)
            gradients_alike(fast, f, rand, 2, 3, calls=1)

    with pytest.warns(ol.GraphWarning, match="OL306.*length of scales"):
        train()


@pytest.mark.cpu
@pytest.mark.parametrize("on_refusal", ["raise", "eager"])
def test_a_clock_is_refused(rand: Rand, on_refusal: Any) -> None:
    def change(grad: Tensor) -> Tensor:
        return grad * time.perf_counter()

    fast = ol.graph(with_gradient(change), warmup=1, on_refusal=on_refusal)

    if on_refusal == "raise":
        with pytest.raises(ol.CaptureError, match="OL117") as caught:
            train(fast, rand)
        assert "perf_counter" in str(caught.value.where)
    else:
        with pytest.warns(ol.GraphWarning, match="OL306") as told:
            train(fast, rand)
        if rand(0, 1).device.type == "cpu":  # else in a thread that has no line of the user's
            assert not told[0].filename.endswith("pair.py")


def python_draws() -> Callable[[], float]:
    generator = random.Random(1)
    return lambda: 2.0 if generator.random() < 0.5 else 1.0


def numpy_draws() -> Callable[[], float]:
    return np.random.default_rng(1).random


def an_iterator() -> Callable[[], float]:
    numbers = iter(range(1, 99))
    return lambda: next(numbers)


def a_generator() -> Callable[[], float]:
    numbers = (float(i) for i in range(1, 99))
    return lambda: next(numbers)


def a_growing_list() -> Callable[[], float]:
    seen: list[int] = []

    def draw() -> float:
        seen.append(1)
        return float(len(seen))

    return draw


DRAWN = (python_draws, numpy_draws, an_iterator, a_generator, a_growing_list)


@pytest.mark.parametrize("draws", DRAWN)
@pytest.mark.parametrize("on_refusal", ["raise", "eager"])
def test_python_that_moves_in_a_backward_gives_eagers_numbers(
    rand: Rand, draws: Callable[[], Callable[[], float]], on_refusal: Any
) -> None:
    """A backward scales gradients by chance: a user adds noise, or drops some. A replay repeated
    one draw for good, and a capture that failed took numbers that eager then missed."""
    draw, expected = draws(), draws()
    fast = ol.graph(with_gradient(lambda g: g * draw()), warmup=1, on_refusal=on_refusal)

    def train() -> None:
        for i in range(24):
            x = rand(i, 2, 3).requires_grad_()
            fast(x).sum().backward()
            assert_same(x.grad, torch.full_like(x, expected()).detach(), f"call {i}")

    if on_refusal == "eager" or draws is a_growing_list:
        with pytest.warns(ol.GraphWarning, match="OL306"):
            train()
    else:
        with pytest.raises(ol.CaptureError, match="OL117"):
            train()


@on_accelerators
def test_random_numbers_of_the_host_are_refused(rand: Rand) -> None:
    fast = ol.graph(with_gradient(lambda g: g * torch.rand(3).to(g.device)), warmup=1)
    with pytest.raises(ol.CaptureError, match="OL103"):
        train(fast, rand)


@on_accelerators
def test_a_read_by_the_host_in_a_hook_is_refused(rand: Rand) -> None:
    def step(x: Tensor) -> Tensor:
        w = torch.ones(3, device=x.device, requires_grad=True)
        y = x * w
        y.register_hook(lambda g: g * g.tolist()[0][0])
        y.sum().backward()
        assert w.grad is not None
        return w.grad

    error = refused(ol.graph(step, warmup=1), rand(0, 2, 3), match=r"OL10[13]")
    assert "tolist" in str(error.where)


@on_accelerators
def test_what_a_tensor_of_the_host_is(device: torch.device, rand: Rand) -> None:
    """A backward asks for its dtype, which changes in place."""
    head = nn.Linear(2, 2)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (2 if head.weight.dtype is torch.float32 else 5)

    def f(x: Tensor) -> Tensor:
        return Scaled.apply(x * x)  # type: ignore[no-any-return]

    fast = ol.graph(f, warmup=1)
    gradients_alike(fast, f, rand, 3)
    head.double()
    gradients_alike(fast, f, rand, 3)
    assert replays(fast) >= 6
