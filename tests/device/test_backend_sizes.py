"""Sizes that change, through the backend of `torch.compile`: with ``options={"buckets": ...}``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.dynamo import backend
from onelaunch.dynamo.backend import regions
from onelaunch.sizes.buckets import Sizes

from .drop_in import on_accelerators
from .regions import F, compiled, recordings, replays, same_calls, two_models
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh", "whole_numbers")
SIZES = (5, 3, 7, 2, 6, 8, 5, 4, 3, 2, 7, 8, 6, 5, 3, 4, 2, 7)
BUCKETS = ol.Buckets(dim=0, sizes=(4, 8))


def recorded() -> set[Sizes]:
    """The sizes of the buckets that have a recording."""
    entries = [entry for graphed in regions.graphs() for entry in graphed._table.entries]
    return {e.captured.bucket.sizes for e in entries if e.captured.bucket is not None}


def calls_of(
    f: F, arguments: Callable[[int, int], tuple[Any, ...]], *, twice: bool = True, **options: Any
) -> set[str]:
    """Call with the sizes in turn, and return the codes of the warnings."""
    fast = compiled(f, **{"buckets": BUCKETS, **options})
    sizes = SIZES * (1 + twice)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_calls(f, fast, lambda i: arguments(i, sizes[i]), calls=len(sizes))
    return {str(w.message)[1:6] for w in caught if w.category is ol.GraphWarning}


@on_accelerators
def test_sizes_go_to_the_buckets(device: torch.device, rand: Rand) -> None:
    w = rand(50, 4, 4)
    assert calls_of(lambda x: (x @ w).relu(), lambda i, n: (rand(i, n, 4),)) == set()
    assert recorded() == {(4,), (8,)}
    assert replays() >= 20


@on_accelerators
def test_results_of_graph_breaks_go_to_the_buckets(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, mask: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y * mask + y.shape[1]

    assert calls_of(f, lambda i, n: (rand(i, n, 4), rand(i + 50, n, 1))) == set()
    assert recorded() == {(4,), (8,)}
    assert len(recordings()) >= 4


@on_accelerators
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x / x.shape[0],
        lambda x: x.sum(0),
        lambda x: x - x.mean(0),
        lambda x: (x + 1, x.shape[0] * 2),
    ],
)
def test_what_depends_on_the_padding_runs_eagerly(device: torch.device, rand: Rand, f: F) -> None:
    assert calls_of(f, lambda i, n: (rand(i, n, 4),)) == {"OL140"}
    assert not recorded()


@on_accelerators
def test_an_argument_that_is_the_size(device: torch.device, rand: Rand) -> None:
    """Dynamo gives both one symbol: at the bucket's size the number would be the bucket's."""

    def f(x: Tensor, n: int) -> Tensor:
        return x * n

    assert calls_of(f, lambda i, n: (rand(i, n, 4), n)) <= {"OL140"}


@on_accelerators
def test_a_branch_on_the_size(device: torch.device, rand: Rand) -> None:
    """What Dynamo compiled for sizes up to 6 is not run at 8."""

    def f(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 6 else x + 1

    assert calls_of(f, lambda i, n: (rand(i, n, 4),)) == {"OL310"}
    served = {g.options.buckets.sizes for g in regions.graphs() if g.options.buckets is not None}
    assert served == {((4,),), ((8,),)}


@on_accelerators
def test_padding_by_the_name_of_an_argument(device: torch.device, rand: Rand) -> None:
    buckets = ol.Buckets(dim=1, sizes=(4, 8), pad={"mask": float("-inf")})

    def f(scores: Tensor, mask: Tensor) -> Tensor:
        return (scores + mask).amax(1)

    found = calls_of(f, lambda i, n: (rand(i, 3, n), rand(i + 50, 3, n)), buckets=buckets)
    assert found == set()
    assert recorded() == {(4,), (8,)}


@on_accelerators
def test_two_sizes(device: torch.device, rand: Rand) -> None:
    buckets = ol.Buckets(dim=(0, 1), sizes=((4, 8), (4, 8)))

    def f(x: Tensor) -> Tensor:
        return x.relu() + 1

    assert calls_of(f, lambda i, n: (rand(i, n, 2 + i % 7),), buckets=buckets) == set()
    assert {(8, 8)} <= recorded() <= {(4, 4), (4, 8), (8, 4), (8, 8)}


@on_accelerators
def test_larger_calls_in_chunks(device: torch.device, rand: Rand) -> None:
    buckets = ol.Buckets(dim=0, sizes=(2, 4), overflow="chunk")
    assert calls_of(lambda x: x * 2 + 1, lambda i, n: (rand(i, n, 4),), buckets=buckets) == set()
    assert recorded() == {(2,), (4,)}


@on_accelerators
def test_sizes_that_differ_have_a_recording_each(device: torch.device, rand: Rand) -> None:
    """Which of two sizes the buckets are for is not known."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.sum(0) + y.sum(0)

    def arguments(i: int, n: int) -> tuple[Tensor, Tensor]:
        return rand(i, n, 4), rand(i + 50, n + 2, 4)

    assert calls_of(f, arguments) == set()
    assert not recorded()
    assert recordings()


