"""Table of tensors: inputs that are written, or change shape, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, compare, drop_in, drop_in_worlds, replays

# Inputs that are written.


def in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sum()


def through_a_view(x: Tensor) -> Tensor:
    x[1:3].t().zero_()
    x.view(-1)[0] = 5
    return x + 0


def in_part(x: Tensor) -> None:
    x[::2] = 0


def one_and_read_both(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x + y


def both(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y.mul_(2)
    return x + y


def both_of_two_dtypes(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y.bitwise_and_(0x7FFFFFFF)
    return x * 2


def read_before_and_after(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = x + y
    x.copy_(y)
    y.zero_()
    return before, x + 1, y + 1


WRITTEN: dict[str, tuple[Callable[..., Any], Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "in place": (in_place, lambda t: (t,)),
    "through a view": (through_a_view, lambda t: (t.view(4, 3),)),
    "by an out argument": (lambda x, out: torch.add(x, 1, out=out), lambda t: (t, t * 2)),
    "in part": (in_part, lambda t: (t,)),
    "sliced, and what lies between": (
        lambda x, base: x.add_(1) * 2,
        lambda t: (t.view(2, 6)[:, ::3], t.view(2, 6)),
    ),
    "in an order": (read_before_and_after, lambda t: (t, t * 2)),
    "overlapping": (both, lambda t: (t[:8], t[4:])),
    "overlapping, of two dtypes": (both_of_two_dtypes, lambda t: (t, t.view(torch.int32)[4:])),
    "adjacent": (one_and_read_both, lambda t: (t[:4], t[4:8])),
    "interleaved": (one_and_read_both, lambda t: (t[::2], t[1::2])),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_an_input_that_is_written(rand: Rand, how: str) -> None:
    f, arguments = WRITTEN[how]
    drop_in(f, lambda i: arguments(rand(i, 12)))


def test_a_kv_cache(rand: Rand) -> None:
    def world() -> Any:
        cache = {"k": rand(500, 1, 16, 4), "v": rand(501, 1, 16, 4)}

        def decode(x: Tensor, position: Tensor, cache: dict[str, Tensor]) -> Tensor:
            cache["k"].index_copy_(1, position, x)
            cache["v"].index_copy_(1, position, x * 2)
            scores = (cache["k"] * x).sum(-1)
            return (scores.softmax(-1)[..., None] * cache["v"]).sum(1)

        def arguments(i: int) -> tuple[Any, ...]:
            position = torch.tensor([i], device=rand(0, 1).device)
            return rand(i, 1, 1, 4), position, cache

        return decode, arguments

    drop_in_worlds(world, calls=10)


def test_another_cache_in_its_place(rand: Rand) -> None:
    """Several sequences in turn, each with its own cache, one recording."""

    def world() -> Any:
        caches = [rand(500 + n, 8, 4) for n in range(3)]

        def f(x: Tensor, cache: Tensor) -> Tensor:
            cache.add_(x)
            return cache.sum(0)

        return f, lambda i: (rand(i, 4), caches[i % 3])

    drop_in_worlds(world, calls=9)


class Accumulates(nn.Module):
    total: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=device))
        self.register_buffer("total", torch.zeros(3, device=device))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.total * self.weight


def test_a_cache_on_the_module(device: torch.device, rand: Rand) -> None:
    drop_in_worlds(lambda: (Accumulates(device), lambda i: (rand(i, 3),)), calls=8)


# Versions, and what autograd makes of them.


def test_the_version_of_a_written_input_rises(rand: Rand) -> None:
    fast = ol.graph(one_and_read_both, warmup=1)
    with torch.no_grad():
        for i in range(5):
            x, y = rand(i, 3), rand(i, 3)
            base, other = x._version, y._version
            fast(x, y)
            assert x._version > base, f"call {i}"
            assert y._version == other, f"call {i}"
    assert replays(fast) > 0


def test_the_version_of_a_written_buffer_rises(device: torch.device, rand: Rand) -> None:
    model = Accumulates(device)
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(5):
            before, weight = model.total._version, model.weight._version
            fast(rand(i, 3))
            assert model.total._version > before, f"call {i}"
            assert model.weight._version == weight, f"call {i}"
    assert replays(fast) > 0


def test_a_saved_tensor_written_by_a_replay_is_an_error_in_backward(rand: Rand) -> None:
    fast = ol.graph(lambda x: x.mul_(2), warmup=1)
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
    w = rand(0, 3).requires_grad_()
    x = rand(1, 3)
    loss = (w * x).sum()
    with torch.no_grad():
        fast(x)
    assert replays(fast) >= 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Metadata changed in place.


METADATA: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.squeeze_(),
    "shrink": lambda x: x.resize_(2, 2),
    "grow": lambda x: x.resize_(8, 8),
    "set_": lambda x: x.set_(torch.ones_like(x)),
    "data": lambda x: setattr(x, "data", x.data * 2),
    "data view": lambda x: setattr(x, "data", x.data.t()),
}


@pytest.mark.parametrize("change", METADATA)
def test_metadata_of_an_argument(rand: Rand, change: str) -> None:
    """Right or refused; grown memory has no values to compare."""

    def f(x: Tensor) -> Tensor:
        METADATA[change](x)
        return x.clone() if x.numel() <= 12 else x[:2, :2].clone() * 0

    fast, refused = ol.graph(f, warmup=1), None
    with torch.no_grad():
        for i in range(4):
            x, y = rand(i, 3, 4), rand(i, 3, 4)
            expected = f(x)
            try:
                assert_same(fast(y), expected, f"call {i}")
            except ol.CaptureError as error:
                refused = error
                break
            assert (y.shape, y.stride()) == (x.shape, x.stride()), f"call {i}"
    assert refused is None or refused.code == "OL107"


def test_metadata_of_a_new_tensor_is_its_own(rand: Rand) -> None:
    drop_in(lambda x: (x * 2).t_().unsqueeze_(0), lambda i: (rand(i, 3, 4),))


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=str)
def test_requires_grad_switched_on_inside(rand: Rand, mode: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return x.mul(2).requires_grad_()

    compare(ol.graph(f, warmup=1), f, lambda i: (rand(i, 3),), 4, mode)


def test_an_argument_given_other_memory_is_refused(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.data = y
        return x * 2

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3), rand(1, 3))
        with pytest.raises(ol.CaptureError, match="OL107"):
            fast(rand(0, 3), rand(1, 3))
