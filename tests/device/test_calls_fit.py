"""Table of calls: fresh and static outputs, and which tensors fit a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import (
    Rand,
    Runs,
    assert_same,
    drop_in,
    drop_in_worlds,
    on_accelerators,
    random_tensor,
    replays,
)

# Outputs.


def test_static_outputs_are_the_same_memory_each_call(rand: Rand) -> None:
    fast = drop_in(lambda x: x * 2 + 1, lambda i: (rand(i, 4, 3),), outputs="static")
    with torch.no_grad():
        first, second = fast(rand(0, 4, 3)), fast(rand(1, 4, 3))
    assert first.data_ptr() == second.data_ptr()
    assert_same(second, rand(1, 4, 3) * 2 + 1)
    assert_same(first, second)


def test_the_default_warmup_is_three_calls(rand: Rand) -> None:
    ran = Runs()

    def f(x: Tensor) -> Tensor:
        ran.add()
        return x + 1

    fast = ol.graph(f)
    with torch.no_grad():
        for i in range(3):
            assert_same(fast(rand(i, 2)), rand(i, 2) + 1)
            assert ran.count == i + 1
            assert len(fast.recordings) == 0
        assert_same(fast(rand(3, 2)), rand(3, 2) + 1)
        assert len(fast.recordings) == 1
        after = ran.count
        for i in range(5):
            assert_same(fast(rand(i, 2)), rand(i, 2) + 1)
    assert ran.count == after, "a replay ran the callable"
    assert fast.recordings[0].replays >= 5


# What fits: tensors.


Made = Callable[[Rand, int], Tensor]


def inference_tensor(rand: Rand, i: int) -> Tensor:
    with torch.inference_mode():
        return rand(i, 4)


ALTERNATING: dict[str, tuple[Callable[[Tensor], Tensor], Made, Made]] = {
    "shape": (
        lambda x: x.sum(0) * x.shape[0],
        lambda rand, i: rand(i, 4, 3),
        lambda rand, i: rand(i, 5, 3),
    ),
    "rank": (
        lambda x: x * x.dim(),
        lambda rand, i: rand(i, 4),
        lambda rand, i: rand(i, 1, 4),
    ),
    "broadcastable shape": (
        lambda x: x + 1,
        lambda rand, i: rand(i, 4, 3),
        lambda rand, i: rand(i, 1, 3),
    ),
    "dtype": (
        lambda x: x * 3,
        lambda rand, i: rand(i, 4),
        lambda rand, i: rand(i, 4, dtype=torch.float64),
    ),
    "stride": (
        lambda x: x.exp(),
        lambda rand, i: rand(i, 4, 4),
        lambda rand, i: rand(i, 4, 4).t(),
    ),
    "requires_grad": (
        lambda x: x * (2 if x.requires_grad else 3),
        lambda rand, i: rand(i, 4).requires_grad_(),
        lambda rand, i: rand(i, 4),
    ),
    "conj": (
        lambda x: x * 2,
        lambda rand, i: rand(i, 4, dtype=torch.complex64).conj(),
        lambda rand, i: rand(i, 4, dtype=torch.complex64),
    ),
    "neg": (
        lambda x: x * 2,
        lambda rand, i: torch._neg_view(rand(i, 4)),
        lambda rand, i: rand(i, 4),
    ),
    "inference": (
        lambda x: x * (2 if x.is_inference() else 3),
        inference_tensor,
        lambda rand, i: rand(i, 4),
    ),
}


@pytest.mark.parametrize("what", ALTERNATING)
def test_two_signatures_in_turn(rand: Rand, what: str) -> None:
    """Two recordings, each replayed."""
    f, *makes = ALTERNATING[what]
    fast = drop_in(f, lambda i: (makes[i % 2](rand, i),), calls=8, recordings=2, min_replays=4)
    assert all(r.replays > 0 for r in fast.recordings)


def test_storage_offset_alone_changes_nothing_in_the_result(rand: Rand) -> None:
    drop_in(
        lambda x: x * 2,
        lambda i: (rand(i, 9)[1:] if i % 2 else rand(i, 8),),
        calls=6,
        recordings=None,
        min_replays=2,
    )


@pytest.mark.cpu
@on_accelerators
def test_device_of_an_argument(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if x.device.type == "cpu" else x * 3

    drop_in(
        f,
        lambda i: (rand(i, 4) if i % 2 else random_tensor(i, 4),),
        calls=8,
        recordings=None,
        min_replays=2,
    )


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_overlap_of_arguments(rand: Rand, shift: int) -> None:
    """Windows of one storage that overlap more or less, and one that does not."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y.add_(1) + 0

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        base = rand(i, 16)
        offset = shift if i % 2 else 8
        return base[:8], base[offset : offset + 8]

    drop_in(f, arguments, calls=8, recordings=None, min_replays=2)