@on_accelerators
@pytest.mark.parametrize(
    "arguments",
    [
        lambda rand, i, n: rand(i, 3, 20)[:, :n],
        lambda rand, i, n: rand(i, n, 3).t(),
        lambda rand, i, n: rand(i, 3, 1).expand(3, n),
        lambda rand, i, n: rand(i, 3, 10 + n)[:, :n],
    ],
    ids=["cut", "transposed", "expanded", "cut from another size"],
)
def test_strides_of_which_a_padded_copy_has_others(
    device: torch.device, rand: Rand, arguments: Any
) -> None:
    """The compiled code is for the argument's own."""
    buckets = ol.Buckets(dim=1, sizes=(4, 8))

    def f(x: Tensor) -> Tensor:
        return (x * 2 + 1).relu()

    calls_of(f, lambda i, n: (arguments(rand, i, n),), buckets=buckets)
    assert not recorded()
    assert recordings()


@on_accelerators
def test_a_static_tensor_of_the_size(device: torch.device, rand: Rand) -> None:
    """It is read where it is, and so is not padded."""
    tables = {n: rand(n, n, 4) for n in set(SIZES)}
    for table in tables.values():
        torch._dynamo.mark_static_address(table, guard=False)

    def f(x: Tensor, table: Tensor) -> Tensor:
        return x + table

    calls_of(f, lambda i, n: (rand(i, n, 4), tables[n]))
    assert not recorded()


@on_accelerators
def test_images_whose_channels_come_last(device: torch.device, rand: Rand) -> None:
    def arguments(i: int, n: int) -> tuple[Tensor]:
        return (rand(i, n, 3, 2, 2).to(memory_format=torch.channels_last),)

    assert calls_of(lambda x: (x * 2).relu(), arguments) == set()
    assert recorded() == {(4,), (8,)}


@on_accelerators
def test_training_at_the_size_of_a_bucket(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    fast = compiled(other, buckets=BUCKETS)
    for i, n in enumerate(SIZES * 2):
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            run(rand(i, n, 4)).square().sum().backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3)
    assert recorded() == {(4,), (8,)}
    assert replays() >= 20


def test_names_that_no_graph_has_are_refused() -> None:
    for buckets in (
        ol.Buckets(dim=0, sizes=(4,), dims={0: 1}),
        ol.Buckets(dim=0, sizes=(4,), pad={"args[0]": 0}),
        ol.Buckets(dim=0, sizes=(4,), outputs={0: 0}),
        4,
    ):
        with pytest.raises(ol.ArgumentError, match="OL401"):
            backend.CompileSettings.of(None, {"buckets": buckets})
