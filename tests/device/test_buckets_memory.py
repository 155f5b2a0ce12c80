"""Where the arguments and results of a padded call lie: nothing is written behind the real rows,
and no result is laid out as a padded one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, refused, replays

SIZES = (3, 3, 2, 1, 4, 5, 7, 6, 8, 3)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "x[:, 0]": lambda x: x[:, 0],
    "x[:, :1]": lambda x: x[:, :1],
    "x[1, 0]": lambda x: x[1, 0],
    "narrow": lambda x: x.narrow(1, 0, 1),
    "unbind": lambda x: x.unbind(1)[0],
}


@pytest.mark.parametrize("independent", [False, True], ids=["proven", "independent"])
def test_a_write_to_an_argument_ends_with_its_rows(
    device: torch.device, rand: Rand, independent: bool
) -> None:
    buckets = ol.Buckets(dim=0, sizes=(4, 8), independent=independent)
    fast = ol.graph(lambda x: x.mul_(2) + 0, buckets=buckets, warmup=1)
    with torch.no_grad():
        for i, n in enumerate(SIZES):
            memory, expected = rand(i, 16, 2), rand(i, 16, 2)
            expected[:n].mul_(2)
            assert_same(fast(memory[:n]), expected[:n])
            assert_same(memory, expected)
            alone = rand(i, n, 2)
            assert_same(fast(alone), rand(i, n, 2) * 2)
            assert_same(alone, rand(i, n, 2) * 2)
    assert replays(fast) > 10


@pytest.mark.parametrize("independent", [False, True], ids=["proven", "independent"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_argument_that_lies_otherwise_when_padded_is_refused(
    rand: Rand, name: str, independent: bool
) -> None:
    """Over the caller's memory it would have the strides of the bucket."""
    buckets = ol.Buckets(dim=1, sizes=(4, 8), independent=independent)
    fast = ol.graph(VIEWS[name], buckets=buckets, warmup=1)
    with torch.no_grad():
        error = refused(fast, rand(0, 2, 3, 3), match="is a view of an argument")
        assert error.code == "OL140"
        fast = ol.graph(lambda x: VIEWS[name](x).clone(), buckets=ol.Buckets(1, (4, 8)), warmup=1)
        for i, n in enumerate(SIZES):
            assert_same(fast(rand(i, 2, n, 3)), VIEWS[name](rand(i, 2, n, 3)).clone())
    assert replays(fast) > 5


@pytest.mark.parametrize("independent", [False, True], ids=["proven", "independent"])
def test_a_view_that_lies_where_it_does_unpadded(rand: Rand, independent: bool) -> None:
    buckets = ol.Buckets(dim=0, sizes=(4, 8), independent=independent)
    fast = ol.graph(lambda x: (x[0], x * 2), buckets=buckets, warmup=1)
    with torch.no_grad():
        for i, n in enumerate(SIZES):
            x = rand(i, n, 3)
            first, doubled = fast(x)
            assert_same((first, doubled), (x[0], x * 2))
            assert first.data_ptr() == x.data_ptr()
    assert replays(fast) > 5


@pytest.mark.parametrize("independent", [False, True], ids=["proven", "independent"])
def test_a_view_of_an_argument_that_is_written(rand: Rand, independent: bool) -> None:
    """The recording has a padded copy of it; the caller's view is of the caller's memory."""
    buckets = ol.Buckets(dim=0, sizes=(4, 8), independent=independent)
    fast = ol.graph(lambda x: (x.mul_(2)[0], x[0, 1:], x + 1), buckets=buckets, warmup=1)
    with torch.no_grad():
        for i, n in enumerate(SIZES):
            x, expected = rand(i, n + 1, 3)[1:], rand(i, n + 1, 3)[1:].mul_(2)
            first, part, more = fast(x)
            assert_same((first, part, more), (expected[0], expected[0, 1:], expected + 1))
            first.fill_(7)
            assert_same(x[0], torch.full_like(first, 7))
            assert_same(part, torch.full_like(part, 7))
    assert replays(fast) > 5


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("size", [1, 3])
def test_what_the_callable_does_at_sizes_that_were_only_tried_is_undone(
    rand: Rand, size: int
) -> None:
    """In a function that no call has run: the proof runs it, at sizes of its own."""
    seen: list[int] = []

    def late(n: int) -> None:
        seen.append(n)

    def f(x: Tensor) -> Tensor:
        if x.shape[0] == size:
            late(size)
        return x * 2

    buckets = ol.Buckets(dim=0, sizes=(4, 8))
    fast = ol.graph(f, buckets=buckets, warmup=1, on_refusal="eager")
    alike(fast, lambda x: x * 2, rand, 2, 3, calls=4)
    assert not seen


@pytest.mark.parametrize("by_turns", [False, True], ids=["all", "by turns"])
def test_results_of_an_expanded_argument_are_laid_out_as_in_eager(
    rand: Rand, by_turns: bool
) -> None:
    fast = ol.graph(lambda x: x * 2, buckets=ol.Buckets(dim=0, sizes=(4, 8)), warmup=1)
    with torch.no_grad():
        for i, n in enumerate(SIZES):
            x = rand(i, n, 3) if by_turns and i % 2 else rand(i, 1, 3).expand(n, 3)
            assert_same(fast(x), x * 2)
    assert replays(fast) > 5


def test_a_bucket_for_size_1_is_named_where_torch_takes_other_operations(rand: Rand) -> None:
    weight = rand(9, 4, 4)

    def f(x: Tensor) -> Tensor:
        return torch.einsum("bk,kj->bj", x, weight)

    with torch.no_grad():
        fast = ol.graph(f, buckets=ol.Buckets(0, (4, 8)), warmup=1)
        refused(fast, rand(0, 3, 4), match=r"sizes=\(1, \.\.\.\)")
        fast = ol.graph(f, buckets=ol.Buckets(0, (1, 4, 8)), warmup=1)
        for i, n in enumerate(SIZES):
            torch.testing.assert_close(fast(rand(i, n, 4)), f(rand(i, n, 4)))
    assert replays(fast) > 5
