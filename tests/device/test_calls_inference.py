"""Inference mode, in which no autograd takes an operation apart before a mode sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, drop_in, drop_in_worlds, replays

COMPOSITES: dict[str, Callable[[Tensor], Any]] = {
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "bicubic to a size": lambda x: F.interpolate(x, (7, 13), mode="bicubic", align_corners=True),
    "bilinear": lambda x: F.interpolate(x, size=(13, 5), mode="bilinear", antialias=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
    "norms": lambda x: (F.instance_norm(x), F.group_norm(x, 3), F.layer_norm(x, (9,))),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x * 2, is_causal=True),
    "products": lambda x: (torch.einsum("bchw,bcwk->bchk", x, x), x @ x, torch.tensordot(x, x, 4)),
    "convolution": lambda x: F.conv2d(x, x[:1, :, :3, :3], padding="same"),
    "moments": lambda x: (*torch.std_mean(x, 1), x.var(0), F.cosine_similarity(x, x + 1)),
    "loss": lambda x: (F.cross_entropy(x, x.softmax(1)), F.huber_loss(x, x * 2)),
    "activations": lambda x: (F.gelu(x), F.softplus(x), F.selu(x), F.logsigmoid(x), F.glu(x, 0)),
    "pads": lambda x: F.pad(x, (1, 2, 1, 1), mode="reflect"),
    "chunks": lambda x: [part * 2 for part in (*x.chunk(2, -1), *torch.chunk(x[0], 5))],
    "narrowed": lambda x: (x.narrow(2, 1, 4) + 1, x.narrow_copy(0, 1, 1) + 1),
    "parts": lambda x: [
        part + 1
        for way in (torch.hsplit, torch.vsplit, torch.dsplit, torch.tensor_split)
        for part in way(x[:, :2, :8, :8], 2)
    ],
    "rearranged": lambda x: (
        x.movedim(1, 3) + 1,
        x.swapaxes(0, 1) + 1,
        x.unflatten(1, (3, 1)) + 1,
        x.diagonal(dim1=2, dim2=3) + 1,
        x.unfold(2, 3, 2) + 1,
        x.mT + 1,
        x.ravel() + 1,
        x.expand_as(x) + 1,
        x.select(1, 2) + 1,
        torch.atleast_3d(x[0, 0]) + 1,
    ),
}


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("inside", [False, True], ids=["given", "inference tensors"])
def test_composite_operations(rand: Rand, name: str, inside: bool) -> None:
    def f(x: Tensor) -> Any:
        return COMPOSITES[name](x + 0 if inside else x)

    drop_in_worlds(lambda: (f, lambda i: (rand(i, 2, 3, 9, 9),)), mode=torch.inference_mode)


def test_dropout(rand: Rand) -> None:
    fast = ol.graph(lambda x: F.dropout(x, 0.5), warmup=1)
    with torch.inference_mode():
        for i in range(5):
            torch.manual_seed(i)
            expected = F.dropout(rand(i, 20), 0.5)
            torch.manual_seed(i)
            assert_same(fast(rand(i, 20)), expected)
    assert replays(fast) == 4


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_gated_layers(device: torch.device, rand: Rand, kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = kind(4, 5, num_layers=2, bidirectional=True, device=device)
    drop_in_worlds(lambda: (model, lambda i: (rand(i, 6, 2, 4),)), mode=torch.inference_mode)


def test_statistics_that_a_composite_moves_are_put_back(device: torch.device, rand: Rand) -> None:
    """A capture ahead of the calls sees what `batch_norm` writes, which its schema does not say."""
    model, expected = (nn.BatchNorm2d(3, device=device) for _ in range(2))
    fast = ol.graph(model, warmup=1)
    with torch.inference_mode():
        fast.capture(rand(0, 2, 3, 4, 4))
        assert_same(dict(model.state_dict()), dict(expected.state_dict()))
        for i in range(3):
            assert_same(fast(rand(i, 2, 3, 4, 4)), expected(rand(i, 2, 3, 4, 4)))
            assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert replays(fast) == 3


def test_statistics_that_move_in_an_inner_inference_mode(device: torch.device, rand: Rand) -> None:
    """A capture puts them back after that mode has ended, and they are ordinary tensors."""
    model, expected = (nn.BatchNorm2d(3, device=device) for _ in range(2))

    @ol.graph
    def fast(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(x)

    for i in range(6):
        with torch.inference_mode():
            right = expected(rand(i, 2, 3, 4, 4))
        assert torch.equal(fast(rand(i, 2, 3, 4, 4)), right)
        assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert replays(fast) > 0


@pytest.mark.parametrize("batch_first", [False, True])
def test_products_of_views_of_a_parameter(
    device: torch.device, rand: Rand, batch_first: bool
) -> None:
    """Such views require grad in eager, and a product of strided tensors is then made otherwise."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=batch_first, device=device)

    def f(x: Tensor) -> Any:
        return attention(x[:, :1] if batch_first else x[:1], x, x)

    drop_in_worlds(lambda: (f, lambda i: (rand(i, 2, 16, 32),)), mode=torch.inference_mode)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda t: t.chunk(2, -1),
    "chunk of a chunk": lambda t: t.chunk(2, -1)[1].chunk(2),
    "narrow": lambda t: t.narrow(1, 1, 2),
    "transposed": lambda t: t.mT.chunk(2),
    "split": lambda t: t.tensor_split(2, -1),
    "unbound": lambda t: t.unbind(),
    "reshaped": lambda t: t.reshape(-1),
}


@pytest.mark.parametrize("kind", ["buffer", "parameter", "view", "argument"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_in_inference_mode_of_tensors_from_outside(rand: Rand, name: str, kind: str) -> None:
    """Of an image model's rotary embedding: `chunk` and `narrow` come undone in that mode alone."""
    table = {"parameter": nn.Parameter(rand(1, 4, 6)), "view": rand(1, 8, 6)[:4]}.get(kind)
    table = rand(1, 4, 6) if table is None else table

    def f(x: Tensor, t: Tensor) -> Any:
        views = VIEWS[name](t if kind == "argument" else table)
        found = views if isinstance(views, tuple) else (views,)
        return sum((v.sin().sum() for v in found), x), found[-1]

    drop_in(f, lambda i: (rand(i, 2), rand(i, 4, 6)), mode=torch.inference_mode)
