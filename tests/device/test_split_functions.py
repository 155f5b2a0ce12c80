"""`on_refusal="split"` of a function: what Dynamo finds between its breaks is graphed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .regions import F, two_models
from .training import Rand


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # Dynamo's
        yield
    torch._dynamo.reset()


def reads(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum().item() > 1e9:
        y = y + 1
    return y.relu() + 1


def calls(
    f: F, fast: Any, arguments: Callable[[int], tuple[Any, ...]], count: int = 12
) -> list[str]:
    """Calls of both give the same results, which stay. Returns the codes of the warnings."""
    kept: list[tuple[Any, Any]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(count):
            expected, got = f(*arguments(i)), fast(*arguments(i))
            torch.testing.assert_close(got, expected)
            kept.append((got, expected))
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
    return [str(w.message)[1:6] for w in caught if w.category is ol.GraphWarning]


def test_what_lies_between_the_lines_is_graphed(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(reads, on_refusal="split")
    with torch.no_grad():
        assert calls(reads, fast, lambda i: (rand(i, 64),)) == ["OL311"]
    stats = fast.stats()
    assert stats.split_launches == 2
    assert stats.replays >= 10
    assert len(fast.recordings) == 2
    assert fast.memory_bytes > 0
    (refused,) = stats.split
    assert (refused.module, refused.code) == ("reads", "OL101")
    assert "y.sum().item()" in (refused.where or "")


def test_what_can_be_captured_is_one_launch(device: torch.device, rand: Rand) -> None:
    """A signature is split for itself."""

    def f(x: Tensor, read: bool) -> Tensor:
        y = x * 2
        return y * y.sum().item() if read else y + 1

    fast = ol.graph(f, on_refusal="split", warmup=1)
    with torch.no_grad():
        assert calls(f, fast, lambda i: (rand(i, 16), False), 4) == []
        assert (fast.stats().replays, fast.stats().split) == (3, ())
        calls(f, fast, lambda i: (rand(i, 16), True))
        assert fast.stats().split[0].code == "OL101"
        before = fast.stats().replays
        calls(f, fast, lambda i: (rand(i, 16), False), 4)
        assert fast.stats().replays == before + 4


def test_training(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))

    def step(m: Any) -> F:
        def f(x: Tensor) -> Tensor:
            y = m[0](x).relu()
            scale = 2.0 if y.sum().item() > -1 else 1.0
            return m[1](y * scale)

        return f

    fast, eager = ol.graph(step(other), on_refusal="split"), step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(12):
            for m, run in ((model, eager), (other, fast)):
                m.zero_grad()
                run(rand(i, 3, 4)).square().mean().backward()
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad)
    assert fast.stats().replays >= 8


def test_a_bound_method(device: torch.device, rand: Rand) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def generate(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layer(x).relu()
                if x.sum().item() < 0:
                    break
            return x

    model = Decoder().to(device).eval()
    fast = ol.graph(on_refusal="split")(model.generate)
    with torch.no_grad():
        calls(model.generate, fast, lambda i: (rand(i, 2, 4),))
    assert fast.stats().split[0].code == "OL101"


def test_python_between_the_pieces_runs_at_each_call(device: torch.device, rand: Rand) -> None:
    seen: list[float] = []

    def f(x: Tensor) -> Tensor:
        y = x * 2
        total = y.sum().item()
        seen.append(total)
        return y + 1

    fast = ol.graph(f, on_refusal="split", warmup=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(10):
            torch.testing.assert_close(fast(rand(i, 8)), rand(i, 8) * 2 + 1)
        seen.clear()
        for i in range(10, 14):
            fast(rand(i, 8))
    expected = [(rand(i, 8) * 2).sum().item() for i in range(10, 14)]
    assert seen == pytest.approx(expected)


def test_an_exception_of_the_function(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum().item() > 100:
            raise ValueError("too much")
        return y + 1

    fast = ol.graph(f, on_refusal="split")
    with torch.no_grad():
        calls(f, fast, lambda i: (rand(i, 8),))
        with pytest.raises(ValueError, match="too much"):
            fast(torch.full((8,), 1000.0, device=device))
        calls(f, fast, lambda i: (rand(i, 8),), 3)


def test_a_pool_and_reset(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    fast = ol.graph(reads, on_refusal="split", pool=pool)
    with torch.no_grad():
        calls(reads, fast, lambda i: (rand(i, 64),))
        assert pool.memory_bytes == fast.memory_bytes > 0
        fast.reset()
        assert (fast.recordings, fast.memory_bytes, fast.stats().split) == ([], 0, ())
        assert calls(reads, fast, lambda i: (rand(i, 64),)) == ["OL311"]
    assert fast.recordings
    del fast
    gc.collect()
    assert pool.memory_bytes == 0


def test_with_compile(device: torch.device, rand: Rand) -> None:
    """On the emulated device torch's own operators, on CUDA Inductor's."""
    fast = ol.graph(reads, on_refusal="split", compile=True)
    with torch.no_grad():
        assert calls(reads, fast, lambda i: (rand(i, 64),)) == ["OL311"]
    assert fast.stats().split_launches == 2


def test_what_is_no_callable_is_refused() -> None:
    with pytest.raises(ol.ArgumentError, match="expected a callable"):
        ol.graph(3, on_refusal="split")  # pyright: ignore
