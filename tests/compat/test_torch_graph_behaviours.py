"""What torch's own tests ask of CUDA graphs in inference, asked of onelaunch.

The behaviours are those of pytorch/test/test_cuda.py (graphs): random numbers, pools shared by
graphs, replays out of order, in-place state. In tests/device test_concurrency_memory.py,
test_concurrency_threads.py and test_concurrency_failures.py have memory that comes back, streams,
and captures that fail.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from tests.device.drop_in import assert_same, random_tensor, replays

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.no_grad():
        yield


class Counter(nn.Module):
    """Writes a part of its buffer, and returns a view of it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count[1:3] += x
        return self.count.view(2, 2).t()


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)  # pyright: ignore


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "views and writes in place": (Counter, (2,)),
    "batch norm and dropout": (convolutional, (2, 3, 8, 8)),
    "recurrent": (lambda: nn.RNN(6, 8, num_layers=2, batch_first=True), (2, 5, 6)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(),
        (2, 7, 16),
    ),
    "channels last": (channels_last, (2, 3, 8, 8)),
}
ROUND = ("attention", "channels last")
"""On CUDA."""


@pytest.mark.parametrize("name", MODULES)
def test_modules(device: str, name: str) -> None:
    make, size = MODULES[name]

    def run(wrap: Callable[[nn.Module], Any]) -> tuple[Any, ...]:
        torch.manual_seed(2)
        model = make().to(device)
        call = wrap(model)
        torch.manual_seed(4)
        results: list[Any] = []
        for i in range(6):
            x = random_tensor(i, *size, device=device)
            if name == "channels last":
                x = x.to(memory_format=torch.channels_last)
            results.append(copy.deepcopy(call(x)))
        return call, results, dict(model.state_dict())

    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        (fast, *got), (_, *expected) = run(lambda m: ol.graph(m, warmup=1)), run(lambda m: m)
    if name in ROUND:
        torch.testing.assert_close(got, expected, check_stride=True)
    else:
        assert_same(got, expected)
    assert replays(fast) == 5, fast.stats()


def test_random_operations_and_seeds(device: str) -> None:
    """Eager and replays in turn draw from one stream, as eager alone does."""

    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand_like(x),
            torch.nn.functional.dropout(x, 0.3),
            torch.bernoulli(torch.full_like(x, 0.4)),
            torch.randn(3, device=x.device),
            torch.empty_like(x).exponential_(),
            torch.empty_like(x).log_normal_(),
        )

    fast: Any = ol.graph(draw, warmup=2)
    x = random_tensor(0, 100, device=device)

    def run(g: Any) -> list[Any]:
        torch.manual_seed(5)
        out: list[Any] = []
        for i in range(8):
            out.append(g(x))
            if i % 2:
                out.append(torch.rand(7, device=device))
        return out

    assert_same(run(fast), run(draw))
    assert_same(run(fast), run(draw))
    assert replays(fast) >= 12


def test_random_number_kernels_of_different_sizes(device: str) -> None:
    """The offset that a replay takes depends on the size drawn."""
    sizes = (1, 64, 1000, 70000)
    fasts: list[Any] = [
        ol.graph(lambda x, n=n: torch.rand(n, device=x.device) + x.sum(), warmup=1) for n in sizes
    ]
    x = torch.zeros(1, device=device)
    for fast in 2 * fasts:
        fast(x)
    torch.manual_seed(3)
    got = [fast(x) for fast in fasts for _ in range(2)]
    torch.manual_seed(3)
    assert_same(got, [torch.rand(n, device=device) for n in sizes for _ in range(2)])


def test_replays_of_shared_pool_out_of_order(device: str) -> None:
    """Torch's graphs of one pool must be replayed in the order of capture; these need not."""
    pool = ol.Pool()
    fasts: list[Any] = [
        ol.graph(lambda x, k=k: (x * k).cumsum(0) + k, warmup=1, pool=pool) for k in range(1, 5)
    ]
    x = random_tensor(0, 256, device=device)
    for fast in 2 * fasts:
        fast(x)
    for order in ((3, 1, 0, 2), (2, 2, 3, 0), (0, 3, 0, 1)):
        kept = [(k, fasts[k](x + k)) for k in order]
        for k, y in kept:
            assert_same(y, ((x + k) * (k + 1)).cumsum(0) + (k + 1))


def test_a_graph_survives_the_data_that_it_was_captured_with(device: str) -> None:
    fast: Any = ol.graph(lambda x: x * 2, warmup=1)
    for i in range(3):
        fast(random_tensor(i, 4096, device=device))
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    for i in range(3):
        x = random_tensor(i, 4096, device=device)
        assert_same(fast(x), x * 2)
