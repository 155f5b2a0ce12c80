"""A capture ahead needs no warm-up where a recording for other sizes has shown the run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.watch.other_sizes import SizePairs

from .drop_in import Rand, Runs, assert_same, on_accelerators, replays


def counted(f: Callable[..., Any]) -> tuple[Callable[..., Any], Runs]:
    runs = Runs()

    def counting(x: Tensor) -> Any:
        runs.add()
        return f(x)

    return counting, runs


def runs_of_second(f: Callable[..., Any], rand: Rand, first: int = 8, second: int = 5) -> int:
    """Capture two sizes, compare them with eager, and return the runs for the second."""
    counting, runs = counted(f)
    fast: Any = ol.graph(counting)
    with torch.no_grad():
        fast.capture(rand(0, first, 6))
        before = runs.count
        fast.capture(rand(1, second, 6))
        count = runs.count - before
        for seed, n in enumerate((first, second, first)):
            x = rand(seed, n, 6)
            assert_same(fast(x), f(x))
    assert replays(fast) == 3
    return count


class Heads(nn.Module):
    """An attention as people write it: sizes are numbers of its views."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        q, k, v = self.qkv(x).view(n, 3, 2, 3).permute(1, 2, 0, 3)
        scores = (q @ k.transpose(-1, -2) / 3**0.5).view(2 * n, n)
        ahead = torch.arange(n - 1, -1, -1, device=x.device)
        weights = scores.softmax(-1).reshape(2, n, n)[:, ahead]
        return (weights @ v).transpose(0, 1).reshape(n, 6)[: n - 1]


def test_one_run_for_each_further_size(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(0)
    model = Heads().to(device)
    assert runs_of_second(model, rand) == 1


def test_a_loop_over_rows_is_run_before(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            x = x + i
        return x

    assert runs_of_second(f, rand) == 2


def test_a_number_that_follows_the_size_otherwise_is_run_before(rand: Rand) -> None:
    assert runs_of_second(lambda x: x * (1 / x.shape[0] ** 0.5), rand) == 2


def test_another_branch_is_run_before(rand: Rand) -> None:
    assert runs_of_second(lambda x: x.relu() if x.shape[0] > 6 else x.sin(), rand) == 2


def test_a_draw_is_run_before(device: torch.device, rand: Rand) -> None:
    """The numbers are those of eager's stream."""

    def f(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    counting, runs = counted(f)
    fast: Any = ol.graph(counting)
    fast.capture(rand(0, 8, 6))
    fast.capture(rand(0, 5, 6))
    assert runs.count == 4
    x = rand(1, 5, 6)
    torch.manual_seed(3)
    got = fast(x)
    torch.manual_seed(3)
    assert_same(got, f(x))


@on_accelerators
def test_a_number_of_the_host_is_run_before(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.tensor([float(x.shape[0])]).to(x.device)

    assert runs_of_second(f, rand) == 2


# What two runs of one size show is not lost.


def test_a_number_from_a_clock_is_refused(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x.roll(3 if x.shape[0] == 8 else time.perf_counter_ns() % 100_003, 0)

    fast: Any = ol.graph(f)
    fast.capture(rand(0, 8, 6))
    with pytest.raises(ol.CaptureError) as refused:
        fast.capture(rand(0, 5, 6))
    assert refused.value.code == "OL117"
    x = rand(2, 8, 6)
    assert_same(fast(x), f(x))


def test_an_effect_of_one_size_is_refused_and_undone(rand: Rand) -> None:
    class Remembers(nn.Module):
        last: object = None

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            if x.shape[0] == 5:
                self.last = y
            return y

    model = Remembers()
    fast: Any = ol.graph(model)
    fast.capture(rand(0, 8, 6))
    with pytest.raises(ol.CaptureError) as refused:
        fast.capture(rand(0, 5, 6))
    assert refused.value.code == "OL110"
    assert model.last is None


def test_a_mode_that_one_size_leaves_is_refused_and_put_back(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            torch.set_default_dtype(torch.float64)
        return x * 2

    fast: Any = ol.graph(f)
    try:
        fast.capture(rand(0, 8, 6))
        with pytest.raises(ol.CaptureError) as refused:
            fast.capture(rand(0, 5, 6))
        assert refused.value.code == "OL119"
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_host_draw_of_one_size_is_refused_and_undone(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * (random.random() if x.shape[0] == 5 else 2.0)

    fast: Any = ol.graph(f)
    fast.capture(rand(0, 8, 6))
    before = random.getstate()
    with pytest.raises(ol.CaptureError):
        fast.capture(rand(0, 5, 6))
    assert random.getstate() == before


def test_a_gradient_of_one_size_is_right(device: torch.device, rand: Rand) -> None:
    weight = nn.Parameter(torch.ones(6, device=device))

    def f(x: Tensor) -> Tensor:
        return x * weight if x.shape[0] == 5 else x * 2

    fast: Any = ol.graph(f)
    for n in (8, 5):
        fast.capture(rand(0, n, 6))
    for seed, n in enumerate((8, 5)):
        x = rand(seed, n, 6)
        got, expected = fast(x), f(x)
        assert_same(got.detach(), expected.detach())
        assert got.requires_grad == expected.requires_grad
    got.sum().backward()
    assert_same(weight.grad, x.sum(0))
    assert replays(fast) == 2


def test_an_error_of_one_size_is_the_callables_own(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            raise LookupError("five")
        return x * 2

    fast: Any = ol.graph(f)
    fast.capture(rand(0, 8, 6))
    with pytest.raises(LookupError, match="five"):
        fast.capture(rand(0, 5, 6))
    fast.capture(rand(0, 7, 6))
    x = rand(1, 7, 6)
    assert_same(fast(x), f(x))
    assert replays(fast) == 1


def test_what_only_another_size_reads_is_guarded(rand: Rand) -> None:
    class Scaled(nn.Module):
        small, large = 2.0, 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.large if x.shape[0] == 8 else self.small)

    model = Scaled()
    fast: Any = ol.graph(model)
    for n in (8, 5):
        fast.capture(rand(0, n, 6))
    model.small = 3.0
    for seed, n in enumerate((8, 5, 5, 5, 8)):
        x = rand(seed, n, 6)
        assert_same(fast(x), model(x))


def test_after_a_change_of_state_it_is_run_before(rand: Rand) -> None:
    class Scaled(nn.Module):
        by = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    model = Scaled()
    counting, runs = counted(model)
    fast: Any = ol.graph(counting)
    fast.capture(rand(0, 8, 6))
    model.by = 3.0
    fast.capture(rand(0, 5, 6))
    assert runs.count == 4
    x = rand(1, 5, 6)
    assert_same(fast(x), model(x))


def test_numbers_that_follow_sizes() -> None:
    pairs = SizePairs([((8, 6), (5, 6)), ((4,), (7,))])
    assert all(pairs.explain(*n) for n in ((8, 5), (48, 30), (7, 4), (9, 6), (4, 7), (32, 35)))
    assert not any(pairs.explain(*n) for n in ((8, 6), (3, 4), (10, 7), (48, 31), (0, 1), (8, 7)))
