"""`onelaunch.dynamo.cudagraph_policy`: what Inductor captures for ``mode="reduce-overhead"`` is a
recording. Here is what no other world has; the rest is in test_backend_worlds.py.

On CUDA with Inductor's kernels; on the emulated device see inductor.py.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.driver.select import driver_of

from .drop_in import on_accelerators
from .regions import same_calls
from .training import Rand
from .worlds import World

pytestmark = [
    on_accelerators,
    pytest.mark.parametrize("world", ["policy"], indirect=True),
    pytest.mark.usefixtures("whole_numbers"),
]


def test_a_backward_works_in_saved_memory(rand: Rand, world: World) -> None:
    """AOTAutograd donates what is saved for one backward alone, and a gradient is made there."""
    weight = rand(90, 4, 4)

    def f(x: Tensor, bias: Tensor) -> Tensor:
        return (x @ weight + bias).tanh() @ weight

    fast = world.compile(f)
    kept: list[tuple[Any, Any]] = []
    for i in range(9):
        bias, other = (rand(i, 3, 4).mul_(0.1).requires_grad_() for _ in range(2))
        f(rand(i, 3, 4), bias).square().sum().backward()
        fast(rand(i, 3, 4), other).square().sum().backward()
        kept.append((other.grad, bias.grad))
        for got, expected in kept:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert world.replays() >= 2 * world.least(9)


def test_a_part_writes_what_another_one_computed(rand: Rand, world: World) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        total = y.cpu().sum()
        y.add_(total.to(x.device))
        z = y.cpu() * 2
        y.mul_(3)
        return y, z.to(x.device) + y.relu()

    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL312"):
        same_calls(f, world.compile(f), lambda i: (rand(i, 3, 8),))
    assert world.replays() >= 2 * world.least(8)


def test_a_backward_while_another_thread_has_the_lock(
    device: torch.device, rand: Rand, world: World
) -> None:
    """That thread may be waiting for this backward, as in the warm-up of a whole step."""

    def f(x: Tensor) -> Tensor:
        return x.exp() * 2

    fast, driver = world.compile(f), driver_of(device.type)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.exclusive():
            held.set()
            assert done.wait(60)

    for i in range(8):
        x, y = rand(i, 4).requires_grad_(), rand(i, 4).requires_grad_()
        f(x).sum().backward()
        got = fast(y).sum()
        if i % 2:
            thread = threading.Thread(target=hold)
            thread.start()
            assert held.wait(60)
            got.backward()
            done.set()
            thread.join()
            held.clear()
            done.clear()
        else:
            got.backward()
        torch.testing.assert_close(y.grad, x.grad)
