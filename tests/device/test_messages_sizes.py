"""Messages about sizes that vary, padding, and forwards that wait: what varies, what to write."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if w.category is ol.GraphWarning]


@pytest.mark.parametrize("dims", [1, 2])
def test_sizes_in_random_order_are_offered_buckets(rand: Rand, dims: int) -> None:
    fast = ol.graph(torch.relu, warmup=1, max_recordings=4)
    draw = random.Random(1)
    sizes = [(draw.randint(1, 40), draw.randint(1, 40) if dims > 1 else 3) for _ in range(90)]

    def serve() -> None:
        with torch.no_grad():
            for i, (n, m) in enumerate(sizes):
                fast(rand(i, n, m))

    (text,) = warned(serve)
    assert "[OL301] `relu` was called with " in text
    assert "args[0], dim 0 varies from 1 to " in text
    assert ("args[0], dim 1 varies from 1 to " in text) == (dims == 2)
    offered = text.partition("fix:   buckets=")[2].partition(": calls are padded")[0]
    buckets: ol.Buckets = eval(offered, {"ol": ol})
    assert buckets.dim == (0, 1)[:dims]
    assert all(2 <= len(each) <= 6 for each in buckets.sizes)
    fast = ol.graph(torch.relu, buckets=buckets, warmup=1)  # as the message says
    with torch.no_grad():
        for i, (n, m) in enumerate(sizes[:12]):
            assert_same(fast(rand(i, n, m)), rand(i, n, m).relu())


@pytest.mark.parametrize("tagged", [False, True])
def test_sizes_that_hardly_come_again_are_offered_buckets(rand: Rand, tagged: bool) -> None:
    """There are so many that none is recorded. With other tags, too, buckets would not do."""
    fast = ol.graph(lambda x, tag: x * 2)
    sizes = random.Random(1).sample(range(1, 500), 40)

    def serve() -> None:
        with torch.no_grad():
            for i, n in enumerate(sizes):
                fast(rand(i, n, 3), f"tag {i}" if tagged else "tag")

    (text,) = warned(serve)
    assert ("[OL302]" if tagged else "[OL301]") in text
    assert "was called 24 times without a launch; " in text
    assert ("; args[0], dim 0 varies from " in text) == (not tagged)
    assert ("fix:   buckets=ol.Buckets(dim=0, sizes=(" in text) == (not tagged)


@pytest.mark.parametrize("sizes", [(8,), (4, 8)])
def test_batch_norm_in_training_is_to_be_in_eval(
    device: torch.device, rand: Rand, sizes: tuple[int, ...]
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    buckets = ol.Buckets(0, sizes)
    fast = ol.graph(net, buckets=buckets, warmup=1, on_refusal="raise")
    assert refused_ahead(fast, rand(0, 6, 4)).fix.startswith("call `.eval()`")
    for name, t in net.state_dict().items():
        assert torch.equal(t, before[name])
    net.eval()  # as the message says
    fast = ol.graph(net, buckets=buckets, warmup=1)
    with torch.no_grad():
        for i, n in enumerate((6, 6, 5, 7)):
            torch.testing.assert_close(fast(rand(i, n, 4)), net(rand(i, n, 4)))
    assert replays(fast) >= 1


def refused_ahead(fast: Any, *args: Any, match: str = "OL140") -> ol.CaptureError:
    with torch.no_grad(), pytest.raises(ol.CaptureError, match=match) as caught:
        fast.capture(*args)
    return caught.value


NORMS: dict[str, Callable[[], nn.Module]] = {
    "instance, at one": lambda: nn.InstanceNorm1d(3).eval(),
    "instance": lambda: nn.InstanceNorm2d(3).eval(),
    "instance in training": lambda: nn.InstanceNorm2d(3),
    "batch": lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_without_running_statistics_is_never_told_to_be_in_eval(
    device: torch.device, rand: Rand, name: str
) -> None:
    net = NORMS[name]().to(device)
    more = (4,) if isinstance(net, nn.InstanceNorm2d) else ()
    fast = ol.graph(net, buckets=ol.Buckets(2, (4, 8)), warmup=1, on_refusal="raise")
    assert refused_ahead(fast, rand(0, 2, 3, 3, *more)).fix.startswith(
        "leave the buckets for this size out"
    )


@pytest.mark.parametrize("sizes", [(4,), (4, 8)])
def test_a_norm_with_running_statistics_is_to_be_in_eval(
    device: torch.device, rand: Rand, sizes: tuple[int, ...]
) -> None:
    net = nn.InstanceNorm2d(3, track_running_stats=True).to(device)
    buckets = ol.Buckets(2, sizes)
    fast = ol.graph(net, buckets=buckets, warmup=1, on_refusal="raise")
    assert refused_ahead(fast, rand(0, 2, 3, 3, 4)).fix.startswith("call `.eval()`")
    fast = ol.graph(net.eval(), buckets=buckets, warmup=1)  # as the message says
    with torch.no_grad():
        for i, n in enumerate((3, 3, 4, 2)):
            torch.testing.assert_close(fast(rand(i, 2, 3, n, 4)), net(rand(i, 2, 3, n, 4)))
    assert replays(fast) >= 1


class Counter(nn.Module):
    """Counts ids; `kind` says how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(5))
        self.kind = kind

    def forward(self, ids: Tensor) -> Tensor:
        ones = torch.ones(len(ids), device=ids.device)
        if self.kind == "index_add_":
            self.counts.index_add_(0, ids, ones)
        elif self.kind == "scatter_add_":
            self.counts.scatter_add_(0, ids, ones)
        elif self.kind == "index_put_":
            self.counts.index_put_((ids,), ones, accumulate=True)
        elif self.kind == "rows":
            self.counts.add_(len(ids))
        elif self.kind == "mean":
            self.counts.lerp_(ids.float().mean().expand(5), 0.1)
        else:
            self.counts.add_(1)
        return ids * 2


