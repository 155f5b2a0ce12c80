"""``compile=True``: what a callable reads and writes is learned from an eager run of another call.

Inductor compiles for CUDA. Elsewhere the callable stands for its compiled version, whose operations
nobody watches either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.capture.callee import Callee

from .drop_in import assert_same, drop_in_worlds, on_accelerators, on_cpu_and_cuda, replays
from .training import Rand


@pytest.fixture(autouse=True)
def compiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        torch._dynamo.reset()
        return

    def on(callee: Any, driver: Any) -> Any:
        if not callee.compile:
            return callee.fn
        if callee._compiled is None:
            callee._compiled = lambda *args, **kwargs: callee.fn(*args, **kwargs)
        return callee._compiled

    monkeypatch.setattr(Callee, "on", on)


@pytest.fixture
def rand(rand: Rand) -> Rand:
    """Small whole numbers, with which whatever Inductor fuses is exact."""
    return lambda seed, *shape: rand(seed, *shape).mul(4).round()


def written(x: Tensor) -> Tensor:
    x.add_(2)
    return x


def half(c: Tensor, x: Tensor) -> Tensor:
    c[:, 1] = x
    return c.sum(0) * 2


def chained(c: Tensor, x: Tensor) -> Tensor:
    c.mul_(0.5).add_(x[:, None])
    return c * 2


def both(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    c += x[:, None]
    return c[0], x


def one_of_two(c: Tensor, x: Tensor) -> Tensor:
    x.add_(c[:, 0])
    return c[:, 1]


def nested(c: Tensor, x: Tensor) -> list[Tensor]:
    for row in c:
        row.clamp_(-0.5, 0.5)
    return [c, x + 1]


PROGRAMS: list[Callable[..., Any]] = [half, chained, both, one_of_two, nested]


def options(warmup: int = 1) -> dict[str, Any]:
    return {"compile": True, "warmup": warmup + 1, "calls": 7, "min_replays": 3}


@pytest.mark.parametrize("warmup", [1, 2])
@pytest.mark.parametrize("f", PROGRAMS)
def test_arguments_that_are_written(
    device: torch.device, rand: Rand, f: Callable[..., Any], warmup: int
) -> None:
    drop_in_worlds(lambda: (f, lambda i: (rand(i, 3, 4), rand(i + 50, 3))), **options(warmup))


def test_an_argument_that_is_returned(device: torch.device, rand: Rand) -> None:
    drop_in_worlds(lambda: (written, lambda i: (rand(i, 3, 4),)), **options())


def test_two_arguments_of_one_memory(device: torch.device, rand: Rand) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        whole = rand(i, 8)
        return whole[:4], whole[4:]

    drop_in_worlds(lambda: (f, arguments), **options())

    def overlapping(i: int) -> tuple[Tensor, Tensor]:
        whole = rand(i, 8)
        return whole[:5], whole[3:]

    drop_in_worlds(lambda: (lambda a, b: (a.mul_(3), b + 1)[1], overlapping), **options())


def test_an_argument_that_is_state_too(device: torch.device, rand: Rand) -> None:
    """It is read where it is, and its place in the state is watched."""

    def world() -> Any:
        class Holder:
            kept = rand(1, 4)

        def f(x: Tensor) -> Tensor:
            return x * Holder.kept

        def arguments(i: int) -> tuple[Tensor]:
            if i == 4:
                now = Holder.kept
                Holder.kept = rand(9, 4)
                return (now,)
            return (Holder.kept,)

        return f, arguments

    drop_in_worlds(world, **(options() | {"recordings": None, "min_replays": 0}))


class Recurrent(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.h = torch.zeros(4, device=device)
        self.register_buffer("count", torch.zeros((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.h = self.h * 0.5 + x
        return self.h * self.count


def test_state_that_each_call_replaces(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        return Recurrent(device), lambda i: (rand(i, 4),)

    drop_in_worlds(world, **options())


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_state_that_is_replaced_between_calls(device: torch.device, rand: Rand, when: int) -> None:
    """Before the capture too: it is watched where it is, not as the tensor that it was."""

    def world() -> Any:
        class Holder:
            weight = rand(1, 4)

        def f(x: Tensor) -> Tensor:
            Holder.weight.add_(1)
            return x * Holder.weight

        def arguments(i: int) -> tuple[Tensor]:
            if i in (when, when + 2):
                Holder.weight = rand(10 + i, 4)
            return (rand(i, 4),)

        return f, arguments

    more = {"recordings": None, "min_replays": 1, "calls": 9}
    drop_in_worlds(world, **(options() | more))


@on_accelerators
def test_tensors_of_the_host_are_refused(device: torch.device, rand: Rand) -> None:
    """As without ``compile``: the kernels would hold their values."""
    number = torch.tensor(2.0)

    def f(x: Tensor) -> Tensor:
        return x * number

    def g(x: Tensor, n: Tensor) -> Tensor:
        n.add_(1)
        return x * 2

    for called, args in ((f, (rand(1, 4),)), (g, (rand(1, 4), torch.tensor(1.0)))):
        fast = ol.graph(called, compile=True, warmup=2)
        with torch.no_grad():
            for _ in range(2):
                fast(*args)
            with pytest.raises(ol.CaptureError, match="OL104"):
                [fast(*args) for _ in range(2)]


def test_ahead(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(half, compile=True)
    with torch.no_grad():
        c, x = rand(1, 3, 4), rand(2, 3)
        before = c.clone()
        fast.capture(c, x)
        assert_same(c, before)
        for i in range(3):
            a, b, x = rand(i, 3, 4), rand(i, 3, 4), rand(i + 5, 3)
            assert_same(fast(a, x), half(b, x))
            assert_same(a, b)
    assert replays(fast) == 3


@on_cpu_and_cuda
@pytest.mark.parametrize("grad", [False, True])
def test_a_part_that_is_compiled(device: torch.device, rand: Rand, grad: bool) -> None:
    """The memory that its kernels take is seen by no mode."""
    torch.manual_seed(0)
    part = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device))
    fast = ol.graph(lambda x: (part(x * 2) * 3).sin())
    with torch.set_grad_enabled(grad):
        for i in range(12):
            x, same = rand(i, 5, 4), rand(i, 5, 4)
            # Recorded as it is written, and Inductor's kernels have other bits.
            torch.testing.assert_close(fast(x), (part(same * 2) * 3).sin())
    assert len(fast.recordings) == 1
    assert replays(fast) >= 4
