"""The number of writes to a tensor of the state, by which code knows that it has changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays


class Cached(nn.Module):
    """A weight that is prepared once for each of its versions."""

    cache: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.version = -1

    def forward(self, x: Tensor) -> Tensor:
        if self.version != self.weight._version:
            self.cache = self.weight.detach() * 2
            self.version = self.weight._version
        return x * self.cache + self.weight


class Branches(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.weight._version < 2 else x * self.weight * 3


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", [Cached, Branches])
def test_a_write_between_calls(
    device: torch.device, rand: Rand, kind: type[Cached | Branches], trains: bool
) -> None:
    eager, module = (kind(rand(0, 3)) for _ in range(2))
    for one in (eager, module):  # as an initialisation does
        with torch.no_grad():
            one.weight.mul_(0.5)
    fast = ol.graph(module)
    with torch.set_grad_enabled(trains):
        for i in range(18):
            if i in (6, 11, 12):
                for one in (eager, module):
                    with torch.no_grad():
                        one.weight.mul_(2)
            got, expected = fast(rand(i, 3)), eager(rand(i, 3))
            assert_same(got.detach(), expected.detach())
            if trains:
                got.sum().backward()
                expected.sum().backward()
                assert_same(module.weight.grad, eager.weight.grad)
            if i == 5:
                assert replays(fast) > 0
    assert replays(fast) > 0