@pytest.mark.parametrize("kind", ["index_add_", "scatter_add_", "index_put_", "rows", "mean"])
@pytest.mark.parametrize("independent", [True, False])
def test_what_counts_rows_counts_padded_ones(
    device: torch.device, kind: str, independent: bool
) -> None:
    net = Counter(kind).to(device)
    buckets = ol.Buckets(0, (4,), independent=independent)
    fast = ol.graph(net, buckets=buckets, warmup=1, on_refusal="raise")
    ids = torch.tensor([1, 2, 3], device=device)
    error = refused_ahead(fast, ids, match=r"OL140.*keeps")
    assert ("independent=True says" in error.fix) == independent
    assert net.counts.tolist() == [0.0] * 5


def test_what_counts_calls_may_be_independent(device: torch.device) -> None:
    net = Counter("calls").to(device)
    fast = ol.graph(net, buckets=ol.Buckets(0, (4,), independent=True), warmup=1)
    with torch.no_grad():
        for n in (3, 3, 2, 4):
            ids = torch.arange(n, device=device)
            assert_same(fast(ids), ids * 2)
    assert net.counts.tolist() == [4.0] * 5
    assert replays(fast) >= 2


def test_grad_mode_is_each_threads_own(device: torch.device, rand: Rand) -> None:
    fast: Any = ol.graph(nn.Linear(4, 4).to(device), warmup=1)
    kept: list[Tensor] = []

    async def serve() -> None:
        with torch.no_grad():  # which a thread of asyncio knows nothing of
            for i in range(12):
                kept.append(await asyncio.to_thread(fast, rand(i, 3, 4)))

    said = [text for text in warned(lambda: asyncio.run(serve())) if "OL305" in text]
    assert len(said) == 1
    assert "grad mode is on in thread `asyncio_" in said[0]
    assert all(y.requires_grad for y in kept)
    assert "asyncio.to_thread has its own grad mode" in said[0]
