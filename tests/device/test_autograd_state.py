"""Modes and state around training: autocast, scaling, checkpoints, statistics, random numbers."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol

from .drop_in import assert_same, drop_in_worlds, gradients_alike, on_cpu_and_cuda, on_cuda, replays
from .training import Made, Net, Optimized, Rand, descend, loss_of, state_of, train


@on_cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("calls", "cache"), [(1, True), (1, False), (2, False)])
def test_autocast(
    device: torch.device, rand: Rand, dtype: torch.dtype, calls: int, cache: bool
) -> None:
    program = Optimized(lambda p: torch.optim.SGD(p, 0.1), _region(rand, dtype, calls, cache))
    fast = train(Net(device), program, recordings=None)
    assert len(fast.recordings) == calls


@on_cpu_and_cuda
def test_several_calls_in_one_region_with_the_cache_on(device: torch.device, rand: Rand) -> None:
    """Eager adds the gradients of the calls as bfloat16, through the one cached weight."""
    model, other = Net(device), Net(device)
    fast = ol.graph(model, warmup=1)
    step = _region(rand, torch.bfloat16, 2, True)
    of = {id(m): torch.optim.SGD(m.parameters(), 0.1) for m in (model, other)}
    for i in range(6):
        step(fast, of[id(model)], i)
        step(other, of[id(other)], i)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0.02, atol=2e-3)
    assert replays(fast) >= 10


def _region(rand: Rand, dtype: torch.dtype, calls: int, cache: bool) -> Any:
    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        x = rand(i, 5, 4)
        with torch.autocast(x.device.type, dtype=dtype, cache_enabled=cache):
            losses = [loss_of(model(rand(10 * i + k, 5, 4))) for k in range(calls)]
        loss = sum(losses[1:], losses[0])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@on_cpu_and_cuda
def test_autocast_inside(device: torch.device, rand: Rand) -> None:
    def inside(m: Any, x: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return m.net(x) + m.net(x * 2)

    train(Made(inside, net=Net(device)), lambda m, i: descend(m, rand(i, 5, 4)))


@on_cpu_and_cuda
def test_a_backward_under_autocast_is_another_kind(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> None:
        model.zero_grad()
        loss = model(rand(i, 5, 4)).square().mean()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=i % 2 == 0):
            loss.backward()

    train(Net(device), program, steps=10)


@on_cuda
def test_a_grad_scaler_outside(device: torch.device, rand: Rand) -> None:
    scalers: dict[int, Any] = {}

    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        scaler = scalers.setdefault(id(optimizer), torch.amp.GradScaler("cuda", init_scale=2.0**40))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model(rand(i, 5, 4)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    train(Net(device), Optimized(lambda p: torch.optim.Adam(p, 0.1), step), steps=30)


class Checkpointed(nn.Module):
    def __init__(self, preserve: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.second = nn.Linear(8, 3)
        self.preserve = preserve

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return self.second(h)


@pytest.mark.parametrize("preserve", [False, True])
def test_checkpointing_inside(device: torch.device, rand: Rand, preserve: bool) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Any:
        optimizer.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        loss_of(model(x)).backward()
        optimizer.step()
        return x.grad

    program = Optimized(lambda p: torch.optim.SGD(p, 0.1), step)
    train(Checkpointed(preserve).to(device), program, steps=8)


def _scaled(x: Tensor, scale: Tensor, more: Sequence[Tensor]) -> Tensor:
    return torch.tanh(x * scale) + more[0]


HANDED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "positions": lambda x, t: checkpoint(_scaled, x, t, (t * 2,), use_reentrant=False),
    "keywords": lambda x, t: checkpoint(_scaled, x, scale=t, more=(t * 2,), use_reentrant=False),
    "partial": lambda x, t: checkpoint(
        functools.partial(_scaled, scale=t, more=[t * 2]), x, use_reentrant=False
    ),
    "closure": lambda x, t: checkpoint(
        lambda x: _scaled(x, t, {0: t * 2}),  # pyright: ignore[reportArgumentType]
        x,
        use_reentrant=False,
    ),
}


@pytest.mark.parametrize("how", HANDED)
def test_tensors_made_in_the_call_for_a_checkpointed_part(
    device: torch.device, rand: Rand, how: str
) -> None:
    """They are kept to be used again, and each replay makes them anew."""
    fast = ol.graph(lambda x: HANDED[how](x, x.mean(0)), warmup=1)
    gradients_alike(fast, lambda x: HANDED[how](x, x.mean(0)), rand, 5, 4)
    assert replays(fast) == 4


class Stored(nn.Module):
    """The checkpointed part reads what the forward has stored."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def part(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        return torch.tanh(x) * self.scale

    def forward(self, x: Tensor) -> Any:
        self.scale = x.detach().mean(0) * 2
        return checkpoint(self.part, x, use_reentrant=False)