def test_an_argument_that_overlaps_memory_read_by_address(rand: Rand) -> None:
    def world() -> Any:
        model = nn.Linear(4, 4, bias=False).to(rand(0, 1).device)
        with torch.no_grad():
            model.weight.copy_(rand(99, 4, 4))

        def f(x: Tensor) -> Tensor:
            x.mul_(2)
            return model.weight @ torch.ones_like(x)

        def arguments(i: int) -> tuple[Tensor]:
            return (model.weight.data if i % 2 else rand(i, 4, 4),)

        return f, arguments

    drop_in_worlds(world, calls=8, recordings=None, min_replays=2)


def test_structure(rand: Rand) -> None:
    def f(tree: Any) -> Tensor:
        values = tree.values() if isinstance(tree, dict) else tree
        out = torch.zeros_like(next(iter(values)))
        for k, v in enumerate(values):
            out = out + v * (k + 1)
        return out * (2 if isinstance(tree, list) else 3)

    def arguments(i: int) -> tuple[Any]:
        a, b = rand(i, 3), rand(100 + i, 3)
        return ([[a, b], (a, b), {"a": a, "b": b}, {"b": b, "a": a}, [a, b, a]][i % 5],)

    drop_in(f, arguments, calls=15, recordings=5, min_replays=5)


def test_position_keyword_and_default(rand: Rand) -> None:
    def f(x: Tensor, scale: float = 2.0, *more: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x * scale
        for m in more:
            y = y + m
        return y if bias is None else y + bias

    fast = ol.graph(f, warmup=1)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for _ in range(3):
        for i in range(3):
            x, b = rand(i, 3), rand(10 + i, 3)
            calls += [
                ((x,), {}),
                ((x, 3.0), {}),
                ((x,), {"scale": 3.0}),
                ((), {"x": x, "bias": b}),
                ((), {"bias": b, "x": x}),
                ((x, 1.0, b), {}),
                ((x, 1.0, b, x), {"bias": x}),
            ]
    with torch.no_grad():
        for args, kwargs in calls:
            assert_same(fast(*args, **kwargs), f(*args, **kwargs))
    assert replays(fast) >= len(calls) // 2


def test_the_order_of_keywords(rand: Rand) -> None:
    """A callable that takes any keywords sees the order in which they were given."""

    def f(**parts: Tensor) -> Tensor:
        return torch.cat(list(parts.values()))

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(8):
            a, b = rand(i, 2), rand(50 + i, 3)
            parts = {"a": a, "b": b} if i % 2 else {"b": b, "a": a}
            assert_same(fast(**parts), f(**parts))
    assert replays(fast) > 2


def test_wrong_arguments_raise_what_the_callable_raises(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
        with pytest.raises(TypeError, match=r"f\(\) missing 1 required positional argument: 'x'"):
            fast()
        with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
            fast(rand(0, 3), rand(1, 3))
        with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
            fast(rand(0, 3), y=1)
        assert_same(fast(rand(5, 3)), rand(5, 3) + 1)
