"""Callables that reach no tensor: where they work is seen when they have run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, drop_in_worlds, on_accelerators, refused, replays

MADE: dict[str, Callable[[torch.device], Any]] = {
    "new memory": lambda device: torch.zeros(3, device=device) + 1,
    "in a container": lambda device: {"y": [torch.arange(4, device=device) * 2, 3]},
    "written": lambda device: torch.ones(3, 3, device=device).tril_().t().contiguous(),
}


class Grid(nn.Module):
    """Without parameters."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.where = device
        self.scale = 2.0

    def forward(self, size: int) -> Tensor:
        return torch.linspace(-1, 1, size, device=self.where)[:, None] * self.scale


@pytest.mark.parametrize("name", MADE)
def test_memory_made_inside(device: torch.device, name: str) -> None:
    fast = drop_in_worlds(
        lambda: (lambda: MADE[name](device), lambda i: ()), calls=6, min_replays=4
    )
    (recording,) = fast.recordings
    assert not recording.inputs
    kept = [fast() for _ in range(2)]
    assert_same(kept[0], kept[1])


def test_a_module_without_parameters(device: torch.device) -> None:
    drop_in_worlds(
        lambda: (Grid(device), lambda i: (3 + i % 2,)), calls=9, recordings=2, min_replays=4
    )


def test_random_numbers(device: torch.device) -> None:
    """In values, and in the place of the stream that is left."""

    def f() -> Tensor:
        return torch.rand(20, device=device)

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(6):
            torch.manual_seed(i)
            expected = f(), f()
            torch.manual_seed(i)
            assert_same((fast(), f()), expected)
    assert replays(fast) >= 4


def test_under_a_default_device(device: torch.device) -> None:
    def world() -> Any:
        return lambda: torch.ones(3) * 2, lambda i: ()

    with torch.device(device):
        drop_in_worlds(world, calls=6, min_replays=4)


def test_gradients_that_are_made_inside(device: torch.device) -> None:
    def f() -> Tensor:
        w = torch.full((3,), 2.0, device=device, requires_grad=True)
        (w * w).sum().backward()
        assert w.grad is not None
        return w.grad

    drop_in_worlds(lambda: (f, lambda i: ()), calls=6, min_replays=3, mode=torch.enable_grad)


def test_captured_ahead(device: torch.device) -> None:
    def f() -> Tensor:
        return torch.rand(4, device=device) + torch.zeros(4, device=device)

    fast = ol.graph(f)
    with torch.no_grad():
        torch.manual_seed(3)
        expected = [f(), f(), f()]
        torch.manual_seed(3)
        fast.capture()
        assert_same([fast(), f(), fast()], expected)
    assert replays(fast) == 2


@on_accelerators
def test_the_device_changes(device: torch.device) -> None:
    """With an argument, and with what the callable keeps."""

    def f(where: str) -> Tensor:
        return torch.ones(3, device=where) * 2

    fast = ol.graph(f, warmup=1)
    model = Grid(device)
    grid = ol.graph(model, warmup=1)
    with torch.no_grad():
        for where in (str(device), "cpu", str(device), "cpu"):
            model.where = torch.device(where)
            for _ in range(5):
                assert fast(where).device.type == torch.device(where).type
                assert_same(fast(where), f(where))
                assert_same(grid(4), model(4))
    assert len(fast.recordings) == 2
    assert replays(fast) >= 30
    assert replays(grid) >= 10


@on_accelerators
def test_a_copy_to_the_device_is_refused_as_one(device: torch.device) -> None:
    fast = ol.graph(lambda x: x.to(device) * 2, warmup=1)
    with torch.no_grad():
        fast(torch.ones(3))
        refused(fast, torch.ones(3), match="OL103")


def test_what_works_nowhere() -> None:
    fast = ol.graph(lambda a: a + 1, warmup=1)
    assert [fast(1) for _ in range(4)] == [2] * 4
