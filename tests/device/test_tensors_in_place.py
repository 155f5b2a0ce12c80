"""Table of tensors: state read by address that changes in place: the recording sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .drop_in import Rand, drop_in_worlds
from .test_tensors_moved import new, world_of_model


def in_place(m: Any, i: int) -> None:
    with torch.no_grad():
        m.linear.weight.mul_(0.5).add_(i)


def load_in_place(m: Any, i: int) -> None:
    m.load_state_dict({k: new(v, i) for k, v in m.state_dict().items()})


def copy_data(m: Any, i: int) -> None:
    m.linear.weight.data.copy_(new(m.linear.weight, i))


def buffer_in_place(m: Any, i: int) -> None:
    m.scale.fill_(i)
    m.plain.fill_(i)
    m.listed[0].fill_(i)
    m.named["shift"].fill_(i)


def optimizer_step(m: Any, i: int) -> None:
    m.linear.weight.grad = torch.full_like(m.linear.weight, float(i))
    torch.optim.SGD([m.linear.weight], lr=0.1).step()
    m.linear.weight.grad = None


@pytest.mark.parametrize(
    "change", [in_place, load_in_place, copy_data, buffer_in_place, optimizer_step]
)
def test_changes_in_place_are_seen_by_the_same_recording(
    device: torch.device, rand: Rand, change: Callable[[Any, int], None]
) -> None:
    drop_in_worlds(
        lambda: world_of_model(device, rand),
        calls=6,
        recordings=1,
        between=lambda i, m: change(m, i),
    )
