"""Table of state: autocast's cache, and onelaunch's own proofs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.call.ambient import noted_modes

from .drop_in import Rand, assert_same, drop_in, drop_in_worlds, on_cpu_and_cuda, replays
from .models import Norms

# Autocast.


@on_cpu_and_cuda
def test_autocast_weights_are_cast_anew_at_each_replay(device: torch.device, rand: Rand) -> None:
    """The cache of cast weights would hand the capture's copy to whoever comes next."""
    eager, model = Norms(device).eval(), Norms(device).eval()
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(8):
            for m in (eager, model):
                m.linear.weight.add_(0.5)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                assert_same(fast(rand(i, 5, 4)), eager(rand(i, 5, 4)))
    assert replays(fast) >= 6


@on_cpu_and_cuda
def test_autocast_cache_is_not_poisoned_for_eager_code(device: torch.device, rand: Rand) -> None:
    """Weights that require grad are cached until autocast exits."""
    torch.manual_seed(3)
    a, b = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)
    fast = ol.graph(lambda x: a(x) + b(x), warmup=1)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for i in range(5):
            x = rand(i, 3, 4)
            eager_first = a(x)
            with torch.no_grad():
                got, expected = fast(x), a(x) + b(x)
            assert_same(got, expected)
            eager_again = a(x)
            assert_same(eager_again, eager_first)
            eager_again.sum().backward()
            assert a.weight.grad is not None
            a.weight.grad = None
    assert replays(fast) > 0


def test_autocast_entered_inside(rand: Rand) -> None:
    weight = rand(9, 4, 4)
    kind = weight.device.type

    def f(x: Tensor) -> Tensor:
        with torch.autocast(kind if kind != "tape" else "cpu", dtype=torch.bfloat16):
            return x @ weight

    drop_in(f, lambda i: (rand(i, 4, 4),))


def test_modes_entered_inside_are_left(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x * 2
        with torch.enable_grad():
            return y + 1

    fast = drop_in(f, lambda i: (rand(i, 4),))
    assert replays(fast) > 0
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


# Proofs.


REBOUND: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x, y: x * 2 + y,
    "matmul": lambda x, y: x @ y,
    "reads twice": lambda x, y: x + x * y + x.sum(),
    "mutates": lambda x, y: x.add_(y) * 2,
    "returns": lambda x, y: (x, x[1:], x + y),
    "unused": lambda x, y: x + 1,
    "cat": lambda x, y: torch.cat([x, y], 0),
    "random": lambda x, y: x + torch.zeros_like(y).uniform_() * 0,
}


@pytest.mark.parametrize("name", REBOUND)
def test_rebind_is_right(rand: Rand, name: str) -> None:
    drop_in(REBOUND[name], lambda i: (rand(i, 8, 8), rand(100 + i, 8, 8)), calls=7, inputs="rebind")


LEFT: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "grad_mode": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "float32 matmul precision": (  # Dynamo's guard names it as well, as each release does
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "default_device": (
        lambda: torch.set_default_device("meta"),
        lambda: torch.set_default_device(None),
    ),
    "autocast(cpu)_dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    "cudnn.benchmark": (
        lambda: torch._C._set_cudnn_benchmark(True),
        lambda: torch._C._set_cudnn_benchmark(False),
    ),
}
"""name -> functions that leave a mode changed, and that set it back."""


@on_cpu_and_cuda
@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("compile", [False, True])
def test_a_mode_that_is_left_changed_is_refused(
    device: torch.device, rand: Rand, name: str, compile: bool
) -> None:
    """It would be set by captures alone, and a replay go on in the caller's."""
    leave, back = LEFT[name]

    def f(x: Tensor) -> Tensor:
        leave()
        return x.detach() * 2

    fast = ol.graph(f, warmup=1, compile=compile, on_refusal="eager")
    try:
        for i in range(5):
            x, now = rand(i, 4), noted_modes()
            told = pytest.warns(ol.GraphWarning, match=f"OL119.*{re.escape(name)}")
            with told if i == 1 else nullcontext():
                y = fast(x)
            assert name in now().split(", ")
            back()
            assert_same(y, x * 2)
        now = noted_modes()
        with pytest.raises(ol.CaptureError, match="OL119"):
            ol.graph(f, compile=compile).capture(rand(0, 4))
        assert not now()  # nobody has called it
    finally:
        back()
    assert replays(fast) == 0


def test_rebind_of_an_index_proves_itself_with_values_of_the_call(rand: Rand) -> None:
    """Poison in an index would be a device assert, which no process survives."""
    table = rand(9, 10, 4)

    def f(index: Tensor, x: Tensor) -> Tensor:
        return table[index] + x

    drop_in(f, lambda i: (rand(i, 5, dtype=torch.int64), rand(i, 5, 4)), calls=6, inputs="rebind")


def test_rebind_with_other_alignment(rand: Rand) -> None:
    """Kernels were chosen for the captured address's alignment."""
    fast = ol.graph(lambda x: x * 2 + 1, warmup=1, inputs="rebind")
    with torch.no_grad():
        for i in range(12):
            x = rand(i, 1025)[1:] if i % 3 == 2 else rand(i, 1024)
            assert_same(fast(x), x * 2 + 1)
    assert replays(fast) > 0


def test_rebind_does_not_read_a_freed_input(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1, inputs="rebind")
    kept: list[tuple[Tensor, int]] = []
    with torch.no_grad():
        for i in range(20):
            kept.append((fast(rand(i, 256)), i))
            torch.full((256,), float("nan"), device=device)
    for y, i in kept:
        assert_same(y, rand(i, 256) * 2)


def test_rebind_restores_what_its_trial_wrote(device: torch.device, rand: Rand) -> None:
    drop_in_worlds(
        lambda: (Norms(device).train(), lambda i: (rand(i, 5, 4),)), calls=6, inputs="rebind"
    )


@on_cpu_and_cuda
def test_compile(device: torch.device, rand: Rand) -> None:
    weight = rand(9, 8, 8)

    def f(x: Tensor) -> Tensor:
        return torch.sin(torch.cos(x @ weight)).sum(1)

    fast = ol.graph(f, warmup=1, compile=True)
    with torch.no_grad(), warnings.catch_warnings():
        # Inductor's own deprecation warnings are not what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        for i in range(4):
            got, expected = fast(rand(i, 8, 8)), f(rand(i, 8, 8))
            torch.testing.assert_close(got, expected)
    assert replays(fast) > 0
    torch._dynamo.reset()
