"""Constants of the host in a graph of Dynamo's: a recording has their copies on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from benchmarks.coverage_models import case, catalogue

from .drop_in import on_accelerators
from .regions import F, compiled, on_the_host, recordings, replays, same_calls
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh")
CALLS = 8
ROW = [1.0, 2.0, 3.0, 4.0]


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 1
    y[1, 2:] = 0.5
    y[1][0] = torch.tensor(3.0)
    return y


def mask_assigned(x: Tensor) -> Tensor:
    keep = torch.ones_like(x, dtype=torch.bool)
    keep[0] = False
    return x * keep


def written_later(x: Tensor) -> tuple[Tensor, Tensor]:
    row = torch.tensor(ROW).to(x.device)
    other = torch.tensor(ROW, device=x.device)
    row.add_(x[0])
    other.mul_(x[1])
    return row, other


def moved_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    row = torch.tensor(ROW)
    first, second = row.to(x.device), row.to(x.device)
    return first.add_(1), second


def written_on_the_host(x: Tensor) -> Tensor:
    row = torch.zeros(4)
    row[1] = 2
    row.add_(1)
    return x + row.to(x.device)


TAKEN: dict[str, F] = {
    "moved": lambda x: x + torch.tensor(ROW).to(x.device),
    "computed": lambda x: x + (torch.arange(4, dtype=x.dtype).cumsum(0) / 8).to(x.device),
    "as a dtype": lambda x: x + torch.arange(4).to(x.device, x.dtype),
    "a number": lambda x: x * torch.tensor(2.0) + torch.as_tensor(0.5),
    "an index": lambda x: x[:, torch.tensor([0, 3])],
    "made there": lambda x: x * torch.tensor(ROW, device=x.device) + x.new_tensor(ROW),
    "returned": lambda x: (torch.tensor(ROW).to(x.device), x + 1),
    "assigned": assigned,
    "a mask assigned": mask_assigned,
    "written later": written_later,
    "moved twice": moved_twice,
    "half": lambda x: x.half() * torch.tensor(1 / 3),
}


@on_accelerators
@pytest.mark.parametrize("name", TAKEN)
def test_constants_are_read_on_the_device(device: torch.device, rand: Rand, name: str) -> None:
    f = TAKEN[name]
    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 2, 4),), calls=CALLS)
    assert len(recordings()) == 1
    assert replays() >= CALLS - 4


@on_accelerators
def test_gradients_pass_them(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * torch.tensor(ROW).to(x.device)
        y[0] = 1
        return y.square()

    fast = compiled(f)
    for i in range(CALLS):
        x, y = rand(i, 2, 4).requires_grad_(), rand(i, 2, 4).requires_grad_()
        f(x).sum().backward()
        fast(y).sum().backward()
        torch.testing.assert_close(y.grad, x.grad)
    assert len(recordings()) == 1
    assert replays() >= CALLS - 4


@on_accelerators
def test_a_constant_has_no_symbols_for_sizes(device: torch.device) -> None:
    """SmolVLM's mask of patches: guards on symbols of its own had no source."""
    pytest.importorskip("transformers")
    subject = catalogue.build("transformers/smolvlm_vision")
    eager = case.reference(subject, "inference", device)
    row = case.judge(subject, "onelaunch backend", "inference", device, eager)
    assert row["verdict"] in {"one launch", "pieces"}, row  # 5.17 indexes by a mask


def read_after_a_write(x: Tensor) -> Tensor:
    row = torch.zeros(4)
    row[1] = 2
    return x + (row * 2).to(x.device)


LEFT: dict[str, F] = {
    "random": lambda x: x + torch.rand(4).to(x.device),
    "of a random one": lambda x: x + (torch.rand(4) * torch.tensor(ROW)).to(x.device),
    "a result": lambda x: (x.sin() + torch.tensor(ROW).to(x.device), torch.tensor(ROW) * 2),
    "written": written_on_the_host,
    "read after a write": read_after_a_write,
}


@on_accelerators
@pytest.mark.parametrize("name", LEFT)
def test_what_each_call_makes_stays_on_the_host(
    device: torch.device, rand: Rand, name: str
) -> None:
    f = LEFT[name]
    fast = compiled(f)

    def call(g: F, i: int) -> Any:
        torch.manual_seed(i)
        return g(rand(i, 2, 4))

    with torch.no_grad():
        with pytest.warns(ol.GraphWarning, match=r"OL312.*OL103"):
            call(fast, 0)
        for i in range(CALLS):
            torch.testing.assert_close(call(fast, i), call(f, i), rtol=0, atol=0)


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312")
@pytest.mark.parametrize("parts", [1, 2])
def test_a_constant_beside_a_cut(device: torch.device, rand: Rand, parts: int) -> None:
    """It is made in the part that reads it, or runs as it is if several do."""

    def f(x: Tensor) -> Tensor:
        row = torch.arange(4.0) / 8
        y = x * (row.to(x.device) if parts == 2 else 2)
        return on_the_host(y) + row.to(x.device)

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 2, 4),), calls=CALLS)
    assert replays() >= 2 * (CALLS - 4)
