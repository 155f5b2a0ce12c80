"""Table of tensors: results that torch gives in memory of its own, wherever they are to go."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, drop_in, on_cpu


def changed_after(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w).relu_()


def used_after(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv1d(x, w)
    return y, y * 2


def viewed(x: Tensor, w: Tensor) -> Any:
    y = F.conv1d(x, w)
    return y[:, 1:], y.view(-1), y


def view_changed(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv1d(x, w)
    y[:, 0].mul_(3)
    return y


def inside(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv1d(x, w)
    y.t_() if y.dim() == 2 else y.transpose_(0, 1)
    return F.conv1d(y.transpose(0, 1), w[:, :4].contiguous()) + y.sum()


def twice(x: Tensor, w: Tensor) -> Any:
    y = F.conv1d(x, w)
    return {"a": y, "b": [y, y.detach()]}


def only_a_view(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w)[0]


def input_changed(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv1d(x, w)
    x.mul_(0.5)
    return y


PROGRAMS = [
    *(changed_after, used_after, viewed, view_changed),
    *(inside, twice, only_a_view, input_changed),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_in_memory_of_their_own(program: Callable[..., Any], mode: Any, rand: Rand) -> None:
    drop_in(program, lambda i: (rand(i, 2, 4, 8), rand(i + 50, 4, 4, 3)), calls=7, mode=mode)


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_a_result_is_the_next_input(outputs: Any, rand: Rand) -> None:
    w = rand(0, 4, 4, 1)

    def program(x: Tensor) -> Tensor:
        y = F.conv1d(x, w)
        return y.add_(x.flip(-1)).tanh() + x

    fast = ol.graph(program, outputs=outputs)
    with torch.no_grad():
        got = expected = rand(1, 2, 4, 8)
        for _ in range(8):
            got, expected = fast(got), program(expected)
            assert torch.equal(got.cpu(), expected.cpu())


@on_cpu
def test_a_recording_keeps_nothing_of_the_caller(rand: Rand) -> None:
    """Neither an input nor a result that later operations use."""
    fast = ol.graph(lambda x, w: F.conv1d(x, w).relu_())
    with torch.no_grad():
        for i in range(6):
            x = rand(i, 2, 4, 8)
            y = fast(x, rand(9, 4, 4, 3))
    storages = [weakref.ref(t.untyped_storage()) for t in (x, y)]
    counts = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, y)]
    assert counts == [2, 2]  # the tensor, and the storage's Python object
    del x, y
    assert [s() for s in storages] == [None, None]


@on_cpu
def test_after_a_failed_launch(rand: Rand) -> None:
    """A failure half-way leaves nothing behind, and the next launch is right."""
    state = {"fails": False}

    @torch.library.custom_op("onelaunch_tests::fragile", mutates_args=())
    def fragile(x: Tensor) -> Tensor:
        if state["fails"]:
            raise ArithmeticError("mine")
        return x + 1

    fast = ol.graph(lambda x, w: fragile(F.conv1d(x, w)))
    with torch.no_grad():
        for i in range(6):
            x, w = rand(i, 2, 4, 8), rand(9, 4, 4, 3)
            state["fails"] = i == 5
            if i == 5:
                with pytest.raises(ArithmeticError, match="mine"):
                    fast(x, w)
                assert torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2
                state["fails"] = False
            assert torch.equal(fast(x, w), F.conv1d(x, w) + 1)
