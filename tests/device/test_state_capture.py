"""Table of state: warm-up, and capturing ahead of time, change nothing that the caller sees."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import (
    Rand,
    assert_same,
    compare,
    drop_in_worlds,
    random_tensor,
    replays,
    right_or_refused,
)
from .models import Norms

# Warm-up.


@pytest.mark.parametrize("warmup", [1, 2, 3, 11])
def test_batch_norm_statistics_equal_eager_after_each_call(
    device: torch.device, rand: Rand, warmup: int
) -> None:
    fast = drop_in_worlds(
        lambda: (Norms(device).train(), lambda i: (rand(i, 5, 4),)), calls=16, warmup=warmup
    )
    assert int(fast.norm.num_batches_tracked) == 16


def test_batch_norm_statistics_with_proofs(device: torch.device, rand: Rand) -> None:
    drop_in_worlds(
        lambda: (Norms(device).train(), lambda i: (rand(i, 5, 4),)),
        calls=40,
        recordings=None,
        min_replays=0,
        inputs="rebind",
    )


# Capturing ahead.


def test_capture_ahead_restores_what_the_trace_wrote(device: torch.device, rand: Rand) -> None:
    model = Norms(device).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fast = ol.graph(model)
    x = rand(0, 5, 4)
    with torch.no_grad():
        rng = torch.get_rng_state()
        fast.capture(x)
        assert torch.equal(torch.get_rng_state(), rng)
        assert_same(dict(model.state_dict()), before)
        assert_same(x, rand(0, 5, 4))
        assert len(fast.recordings) == 1
        eager = Norms(device).train()
        for i in range(4):
            assert_same(fast(rand(i, 5, 4)), eager(rand(i, 5, 4)))
            assert_same(dict(model.state_dict()), dict(eager.state_dict()))
    assert fast.recordings[0].replays == 4


def test_capture_ahead_restores_arguments_and_closures(rand: Rand) -> None:
    total = rand(9, 3)

    def f(x: Tensor) -> Tensor:
        total.add_(x)
        x.mul_(2)
        return x + total

    fast = ol.graph(f)
    x = rand(0, 3)
    with torch.no_grad():
        fast.capture(x)
        assert_same((x, total), (rand(0, 3), rand(9, 3)))
        expected_total = rand(9, 3)
        for i in range(4):
            x = rand(i, 3)
            expected_total.add_(x)
            got = fast(x)
            assert_same(x, rand(i, 3) * 2)
            assert_same(got, rand(i, 3) * 2 + expected_total)
            assert_same(total, expected_total)
    assert fast.recordings[0].replays == 4, "the first call after capture() was not a replay"


def test_capture_ahead_with_keywords_and_several_signatures(rand: Rand) -> None:
    def f(x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale

    fast = ol.graph(f)
    with torch.no_grad():
        for n in (2, 3, 4):
            fast.capture(rand(0, n), scale=2.0)
        assert len(fast.recordings) == 3
        fast.capture(rand(1, 2), scale=2.0)
        assert len(fast.recordings) == 3, "captured the same signature again"
        for n in (2, 3, 4):
            assert_same(fast(rand(n, n), scale=2.0), rand(n, n) * 2)
    assert [r.replays for r in fast.recordings] == [1, 1, 1]


class Lazy(nn.Module):
    """Makes its table at the first call."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(3, device=x.device, dtype=x.dtype)
        return x * self.table


class LazyInDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        if n not in self.tables:
            self.tables[n] = torch.arange(n, device=x.device, dtype=x.dtype)
        return x * self.tables[n]


@pytest.mark.parametrize("kind", [Lazy, LazyInDict])
def test_capture_ahead_refuses_to_create_lasting_tensors(rand: Rand, kind: type[nn.Module]) -> None:
    model: Any = kind()
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        with pytest.raises(ol.CaptureError) as caught:
            fast.capture(rand(0, 3))
        assert caught.value.code == "OL110"
        assert "table" in str(caught.value)
        assert not model.table if kind is Lazy else not model.tables
        # As its message says: one real call, and then it can.
        table = torch.arange(3, device=rand(0, 1).device, dtype=torch.float32)
        compare(fast, lambda x: x * table, lambda i: (rand(i, 3),), 4)
        fast.reset()
        fast.capture(rand(0, 3))
        assert_same(fast(rand(1, 3)), rand(1, 3) * table)
    assert replays(fast) == 1