class KeepsOnContext(torch.autograd.Function):
    """A backward that computes what it needs once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not hasattr(ctx, "y"):
            ctx.y = ctx.saved_tensors[0].exp()
        return g * ctx.y


@pytest.mark.parametrize("f", [Stored(), KeepsOnContext.apply])
def test_a_backward_that_reads_what_was_stored_is_refused(
    device: torch.device, rand: Rand, f: Any
) -> None:
    """A replay would read what was stored as the backward was captured."""
    g = f if isinstance(f, nn.Module) else lambda x: f(x)
    fast = ol.graph(g, warmup=1)
    with pytest.raises(ol.CaptureError, match="save_for_backward") as caught:
        gradients_alike(fast, g, rand, 5, 4)
    assert caught.value.code == "OL105"
    assert replays(fast)


def test_checkpointing_runs_the_forward_as_often_as_in_eager(
    device: torch.device, rand: Rand
) -> None:
    """Once, and once more for the backward: the statistics of a BatchNorm tell."""
    model = Checkpointed(preserve=False)
    model.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    train(model.to(device), lambda m, i: loss_of(m(rand(i, 5, 4))).backward(), steps=6)


def test_a_step_that_checkpoints_runs_the_forward_as_often_as_in_eager(
    device: torch.device, rand: Rand
) -> None:
    def world() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(device)

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            y = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
            loss_of(y).backward()
            return y.detach(), model[1].running_mean.clone()

        return step, lambda i: (rand(i, 5, 4),)

    drop_in_worlds(world, mode=torch.enable_grad, recordings=None, min_replays=1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_a_graphed_module(
    device: torch.device, rand: Rand, reentrant: bool
) -> None:
    def program(model: Any, i: int) -> Any:
        x = rand(i, 5, 4).requires_grad_()
        plain = loss_of(model(x))  # recorded, and then called for a checkpoint
        loss = loss_of(checkpoint(model, x, use_reentrant=reentrant)) + plain
        loss.backward()
        return loss, x.grad

    train(Net(device, 0.5), program, recordings=None)


def test_hooks_on_saved_tensors_around_a_graphed_module(device: torch.device, rand: Rand) -> None:
    packed: dict[int, int] = {}

    def program(model: Any, i: int) -> Any:
        count = len(packed)

        def pack(t: Tensor) -> Tensor:
            packed[len(packed)] = t.dim()
            return t * 2

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / 2):
            loss = loss_of(model(rand(i, 5, 4)))
        loss_of(model(rand(i, 5, 4))).backward()
        loss.backward()
        return loss, len(packed) - count

    train(Net(device), program)


def test_objects_that_an_interpreter_freezes_hide_nothing(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ holds what hooks pack, as if a frozen object did. Python 3.12 freezes 375 itself."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)

    def f(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return model(x).square()

    fast = ol.graph(f, warmup=1)
    for i in range(5):
        fast(rand(i, 3, 4)).sum().backward()
    assert replays(fast) >= 3


def test_the_mask_of_a_dropout_is_the_same_in_both(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: nn.functional.dropout(x, 0.5) * 2, warmup=1)
    masks: list[Tensor] = []
    for i in range(6):
        x = rand(i, 64).requires_grad_()
        y = fast(x)
        y.sum().backward()
        assert x.grad is not None
        assert_same((x.grad * x).detach(), y.detach())
        masks.append((x.grad != 0).cpu())
    assert not torch.equal(masks[-1], masks[-2])
    assert replays(fast) >= 4


def test_the_mode_is_changed_between_steps(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Tensor:
        model.train(i % 2 == 0)
        return descend(model, rand(i, 5, 4))

    train(Net(device), program, steps=8, recordings=2)


def test_inference_between_steps(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Tensor:
        if i % 2:
            with torch.no_grad():
                return model(rand(i, 5, 4))
        return descend(model, rand(i, 5, 4))

    train(Net(device), program, steps=10, recordings=2)


def test_recurrent_state_with_gradients(device: torch.device, rand: Rand) -> None:
    """The hidden state of the last call, detached by the caller or carried on through time."""

    class Cell(nn.Module):
        hidden: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.hidden = torch.zeros(5, 4, device=device)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.tanh(self.linear(x) + self.hidden)
            return self.hidden * 2

    def program(model: Any, i: int) -> Tensor:
        model.zero_grad()
        y = model(rand(i, 5, 4))
        loss_of(y).backward()
        model.hidden = model.hidden.detach()
        return y.detach()

    model = Cell().to(device)
    train(model, program, recordings=None, steps=8)


def test_a_captured_step_contains_graphed_modules(device: torch.device, rand: Rand) -> None:
    """Inside a warm-up or capture a graphed callable is its own code."""
    model, other = Net(device), Net(device)
    inner = ol.graph(model, warmup=1)
    outer = ol.graph(lambda x: loss_of(inner(x)), warmup=2)
    for i in range(6):
        for f, m in ((outer, model), (lambda x: loss_of(other(x)), other)):
            m.zero_grad()
            f(rand(i, 5, 4)).backward()
        assert_same(state_of(model), state_of(other))
    assert replays(outer) >= 3
    assert not inner.recordings


def test_capture_ahead(device: torch.device, rand: Rand) -> None:
    model, other = Net(device), Net(device)
    fast = ol.graph(model)
    fast.capture(rand(0, 5, 4))
    assert_same(state_of(model), state_of(other))
    for i in range(4):
        for m in (fast, other):
            descend(m, rand(i, 5, 4))
        assert_same(state_of(model), state_of(other))
    assert replays(fast) == 4


@pytest.mark.parametrize("options", [{"outputs": "static"}, {"inputs": "rebind"}])
def test_options_of_inference_do_no_harm(
    device: torch.device, rand: Rand, options: dict[str, Any]
) -> None:
    def program(model: Any, i: int) -> Tensor:
        return descend(model, rand(i, 5, 4))

    train(Net(device), lambda m, i: descend(m, rand(i, 5, 4)), **options)


def test_each_thread_trains_a_model_of_its_own(device: torch.device, rand: Rand) -> None:
    models = [(Net(device), Net(device)) for _ in range(3)]

    def work(number: int) -> None:
        model, other = models[number]
        fast = ol.graph(model, warmup=1)
        for i in range(6):
            for m in (fast, other):
                descend(m, rand(i + 10 * number, 5, 4))
            assert_same(state_of(model), state_of(other))
        assert replays(fast) > 0

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, i) for i in range(3)]:
            done.result(timeout=60)


def test_grad_mode_turned_on_inside_runs_eagerly(device: torch.device, rand: Rand) -> None:
    model, other = Net(device), Net(device)

    def f(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return model(x)

    def step(fast: Any, i: int) -> None:
        model.zero_grad()
        y = fast(rand(i, 5, 4))
        assert y.requires_grad
        with torch.enable_grad():
            loss_of(y).backward()
            other.zero_grad()
            loss_of(other(rand(i, 5, 4))).backward()
        assert_same(state_of(model), state_of(other))

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        with pytest.warns(ol.GraphWarning, match="OL303"):
            step(fast, 0)
        for i in range(1, 4):
            step(fast, i)


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_a_pool_that_is_too_small(device: torch.device, rand: Rand) -> None:
    model, other = Net(device), Net(device)
    fast = ol.graph(model, warmup=1, pool=ol.Pool(max_bytes=64))
    for i in range(6):
        for m in (fast, other):
            descend(m, rand(i, 5, 4))
        assert_same(state_of(model), state_of(other))
    assert not fast.recordings


class MomentumEncoder(nn.Module):
    """A copy that follows a model by new memory for its parameters, as MoCo's does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.query, self.key = Net(device), Net(device)
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
        return self.query(x) + self.key(x)


def test_a_forward_that_gives_parameters_new_memory_is_refused(
    device: torch.device, rand: Rand
) -> None:
    """The capture gives it to stand-ins, and a replay to nothing."""
    fast = ol.graph(MomentumEncoder(device), warmup=1)
    with pytest.raises(ol.CaptureError, match=r"`key.* is given other memory") as caught:  # noqa: PT012
        for i in range(3):
            loss_of(fast(rand(i, 5, 4))).backward()
    assert caught.value.code == "OL105"
    assert "k.data = k.data" in str(caught.value.where)
