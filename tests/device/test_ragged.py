"""Ragged sizes: networks on graphs and packed sequences of any size are eager's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from . import graphs
from .drop_in import Rand, assert_same, describe, replays

GRAPHS = ol.Ragged(
    sizes={"nodes": (8, 16), "edges": (32,), "graphs": (4,)},
    dims={
        "x": "nodes",
        "edges": (None, "edges"),
        "e": "edges",
        "batch": "nodes",
        "u": "graphs",
    },
    index={"edges": "nodes", "batch": "graphs"},
)
EDGES = ol.Ragged(
    sizes={"nodes": (8, 16), "edges": (16, 32)},
    dims={"x": "nodes", "edges": (None, "edges"), "e": "edges"},
    index={"edges": "nodes"},
)
TOKENS = ol.Ragged(
    sizes={"tokens": (16, 32)}, dims={"x": "tokens", "ids": "tokens"}, index={"ids": "tokens"}
)
LAYERS = ("GCN", "GAT", "SAGE", "EdgeConv", "Pooled", "Equivariant", "Readout", "Meta")


def batch_of(rand: Rand, seed: int, nodes: int, edges: int, count: int) -> list[Tensor]:
    """A batch of graphs; some have no node, and some nodes no edge."""
    made = torch.Generator().manual_seed(seed)
    x, e, u = rand(seed, nodes, 8), rand(seed + 1, edges, 8), rand(seed + 2, count, 8)
    ends = torch.randint(0, nodes, (2, edges), generator=made)
    batch = torch.randint(0, count, (nodes,), generator=made).sort().values
    return [x, ends.to(x.device), e, batch.to(x.device), u]


def some_sizes(seed: int, count: int, *most: int) -> list[tuple[int, ...]]:
    r = random.Random(seed)
    return [tuple(r.randint(1, n) for n in most) for _ in range(count)] + [most, (1,) * len(most)]


def same(got: Any, expected: Any) -> None:
    listed = [[t] if isinstance(t, Tensor) else list(t) for t in (got, expected)]
    for a, b in zip(*listed, strict=True):
        assert describe(a) == describe(b)
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_graphs_of_any_size(device: torch.device, rand: Rand, name: str) -> None:
    layer = getattr(graphs, name)().requires_grad_(False).to(device)
    fast = ol.graph(layer, buckets=GRAPHS, warmup=1)
    for seed, sizes in enumerate(some_sizes(1, 12, 15, 32, 3)):
        given = batch_of(rand, seed, *sizes)
        same(fast(*given), layer(*given))
    assert replays(fast) == 12


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_packed_sequences(device: torch.device, rand: Rand, fused: bool, causal: bool) -> None:
    model = graphs.Packed(fused).requires_grad_(False).to(device)
    fast = ol.graph(model, buckets=TOKENS, warmup=1)
    for seed, (tokens,) in enumerate(some_sizes(2, 10, 31)):
        x = rand(seed, tokens, 8)
        ids = torch.randint(0, tokens, (tokens,), generator=torch.Generator().manual_seed(seed))
        ids = (ids // 4).sort().values.to(device)
        same(fast(x, ids, causal), model(x, ids, causal))
    assert replays(fast) >= 8


@pytest.mark.parametrize("name", ["GAT", "Pooled", "Meta"])
def test_training(device: torch.device, rand: Rand, name: str) -> None:
    layer = getattr(graphs, name)().to(device)
    fast = ol.graph(layer, buckets=GRAPHS, warmup=1)
    for seed, sizes in enumerate([(5, 9, 2), (5, 9, 2), (7, 32, 1), (1, 1, 3)]):
        found: list[list[Tensor | None]] = []
        for call in (fast, layer):
            given = batch_of(rand, seed, *sizes)
            leaves = [t.requires_grad_() for t in (given[0], given[2], given[4])]
            result = call(*given)
            first = result if isinstance(result, Tensor) else result[0]
            loss = (first * rand(seed + 9, *first.shape)).sum()
            wanted = [*leaves, *layer.parameters()]
            found.append(list(torch.autograd.grad(loss, wanted, allow_unused=True)))
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4)
    assert replays(fast)


def test_one_example_records_every_bucket(device: torch.device, rand: Rand) -> None:
    layer = graphs.SAGE().requires_grad_(False).to(device)
    fast = ol.graph(layer, buckets=GRAPHS)
    fast.warm_up([tuple(batch_of(rand, 1, 5, 12, 2))])
    assert len(fast.recordings) == 2
    for seed, sizes in enumerate(some_sizes(3, 10, 15, 32, 3)):
        given = batch_of(rand, seed, *sizes)
        same(fast(*given), layer(*given))
    assert replays(fast) == 12


def summed(x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
    return x.index_add(0, edges[1], e)


def test_a_bucket_has_a_spare_row_of_what_is_named(rand: Rand) -> None:
    fast = ol.graph(summed, buckets=EDGES, warmup=1)
    for sizes, bucket in {(7, 16): (8, 16), (8, 16): (16, 16), (15, 17): (16, 32)}.items():
        given = batch_of(rand, 1, *sizes, 1)[:3]
        for _ in range(2):
            same(fast(*given), summed(*given))
        assert fast.recordings[0].spec.tensors[0].shape[0] == bucket[0]
    above = batch_of(rand, 1, 16, 16, 1)[:3]
    with pytest.warns(ol.GraphWarning, match="size 16 x 16, above 15 x 32") as told:
        same(fast(*above), summed(*above))
    assert "chunk" not in str(told[0].message)  # which Ragged has not


@pytest.mark.parametrize("wrong", ["beyond", "negative", "far"])
def test_an_index_out_of_bounds_is_not_padding(
    device: torch.device, rand: Rand, wrong: str
) -> None:
    if device.type == "cuda":
        pytest.skip("an assertion on CUDA ends the process")

    def f(x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        return x[edges[0]] + e

    fast = ol.graph(f, buckets=EDGES, warmup=1)
    x, edges, e = batch_of(rand, 1, 5, 9, 1)[:3]
    for _ in range(2):
        same(fast(x, edges, e), f(x, edges, e))
    edges = edges.clone()
    edges[0, 3] = {"beyond": 5, "negative": -1, "far": 99}[wrong]
    with pytest.raises(RuntimeError, match="out of bounds"):
        fast(x, edges, e)


REFUSED: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "a mean of nodes": ("mean", lambda x, edges, e: x - x.mean(0)),
    "a sum of edges": ("sum", lambda x, edges, e: x + e.sum(0)),
    "an index that moves": ("index_add", lambda x, edges, e: x.index_add(0, edges[1] // 2, e)),
    "a degree as an index": (
        "index_add",
        lambda x, edges, e: x.index_add(0, (edges[0] != edges[1]).long(), e),
    ),
    "nodes put behind others": (
        "index_add",
        lambda x, edges, e: torch.cat([x, x]).index_add(0, edges[1], e),
    ),
    "edges named as nodes": (
        "index_add",
        lambda x, edges, e: e.index_add(0, edges[0].clamp(max=0), e),
    ),
    "the number of padding": (
        "sum",
        lambda x, edges, e: x + (edges[0][:, None] != edges[0]).sum(1).amax(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_line(rand: Rand, name: str) -> None:
    words, f = REFUSED[name]
    fast = ol.graph(f, buckets=EDGES, warmup=1)
    given = batch_of(rand, 1, 5, 9, 1)[:3]
    fast(*given)
    with pytest.raises(ol.CaptureError, match=words) as caught:
        fast(*given)
    assert caught.value.code == "OL140"
    assert "test_ragged" in str(caught.value.where)
    assert "Buckets" not in str(caught.value)  # the fix is of Ragged


def test_a_forgotten_index_is_the_fix(rand: Rand) -> None:
    buckets = ol.Ragged({"nodes": (8,), "edges": (16,)}, {"x": "nodes", "edges": (None, "edges")})
    fast = ol.graph(lambda x, edges: x[edges[0]], buckets=buckets)
    given = batch_of(rand, 1, 5, 9, 1)[:2]
    with pytest.raises(ol.CaptureError, match="OL140") as caught:
        fast.warm_up([tuple(given)])
    assert 'index={"edges": "nodes"}' in str(caught.value)


def test_an_index_that_is_not_said_to_be_one_is_refused(rand: Rand) -> None:
    buckets = ol.Ragged({"nodes": (8,), "edges": (16,)}, {"x": "nodes", "edges": (None, "edges")})
    fast = ol.graph(lambda x, edges: x.index_add(0, edges[1], x[edges[0]]), buckets=buckets)
    given = batch_of(rand, 1, 5, 9, 1)[:2]
    with pytest.raises(ol.CaptureError, match="index_add"):
        fast.warm_up([tuple(given)])


def test_sizes_of_the_same_bucket_are_told_apart(rand: Rand) -> None:
    buckets = ol.Ragged(
        {"nodes": (8, 16), "edges": (7, 16)},
        {"x": "nodes", "edges": (None, "edges"), "e": "edges"},
        index={"edges": "nodes"},
    )
    fast = ol.graph(summed, buckets=buckets, warmup=1)
    mixed = ol.graph(lambda x, edges, e: e.index_add(0, edges[0], e), buckets=buckets, warmup=1)
    for seed, sizes in enumerate([(9, 16), (9, 16), (15, 16), (15, 8), (8, 8), (12, 15)]):
        given = batch_of(rand, seed, *sizes, 1)[:3]
        same(fast(*given), summed(*given))
    assert replays(fast)
    given = batch_of(rand, 1, 9, 12, 1)[:3]
    mixed(*given)
    with pytest.raises(ol.CaptureError, match="index_add"):  # an edge may be the last of its bucket
        mixed(*given)


def test_an_argument_that_is_written(rand: Rand) -> None:
    def f(x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        return x.index_add_(0, edges[1], e) * 2

    fast = ol.graph(f, buckets=EDGES, warmup=1)
    for seed, sizes in enumerate([(5, 9), (5, 9), (7, 16), (12, 20), (12, 20)]):
        first, second = (batch_of(rand, seed, *sizes, 1)[:3] for _ in range(2))
        same(fast(*first), f(*second))
        assert_same(first[1:], second[1:])
        same(first[0], second[0])
