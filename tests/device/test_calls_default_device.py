"""Calls under a default device: what onelaunch makes on the host for itself stays there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same
from .steps import batch, small_model, training


@pytest.fixture(params=["its own", "another"])
def default(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """As programs set it that run on one device; and one that can hold nothing."""
    return device if request.param == "its own" else torch.device("meta")


def same(
    f: Callable[..., Any], calls: list[tuple[Tensor, ...]], default: torch.device, **options: Any
) -> Any:
    """Eager and graphed, both under the default device; results compared outside of it."""
    fast: Any = ol.graph(f, **{"warmup": 1, **options})
    for i, args in enumerate(calls):
        with default:
            torch.manual_seed(i)
            expected = f(*args)
            torch.manual_seed(i)
            got = fast(*args)
        assert_same(got, expected, f"call {i}")
    assert fast.recordings
    return fast


def test_a_call(device: torch.device, default: torch.device, rand: Rand) -> None:
    with torch.no_grad():
        same(lambda x: (x * 2 + 1).relu(), [(rand(i, 3, 4),) for i in range(4)], default)


def test_random_numbers_and_their_place_in_the_stream(
    device: torch.device, default: torch.device, rand: Rand
) -> None:
    def noisy(x: Tensor) -> tuple[Tensor, ...]:
        return nn.functional.dropout(x, 0.5), torch.rand_like(x)

    fast = ol.graph(noisy, warmup=1)
    for i in range(5):
        x = rand(i, 33)
        drawn = []
        for f in (noisy, fast):
            with default, torch.no_grad():
                torch.manual_seed(i)
                got = f(x)
            drawn.append([*got, torch.rand(3, device=device), torch.rand(3)])
        assert_same(drawn[1], drawn[0], f"call {i}")
    assert fast.recordings


def test_a_budget(device: torch.device, default: torch.device, rand: Rand) -> None:
    with torch.no_grad():
        calls = [(rand(i, 3, 4),) for i in range(4)]
        same(lambda x: x * 2 + 1, calls, default, pool=ol.Pool(1 << 28))


@pytest.mark.parametrize("fill", [None, 2.0])
def test_buckets(
    device: torch.device, default: torch.device, rand: Rand, fill: float | None
) -> None:
    def f(x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (4,)).relu()

    pad = {} if fill is None else {"x": fill}
    buckets = ol.Buckets(0, (4, 8), pad=pad)
    with torch.no_grad():
        calls = [(rand(i, n, 4),) for i, n in enumerate((3, 3, 4, 5, 8, 2, 7))]
        fast = same(f, calls, default, buckets=buckets)
        with default:
            buckets = ol.Buckets(0, (4,), overflow="chunk")
            cut = ol.graph(lambda x: x.softmax(1), buckets=buckets, warmup=1)
            for n in (11, 9, 13):
                assert cut(torch.ones(n, 4, device=device)).shape == (n, 4)
    assert len(fast.recordings) == 2


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_whose_numbers_change(
    device: torch.device, default: torch.device, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    options = {"fused": True} if device.type == "cpu" else {"capturable": True}
    options = options if kind is torch.optim.Adam else {"momentum": 0.9}
    eager, graphed = (training(device, lambda p: kind(p, lr=0.1, **options)) for _ in range(2))
    (optimizer,), (other,) = eager.optimizers, graphed.optimizers
    fast: Any = ol.graph(graphed.step)
    for i in range(9):
        args = batch(i, device)
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.1 / (1 + i)
        with default:
            expected, got = eager.step(*args), fast(*args)
        assert_same(got, expected, f"call {i}")
        assert_same(dict(graphed.model.state_dict()), dict(eager.model.state_dict()), f"call {i}")
    assert [r.replays for r in fast.recordings] == [6]


def test_a_forward_and_its_backward(
    device: torch.device, default: torch.device, rand: Rand
) -> None:
    models = small_model(device), small_model(device)
    fast = ol.graph(models[1], warmup=1)
    for i in range(5):
        x = rand(i, 5, 4)
        for f in (models[0], fast):
            with default:
                f(x).square().sum().backward()
        assert_same(
            [p.grad for p in models[1].parameters()], [p.grad for p in models[0].parameters()]
        )
    assert fast.recordings


def test_captured_ahead(device: torch.device, default: torch.device, rand: Rand) -> None:
    fast: Any = ol.graph(lambda x: nn.functional.dropout(x) * 2)
    x = rand(0, 4)
    state = torch.get_rng_state()
    with default, torch.no_grad():
        fast.capture(x)
        fast(x)
    assert [r.replays for r in fast.recordings] == [1]
    if device.type == "cuda":
        assert torch.equal(torch.get_rng_state(), state)
