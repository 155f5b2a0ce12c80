"""Whole steps that keep state with its graph, which no backward of theirs has used up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, replays


class Neuron(nn.Module):
    """A spiking neuron, whose potential leaks from call to call."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.v: Any = 0.0
        self.detaches = detaches

    def forward(self, x: Tensor) -> Tensor:
        self.v = self.v + x
        spike = torch.sigmoid(self.v)
        left = self.v * (1 - spike)
        self.v = left.detach() if self.detaches else left
        return spike


def stepping(device: torch.device, detaches: bool) -> tuple[Any, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), Neuron(detaches)).to(device)

    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        loss = net(x).sum()
        loss.backward()
        return loss.detach()

    return net, step


def test_the_attribute_and_its_line_are_named(device: torch.device) -> None:
    net, step = stepping(device, False)
    other, eager = stepping(device, False)
    fast = ol.graph(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(6):
            x = torch.full((2, 3), 0.1 * i, device=device)
            assert_same(fast(x), eager(x))
            net[1].v = other[1].v = 0.0
    messages = [w.message for w in caught if isinstance(w.message, ol.GraphWarning)]
    assert [m.code for m in messages] == ["OL303"]
    assert "`net.1.v` keeps a tensor with its graph" in messages[0].what
    assert "left = self.v * (1 - spike)" in str(messages[0].where)
    assert "v = value.detach()" in messages[0].fix


@pytest.mark.parametrize("reset", [True, False])
def test_as_the_message_says(device: torch.device, reset: bool) -> None:
    net, step = stepping(device, True)
    other, eager = stepping(device, True)
    fast = ol.graph(step)
    for i in range(8):
        x = torch.full((2, 3), 0.1 * i, device=device)
        assert_same(fast(x), eager(x), f"call {i}")
        assert_same(net[1].v, other[1].v, f"call {i}, state")
        if reset:
            net[1].v = other[1].v = 0.0
    assert replays(fast) >= 2
