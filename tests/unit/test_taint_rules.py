"""Each rule against its operation: what it says does not depend on padding keeps its bits, whatever
the padding holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.padding.taint.mode import TaintMode
from onelaunch.padding.taint.shadow import PADDED, UNKNOWN
from onelaunch.padding.taint.trace import Trace
from tests.unit.padded import proof

Operation = Callable[..., Any]
INDEX = torch.tensor([0, 2, 2, 3])
ORDER = torch.tensor([[2, 0, 1, 3, 5, 4]] * 6)
EDGES = torch.tensor([-1.0, 0.0, 1.0])


def spd(x: Tensor) -> Tensor:
    return x @ x.mT + 4 * torch.eye(x.shape[-1])


def x2() -> Tensor:
    return torch.randn(6, 6)


def x3() -> Tensor:
    return torch.randn(6, 4, 4)


def image() -> Tensor:
    return torch.randn(3, 4, 6, 6)


OPERATIONS: dict[str, tuple[Operation, Callable[[], Tensor]]] = {
    "product": (lambda x: x * x.relu(), x2),
    "where": (lambda x: torch.where(x > 0, x, -x), x2),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 1.0), x2),
    "masked_fill_": (lambda x: x.clone().masked_fill_(x > 0, 1.0), x2),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.2), x2),
    "activations in place": (lambda x: F.selu_(F.elu_(F.leaky_relu_(F.hardtanh_(x * 2)))), x2),
    "magnitudes in place": (lambda x: F.mish((x * 2).abs_(), inplace=True), x2),
    "compared in place": (lambda x: (x * 2).gt_(0.5) + (x * 2).eq_(x.relu()), x2),
    "glu": (lambda x: F.glu(x, 1), x2),
    "glu of rows": (lambda x: F.glu(x, -2), x2),
    "complex": (lambda x: torch.view_as_real(torch.complex(x, x.exp()) * 2), x2),
    "polar": (lambda x: torch.view_as_real(torch.polar(x.abs(), x)), x2),
    "rotated": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(6, 3, 2)) * torch.ones(3) * 1j),
        x2,
    ),
    "bucketize": (lambda x: torch.bucketize(x, EDGES), x2),
    "bucketize by padding": (lambda x: torch.bucketize(torch.ones(3), x[0].sort()[0]), x2),
    "searchsorted": (lambda x: torch.searchsorted(x.sort(1)[0], x), x2),
    "isin": (lambda x: torch.isin(x.long(), torch.tensor([0, 1])), x2),
    "mse": (lambda x: F.mse_loss(x, x.exp(), reduction="none"), x2),
    "mse, one number": (lambda x: F.mse_loss(x, x.exp()), x2),
    "huber": (lambda x: F.huber_loss(x, x.exp(), reduction="none"), x2),
    "bce": (lambda x: F.binary_cross_entropy_with_logits(x, x, reduction="none"), x2),
    "nll": (lambda x: F.nll_loss(x, torch.arange(6), x[0], reduction="none"), x2),
    "nll of ignored": (lambda x: F.nll_loss(x, torch.tensor([1, 2, -100, -100, 0, 1])), x2),
    "nll of places": (lambda x: F.nll_loss(x, ORDER[:, :4] % 4, reduction="none"), x3),
    "fake_quantize": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), x2),
    "sum": (lambda x: x.sum(-1, keepdim=True), x2),
    "mean": (lambda x: x.mean((0, 2)), x3),
    "std": (lambda x: x.std(1, correction=0), x2),
    "median": (lambda x: x.nanmedian(1), x2),
    "topk": (lambda x: x.topk(2, 0), x2),
    "logsumexp": (lambda x: x.logsumexp(-1), x2),
    "softmax": (lambda x: x.tril().masked_fill(torch.ones(6, 6).triu(1) > 0, -1e9).softmax(1), x2),
    "softmax with its mask": (lambda x: x.masked_fill(x > 0, -1e9).softmax(1), x2),
    "cumsum": (lambda x: x.cumsum(-1), x2),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), x2),
    "renorm of columns": (lambda x: x.renorm(1, -1, 1.0), x2),
    "layer norm": (lambda x: F.layer_norm(x, (4,), x[0, 0], x[1, 1]), x3),
    "batch norm": (lambda x: F.batch_norm(x, None, None, x[0], x[1], True), x2),
    "batch norm in eval": (lambda x: F.batch_norm(x, x[0], x[1].abs(), x[2]), x2),
    "instance norm": (lambda x: F.instance_norm(x), image),
    "group norm": (lambda x: F.group_norm(x, 2, x[0, :, 0, 0]), image),
    "mm": (lambda x: x.relu() @ x, x2),
    "addmm": (lambda x: torch.addmm(x[0], x, x.tril()), x2),
    "addr": (lambda x: torch.addr(x, x[0], x[:, 0]), x2),
    "bilinear": (lambda x: F.bilinear(x, x, torch.ones(2, 6, 6), x[0, :2]), x2),
    "cdist": (lambda x: torch.cdist(x, x * 2), x3),
    "cdist of many": (lambda x: torch.cdist(x.repeat(1, 8, 1), x), x3),
    "embedding": (lambda x: F.embedding(ORDER, x), x2),
    "embedding bag": (lambda x: F.embedding_bag(ORDER, x), x2),
    "embedding bag, weighted": (
        lambda x: F.embedding_bag(ORDER, x, per_sample_weights=x, mode="sum"),
        x2,
    ),
    "embedding bag of offsets": (
        lambda x: F.embedding_bag(ORDER[0], x, torch.tensor([0, 0, 4]), mode="max"),
        x2,
    ),
    "inverse": (lambda x: torch.linalg.inv(spd(x)), x3),
    "solution": (lambda x: torch.linalg.solve(spd(x), x[:, :, :2]), x3),
    "solution of vectors": (lambda x: torch.linalg.solve(spd(x[:4]), x[:4, 0]), x3),
    "determinant": (lambda x: torch.linalg.slogdet(spd(x)), x3),
    "cholesky": (lambda x: torch.linalg.cholesky_ex(spd(x)), x3),
    "triangular": (lambda x: torch.linalg.solve_triangular(spd(x).tril(), x, upper=False), x3),
    "exponential": (lambda x: torch.linalg.matrix_exp(x), x3),
    "cross": (lambda x: torch.linalg.cross(x[:, :3], x[:, 1:], dim=1), x3),
    "rfft": (lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)), x2),
    "irfft": (lambda x: torch.fft.irfft2(torch.complex(x, x)), x3),
    "convolution": (
        lambda x: F.conv2d(x, torch.ones(2, 2, 3, 3), x[0, 0, 0, :2], 2, 1, 1, 2),
        image,
    ),
    "convolution of zeros": (lambda x: F.conv2d(x * torch.eye(6), torch.ones(2, 4, 3, 3)), image),
    "transposed": (lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3), None, 2, 1), image),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), image),
    "average pool": (lambda x: F.avg_pool2d(x, 2, 2, divisor_override=-3), image),
    "average pool, without": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        image,
    ),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), image),
    "nearest": (lambda x: F.interpolate(x, size=(4, 9), mode="nearest-exact"), image),
    "bilinear resampling": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), image),
    "antialias": (
        lambda x: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True),
        image,
    ),
    "grid": (lambda x: F.grid_sample(x, x[:, :, :, :2] * 1, align_corners=False), image),
    "affine grid": (lambda x: F.affine_grid(x[:, :2, :3], (6, 1, 4, 4), align_corners=True), x3),
    "unfold": (lambda x: F.unfold(x, 3), image),
    "fold": (lambda x: F.fold(x.repeat(1, 1, 4), (5, 5), 2), x3),
    "pad with NaN": (lambda x: F.pad(x, (1, 1), value=torch.nan), x2),
    "pad": (lambda x: F.pad(x[:, None], (1, 1, 1, 1, 1, 1), mode="replicate"), image),
    "roll": (lambda x: x.roll((1, -2), (0, 1)), x2),
    "diagonal": (lambda x: x.diagonal(1, 1, 2).clone().diag_embed(-1), x3),
    "index_select": (lambda x: x.index_select(-1, INDEX), x2),
    "index_add": (lambda x: x.index_add(1, INDEX, x[:, 2:] * 2), x2),
    "index_add with its places": (lambda x: x.index_add(0, x[0, :4].long() % 6, x[2:] * 2), x2),
    "index_copy": (lambda x: x.index_copy(-1, INDEX[:3], x[:, 3:] * 2), x2),
    "index_fill": (lambda x: x.index_fill(0, INDEX, 1.0), x2),
    "index_fill with": (lambda x: x.index_fill(1, INDEX, x[0, 0]), x2),
    "put where": (lambda x: x.index_put((x > 0,), torch.tensor(2.0)), x2),
    "put rows where": (lambda x: x.index_put((x[:, 0] > 0,), x[0, 0]), x2),
    "put many where": (lambda x: x.index_put((x[0] > -9,), x * 2), x2),
    "scatter": (lambda x: x.scatter(1, ORDER[:, :3], x), x2),
    "scatter_reduce": (lambda x: x.scatter_reduce(0, ORDER, x, "prod", include_self=False), x2),
    "gather": (lambda x: x.gather(0, (x * 2).long() % 6), x2),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), x3),
    "lstm": (
        lambda x: torch.lstm(
            x, [x[:1] * 0, x[:1] * 0], [torch.ones(16, 4), torch.ones(16, 4)],
            False, 1, 0.0, False, False, False,
        ),
        x3,
    ),
}  # fmt: skip


def changed(t: Tensor, where: Tensor, content: str) -> Tensor:
    noise = torch.randn(t.shape) * 10
    value = noise if content == "noise" else torch.full_like(t, float(content))
    return torch.where(where, value, t)


def same(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.bool, torch.int64, torch.int32):
        return a == b
    return torch.isclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def tensors_of(result: Any) -> list[Tensor]:
    listed: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]
    return [t for t in listed if t.numel()]


FINITE = {"mm", "addmm", "convolution of zeros", "attention"}
"""Those that hold a known 0 against padding: 0 times what padding repeats, which is finite where
the real rows are."""


@pytest.mark.parametrize("content", ["nan", "-1e30", "noise"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_a_rule_leaves_out_does_not_matter(name: str, content: str) -> None:
    f, make = OPERATIONS[name]
    if name in FINITE and content == "nan":
        content = "1e3"
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x = make()
            padded = torch.rand(x.shape) < (0.04 if seed else 0.2)
            if seed == 3:
                padded = torch.zeros_like(padded)
                padded.select(seed % x.dim(), -1).fill_(True)
            unknown = padded | (torch.rand(x.shape) < (0.5 if seed == 1 else 0.0))
            trace = Trace()
            with trace:
                f(x)
            spread = TaintMode(torch.device("cpu"), trace.steps)
            marked = x.clone()
            spread.mark(marked, padded, unknown)
            with spread:
                results = tensors_of(f(marked))
            assert spread.finish() is None
            varied = changed(x, unknown, "noise")
            once = tensors_of(f(varied))
            try:
                again = tensors_of(f(changed(varied, padded, content)))
            except RuntimeError:  # an index out of range
                continue
            for t, first, one, other in zip(results, tensors_of(f(x)), once, again, strict=True):
                bits = spread._memory.of(t)
                bits = torch.zeros(t.shape, dtype=torch.uint8) if bits is None else bits
                assert bool((same(one, other) | ((bits & PADDED) != 0)).all())
                assert bool((same(first, one) | ((bits & UNKNOWN) != 0)).all())


APART = {
    "bucketize by padding", "batch norm", "mse, one number", "nll", "glu of rows", "topk", "mean",
    "cumsum", "nll of ignored", "layer norm", "batch norm in eval", "group norm", "mm", "addmm",
    "addr", "bilinear", "embedding", "embedding bag", "embedding bag, weighted", "gather",
    "embedding bag of offsets", "convolution", "index_fill", "index_fill with", "renorm of columns",
    "index_add with its places", "put rows where", "put many where", "scatter_reduce", "roll",
    "solution of vectors", "rotated", "scatter", "lstm", "cdist of many",
    "searchsorted", "affine grid", "nll of places", "softmax",
}  # fmt: skip
"""Those above that mix the first dimension, or hold its size in a number."""


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in APART])
def test_rows_pass(name: str) -> None:
    f, make = OPERATIONS[name]
    torch.manual_seed(0)
    x = torch.cat([make(), make()])[:6]
    assert proof(f, x).follows[0][0][:2] == (0, 0)
