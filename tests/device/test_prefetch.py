"""`ol.prefetch`: every batch right, whatever it is made of and however slow the consumer."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import onelaunch as ol

from .drop_in import assert_same, on_cpu, on_cuda, random_tensor
from .steps import training


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    image: Tensor
    name: str


def batches() -> Iterator[Any]:
    for i in range(5):
        x, y = random_tensor(i, 4, 3), torch.full((4,), i)
        yield {
            "plain": x,
            "pair": Pair(x, y),
            "list": [y, (x[0], x[1:])],
            "ordered": OrderedDict(b=x, a=y),
            "user": UserDict(x=x),
            "sample": Sample(x.t(), f"image {i}"),
            "number": i,
            "none": None,
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(i)),
        }


def on(value: Any, device: torch.device) -> None:
    parts = [value["plain"], *value["pair"], *value["list"][1], *value["ordered"].values()]
    parts += [value["user"]["x"], value["sample"].image, value["empty"], value["scalar"]]
    for part in parts:
        assert part.device.type == device.type


def test_any_structure(device: torch.device) -> None:
    got = list(ol.prefetch(list(batches()), device))
    assert len(got) == 5
    for made, expected in zip(got, batches(), strict=True):
        on(made, device)
        assert made["plain"] is made["pair"].x is made["user"]["x"]  # one tensor stays one
        assert (type(made["user"]), type(made["ordered"])) == (UserDict, OrderedDict)
        assert list(made["ordered"]) == ["b", "a"]
        assert made["sample"].name == expected["sample"].name
        assert (made["number"], made["none"]) == (expected["number"], None)
        for a, b in (
            (made["plain"], expected["plain"]),
            (made["pair"].y, expected["pair"].y),
            (made["list"][1][1], expected["list"][1][1]),
            (made["sample"].image, expected["sample"].image),
            (made["scalar"], expected["scalar"]),
        ):
            assert torch.equal(a.cpu(), b)


def test_as_often_as_the_loader_and_as_long(device: torch.device) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4)
    ahead = ol.prefetch(loader, device)
    assert len(ahead) == 3
    for _ in range(2):
        assert [part.sum().item() for (part,) in ahead] == [6.0, 22.0, 17.0]
    assert list(ol.prefetch([], device)) == []
    assert "DataLoader" in repr(ahead)
    with pytest.raises(TypeError):
        len(ol.prefetch(batches(), device))


def test_an_error_of_the_loader_comes_after_its_batches(device: torch.device) -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.ones(2)
        yield torch.ones(2) * 2
        raise ValueError("no more disk")

    ahead = iter(ol.prefetch(broken(), device))
    assert [next(ahead).sum().item() for _ in range(2)] == [2.0, 4.0]
    with pytest.raises(ValueError, match="no more disk"):
        next(ahead)


@on_cpu
def test_nothing_is_copied_on_a_cpu(device: torch.device) -> None:
    tensors = [torch.ones(2), torch.zeros(2)]
    assert all(a is b for a, b in zip(ol.prefetch(tensors, device), tensors, strict=True))


def test_feeding_a_whole_step(device: torch.device) -> None:
    data = [(random_tensor(i, 5, 4), random_tensor(i + 50, 5, 3)) for i in range(12)]
    jobs = [training(device, lambda p: torch.optim.SGD(p, lr=0.1)) for _ in range(2)]
    fast = ol.graph(jobs[1].step)
    for (x, y), moved in zip(data, ol.prefetch(data, device), strict=True):
        assert_same(fast(*moved), jobs[0].step(x.to(device), y.to(device)))
    assert_same(dict(jobs[1].model.state_dict()), dict(jobs[0].model.state_dict()))


@on_cuda
@pytest.mark.parametrize("pinned", [False, True])
def test_a_slow_consumer_that_keeps_what_it_got(device: torch.device, pinned: bool) -> None:
    """The GPU is long busy with each batch: none may be overwritten, early or late."""
    data = [torch.full((1 << 18,), float(i)) for i in range(24)]
    data = [t.pin_memory() for t in data] if pinned else data
    a = torch.ones(3000, 3000, device=device)
    kept, sums = [], []
    for i, t in enumerate(ol.prefetch(data, device)):
        for _ in range(20):
            a = a @ a * 0.0 + 1.0
        sums.append(t.double().sum() + a[0, 0].double() * 0)
        if i % 3 == 0:
            kept.append((i, t))
        del t
    assert [s.item() for s in sums] == [i * float(1 << 18) for i in range(24)]
    for i, t in kept:
        assert torch.equal(t.cpu(), torch.full((1 << 18,), float(i)))


@on_cuda
def test_consumed_on_another_stream(device: torch.device) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sums = [
            t.sum() for t in ol.prefetch([torch.full((1000,), float(i)) for i in range(9)], device)
        ]
    stream.synchronize()
    assert [s.item() for s in sums] == [1000.0 * i for i in range(9)]
