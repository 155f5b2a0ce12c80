"""Places out of bounds are found before a device sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.driver.cuda import memory
from onelaunch.padding.taint.trace import Trace

X, BAD, GOOD = torch.rand(4, 5), torch.tensor([0, 7]), torch.tensor([0, 3])
TOLD: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda i: X[i],
    "index of columns": lambda i: X[:, i],
    "put": lambda i: X.clone().index_put_((i,), X[0]),
    "gather": lambda i: X.gather(1, i[None]),
    "scatter": lambda i: X.scatter(1, i[None], 1.0),
    "select": lambda i: X.index_select(0, i),
    "add": lambda i: X.index_add(0, i, X[:2]),
    "embedding": lambda i: F.embedding(i, X),
    "take": lambda i: X.take(i * 5),
    "loss": lambda i: F.nll_loss(X[:2], i),
}


@pytest.mark.parametrize("name", TOLD)
def test_places_that_there_are_not(name: str) -> None:
    with Trace():
        TOLD[name](GOOD)
    with pytest.raises(IndexError, match="places out of bounds"), Trace():
        TOLD[name](BAD)


def test_what_may_be_negative_or_ignored() -> None:
    with Trace():
        X[torch.tensor([-1, -4])]
        X.take(torch.tensor([-20]))
        F.nll_loss(X[:2], torch.tensor([1, -100]))
        X[X[:, 0] > 2]
    with pytest.raises(IndexError), Trace():
        X.gather(0, torch.full((1, 5), -1))


def test_numbers_that_are_no_shares() -> None:
    with Trace():
        torch.bernoulli(X)
    with pytest.raises(ValueError, match="from 0 to 1"), Trace():
        torch.bernoulli(X + 1)


def test_memory_of_a_recording_is_a_whole_number_of_elements() -> None:
    """`select_scatter` and others clone all of a storage, and assert that it is."""
    assert all(
        memory._GUARD_BYTES % dtype.itemsize == 0 for dtype in (torch.int8, torch.complex128)
    )
