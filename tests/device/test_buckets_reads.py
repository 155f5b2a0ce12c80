"""What a bucket's other sizes read is guarded, too, and proven anew once it has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

Changing = tuple[Callable[[Tensor], Tensor], Callable[[], object]]


def by_items() -> Changing:
    scales = dict.fromkeys(range(100), 2.0)

    def f(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x * scales[n]

    return f, lambda: scales.update({3: 5.0})


def by_a_branch() -> Changing:
    scale = small = 2.0

    def f(x: Tensor) -> Tensor:
        return x * (scale if x.shape[0] > 3 else small)

    def change() -> None:
        nonlocal small
        small = 5.0

    return f, change


def compare(fast: Any, f: Callable[[Tensor], Tensor], rand: Rand, *sizes: int) -> None:
    for n in sizes:
        x = rand(n, n, 3)
        assert_same(fast(x), f(x))


@pytest.mark.parametrize("make", [by_items, by_a_branch])
@pytest.mark.parametrize("warm", [False, True])
def test_another_size_reads_its_own(
    device: torch.device, rand: Rand, make: Callable[[], Changing], warm: bool
) -> None:
    f, change = make()
    buckets = ol.Buckets(dim=0, sizes=(4, 8))
    fast = ol.graph(f, buckets=buckets, on_refusal="eager")
    if warm:
        fast.warm_up([rand(0, 4, 3)])
    compare(fast, f, rand, 4, 4, 4, 4, 4)
    assert replays(fast)
    change()
    with pytest.warns(UserWarning, match="OL140"):
        compare(fast, f, rand, 3, 3, 3, 4, 4, 4, 4, 3)


@pytest.mark.parametrize("make", [by_items, by_a_branch])
def test_a_larger_bucket_guards_its_own(
    device: torch.device, rand: Rand, make: Callable[[], Changing]
) -> None:
    """A recording that was made before the proof for smaller sizes serves no size that reads
    more."""
    f, change = make()
    fast = ol.graph(f, buckets=ol.Buckets(dim=0, sizes=(4, 8)), capture="background")
    while not replays(fast):
        compare(fast, f, rand, 8)
        time.sleep(0.01)
    for _ in range(20):
        compare(fast, f, rand, 8)
        time.sleep(0.01)
    change()
    compare(fast, f, rand, 3)


def test_a_proof_is_of_its_state(device: torch.device, rand: Rand) -> None:
    """The first proof of the bucket says nothing of the second recording's."""
    scales = dict.fromkeys(range(10), 2.0)

    def f(x: Tensor) -> Tensor:
        return x * scales[x.shape[0]]

    fast = ol.graph(f, buckets=ol.Buckets(dim=0, sizes=(4, 8)), on_refusal="eager")
    compare(fast, f, rand, 4, 4, 4, 4)
    scales[3] = 5.0
    with pytest.warns(UserWarning, match="OL140"):
        compare(fast, f, rand, 4, 4, 4, 4, 3)


@pytest.mark.parametrize("branch", [False, True])
def test_another_size_uses_other_tensors(device: torch.device, rand: Rand, branch: bool) -> None:
    """Their values agree today, and no replay would see how they change."""
    short, long = torch.zeros(3, device=device), torch.zeros(3, device=device)

    def f(x: Tensor) -> Tensor:
        return x + (short if branch and x.shape[0] < 4 else long)

    fast = ol.graph(f, buckets=ol.Buckets(dim=0, sizes=(4, 8)), on_refusal="eager")
    with pytest.warns(UserWarning, match="OL140") if branch else nullcontext():
        compare(fast, f, rand, 4, 4, 4, 4)
    short.fill_(1.0)
    compare(fast, f, rand, 4, 3, 1)
    assert bool(replays(fast)) is not branch


@torch.no_grad()
def test_attributes_of_arguments_are_read_at_each_size(device: torch.device, rand: Rand) -> None:
    """The runs of the proof have them too, also those on random numbers."""

    def f(x: Tensor) -> Tensor:
        return x.relu() * cast(Any, x).scale

    fast: Any = ol.graph(f, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    for number, n in enumerate((3, 3, 3, 3, 3, 2, 4, 7, 8, 1) * 3):
        x: Any = rand(number, n, 3)
        x.scale = 2.0 if number < 13 else 5.0
        assert_same(fast(x), f(x))
    assert replays(fast) > 15
