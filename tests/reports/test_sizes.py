"""Batches that are padded to a captured size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onelaunch as ol
from tests.device.steps import small_model

from .side_by_side import right_or_refused, side_by_side

Rand = Callable[..., Tensor]
BATCH = ol.Buckets(dim=0, sizes=(2, 4, 8))
SIZES = [3, 8, 5, 2, 1, 7, 4, 6, 8, 3, 1, 5, 2, 7]


def test_rows_that_are_padded(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/issues/13418

    A batch that is padded to a captured size hangs, or goes on with what was there before."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device).eval()
        fast = graph(model)
        for i, n in enumerate(SIZES):
            yield fast(rand(i, n, 4)).round(decimals=3)

    side_by_side(program, device, captures=3, buckets=BATCH)


def test_padding_writes_no_slot(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang/pull/1469

    Padded rows of a batch write to the cache, at the slot that stale metadata names."""

    def program(graph: Any) -> Iterator[Any]:
        cache = torch.zeros(20, 4, device=device)

        def write(x: Tensor, slots: Tensor) -> Tensor:
            cache[slots] = x
            return cache[slots] + 1

        fast = graph(write)
        for i, n in enumerate(SIZES):
            yield fast(rand(i, n, 4), torch.arange(n, device=device) + i), cache.clone()

    right_or_refused(program, device, "OL140", buckets=BATCH)


def test_a_sum_over_the_requests(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang/pull/1789

    `seq_lens_sum` counts padded requests, or does not."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x, lengths: x / lengths.sum())
        for i, n in enumerate(SIZES):
            yield fast(rand(i, n, 4), torch.arange(n, device=device) + 1)

    right_or_refused(program, device, "OL140", buckets=BATCH)


def test_positions_of_the_last_batch(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang/pull/24401

    Positions beyond the batch are those of a larger batch before it, out of range."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        table = nn.Embedding(10, 4).to(device)
        fast = graph(lambda x, positions: x * table(positions))
        for i, n in enumerate(SIZES):
            yield fast(rand(i, n, 4), torch.arange(n, device=device) + i % 3)

    side_by_side(program, device, captures=3, buckets=BATCH)


def test_scores_below_the_mask(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/issues/28131

    What is batch-invariant in eager is not in a padded graph: here scores below the mask value."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x, mask: x.masked_fill(mask == 0, -1e4).amax(0))
        for i, n in enumerate(SIZES * 2):
            low = -3e5 if i > 10 else 1.0
            yield fast(rand(i, n, 4).abs() * low, torch.ones(n, 1, device=device))

    buckets = ol.Buckets(dim=0, sizes=(2, 4, 8), pad={"mask": 0})
    right_or_refused(program, device, "OL140", buckets=buckets)


def test_lengths_that_are_masked(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang/pull/1094

    Padding of the sequence length: an illegal access, or attention to what is padded."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        qkv = nn.Linear(8, 24).to(device)

        def attend(x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = qkv(x).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None] > 0)

        fast = graph(attend)
        for i, n in enumerate([5, 8, 11, 16, 3, 9, 5, 12, 7]):
            mask = torch.ones(2, n, device=device)
            mask[1, n // 2 + 1 :] = 0
            yield fast(rand(i, 2, n, 8), mask).round(decimals=3)

    buckets = ol.Buckets(dim=1, sizes=(8, 16), pad={"mask": 0})
    side_by_side(program, device, captures=2, buckets=buckets)


def test_statistics_of_a_padded_batch(device: torch.device, rand: Rand) -> None:
    """https://github.com/LibreYOLO/libreyolo/pull/671

    BatchNorm in training mode sees the padded rows."""

    def program(graph: Any) -> Iterator[Any]:
        norm = nn.BatchNorm1d(4).to(device)
        fast = graph(norm)
        for i, n in enumerate([3, 8, 5, 2, 7, 4, 6, 8, 3, 5, 2, 7]):
            yield fast(rand(i, n, 4)).detach(), [t.clone() for t in norm.state_dict().values()]

    right_or_refused(program, device, "OL140", buckets=BATCH)


def test_a_loss_over_rows_that_count(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/physicsnemo-sym/issues/279

    A mean over the batch, whose number of rows changes, in training."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i, n in enumerate(SIZES):
            model.zero_grad()
            loss = fast(rand(i, n, 4)).square().sum() / n
            loss.backward()
            yield (
                loss.detach().round(decimals=3),
                [p.grad.round(decimals=2) for p in model.parameters()],
            )

    right_or_refused(program, device, "OL140", buckets=BATCH)


@pytest.mark.parametrize("norm", [F.instance_norm, F.layer_norm])
def test_images_of_several_sizes(device: torch.device, rand: Rand, norm: Any) -> None:
    """https://github.com/sgl-project/sglang/pull/19516

    Images of any width and height: padding them costs, or changes what is normalised over them."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            y = norm(x) if norm is F.instance_norm else norm(x, x.shape[-1:])
            return F.interpolate(y, scale_factor=2, mode="nearest")

        fast = graph(forward)
        for i, n in enumerate([6, 8, 5, 7, 8, 6, 5]):
            yield fast(rand(i, 1, 2, n, 8))

    right_or_refused(program, device, "OL140", buckets=ol.Buckets(dim=2, sizes=(8,)))


def test_more_than_the_largest(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/pull/28579

    A batch above the largest captured size runs in eager; which is it, and is it right?"""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device).eval()
        fast = graph(model)
        for i, n in enumerate([3, 8, 12, 17, 5, 20, 8, 9]):
            yield fast(rand(i, n, 4)).round(decimals=3)

    buckets = ol.Buckets(dim=0, sizes=(2, 4, 8), overflow="chunk")
    side_by_side(program, device, buckets=buckets)
    with pytest.warns(ol.GraphWarning, match="OL310"):
        side_by_side(program, device, replayed=0, buckets=BATCH)
