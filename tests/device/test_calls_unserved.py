"""A callable that never replays says so once, with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand


class Data:
    """As a graph of PyG: a class with a store."""

    __slots__ = ("__dict__", "__weakref__", "_store")

    def __init__(self, x: Tensor) -> None:
        self._store = {"x": x}

    @property
    def x(self) -> Tensor:
        return self._store["x"]


def told(
    fast: Any,
    arguments: Callable[[int], tuple[Any, ...]],
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    calls: int = 60,
) -> list[ol.GraphWarning]:
    """Make the calls, and return our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(calls):
            with mode():
                fast(*arguments(i))
    return [w.message for w in caught if isinstance(w.message, ol.GraphWarning)]


def total(items: list[Data]) -> Tensor:
    return torch.stack([item.x.sum() for item in items]).sum()


@pytest.mark.parametrize("what", ["sparse", "anomaly", "hooks", "list of objects"])
def test_it_is_said_once(rand: Rand, what: str) -> None:
    def of_sparse(i: int) -> tuple[Any, ...]:
        return (torch.eye(3).to_sparse() * i, rand(i, 3, 3).cpu())

    def of_objects(i: int) -> tuple[Any, ...]:
        return ([Data(rand(i, 3)), Data(rand(i + 1, 3))],)

    def of_leaves(i: int) -> tuple[Any, ...]:
        return (rand(i, 3).requires_grad_(),)

    cases: dict[str, tuple[Any, Any, Any, str]] = {
        "sparse": (lambda m, x: m @ x, of_sparse, nullcontext, "sparse"),
        "anomaly": (lambda x: x * 2, of_leaves, torch.autograd.detect_anomaly, "anomaly mode"),
        "hooks": (
            lambda x: x.sin(),
            of_leaves,
            lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            "hooks that pack",
        ),
        "list of objects": (total, of_objects, torch.no_grad, ""),
    }
    f, arguments, mode, reason = cases[what]
    fast = ol.graph(f, warmup=1)
    said = told(fast, arguments, mode)
    if not sum(r.replays for r in fast.recordings):
        assert len(said) == 1, said
        assert reason in said[0].what


def test_calls_that_replay_say_nothing(rand: Rand) -> None:
    """Eight sizes in turn, three warm-ups each, and a few calls under anomaly mode in between."""
    fast = ol.graph(lambda x: x * 2)
    with torch.no_grad():
        assert not told(fast, lambda i: (rand(i, 1 + i % 8),), calls=80)
        for _ in range(10):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                assert not told(fast, lambda i: (rand(i, 3),), torch.autograd.detect_anomaly, 5)
            assert not told(fast, lambda i: (rand(i, 3),), calls=2)