def test_capture_ahead_refuses_to_rebind_python_state(rand: Rand) -> None:
    class Flags(nn.Module):
        ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.ready = True
                return x
            return x * 2

    model = Flags()
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        with pytest.raises(ol.CaptureError, match="OL110"):
            fast.capture(rand(0, 3))
        assert not model.ready
        assert_same(fast(rand(0, 3)), rand(0, 3))
        compare(fast, lambda x: x * 2, lambda i: (rand(i, 3),), 3)


@pytest.mark.parametrize("kind", [Lazy, LazyInDict])
def test_state_made_in_the_first_call_of_warmup_is_read(rand: Rand, kind: type[nn.Module]) -> None:
    drop_in_worlds(lambda: (kind(), lambda i: (rand(i, 3),)))


@pytest.mark.parametrize("kind", [Lazy, LazyInDict])
def test_state_made_during_the_capture_is_right_or_refused(
    rand: Rand, kind: type[nn.Module]
) -> None:
    """Dropped by the caller after warm-up, so that the capturing call makes it anew."""

    def world() -> Any:
        return kind(), lambda i: (rand(i, 3),)

    def between(i: int, model: Any) -> None:
        if i == 1:
            if kind is Lazy:
                model.table = None
            else:
                model.tables.clear()

    try:
        drop_in_worlds(world, calls=8, recordings=None, min_replays=0, between=between)
    except ol.CaptureError as error:
        refused = error.code
        assert refused == "OL105"


# Optimizers, without gradients of their own in the callable.


def stepping_on_given_gradients(device: torch.device) -> tuple[Tensor, Any, Any]:
    """A parameter, its optimizer, and a step that takes the gradient as an argument."""
    p = nn.Parameter(random_tensor(0, 4, device=device))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.zeros_like(p)

    def step(grad: Tensor) -> Tensor:
        assert p.grad is not None
        p.grad.copy_(grad)
        optimizer.step()
        return p.detach().clone()

    return p, optimizer, step


def test_an_optimizer_step_on_given_gradients_is_right_refused_or_eager(
    device: torch.device, rand: Rand
) -> None:
    def world() -> Any:
        _, optimizer, step = stepping_on_given_gradients(device)

        def arguments(i: int) -> tuple[Tensor]:
            optimizer.param_groups[0]["lr"] = 0.1 if i < 6 else 0.5
            return (rand(i, 4),)

        return step, arguments

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        try:
            drop_in_worlds(world, calls=10, warmup=2, recordings=None, min_replays=0)
        except ol.CaptureError as error:
            refused = str(error)
            assert refused


def test_capture_ahead_of_a_cold_optimizer_is_refused(device: torch.device, rand: Rand) -> None:
    p, optimizer, step = stepping_on_given_gradients(device)
    fast = ol.graph(step)
    with torch.no_grad(), pytest.raises(ol.CaptureError):
        fast.capture(rand(0, 4))
    assert_same(p.detach(), random_tensor(0, 4, device=device))
    assert not optimizer.state


def test_random_state_read_inside_is_right_or_refused(rand: Rand) -> None:
    def world() -> Any:
        return lambda x: (x + 1, torch.initial_seed()), lambda i: (rand(i, 3),)

    assert right_or_refused(world, "OL106", "OL108") in (None, "OL106", "OL108")


# What the call itself replaces.


class MadeAnew(nn.Module):
    """Makes a list anew, for other parameters or at each call."""

    def __init__(self, device: torch.device, each_call: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_tensor(0, 4, 4, device=device))
        self.each_call = each_call
        self.of = 0
        self.steps: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.each_call or self.of != id(self.weight):
            self.of, self.steps = id(self.weight), [torch.tanh]
        return self.steps[0](x @ self.weight)


@pytest.mark.parametrize("each_call", [False, True])
def test_a_list_that_is_made_anew(device: torch.device, rand: Rand, each_call: bool) -> None:
    model, other = MadeAnew(device, each_call), MadeAnew(device, each_call)
    fast = ol.graph(other, warmup=1)
    for i in range(10):
        for m in (model, fast):
            m(rand(i, 2, 4)).sum().backward()
        assert_same(other.weight.grad, model.weight.grad)
    assert replays(fast) > 4


def test_one_such_recording_alone_is_made_again(device: torch.device, rand: Rand) -> None:
    model = MadeAnew(device, each_call=False)
    fast = ol.graph(model, warmup=1)
    for i in range(2):
        fast(rand(i, 2, 4))
    assert fast.stats().captures == 1
    model.forward = lambda x: torch.tanh(x @ model.weight)  # type: ignore[method-assign]
    for i in range(4):
        fast(rand(i, 2, 4))
    assert replays(fast) > 0
