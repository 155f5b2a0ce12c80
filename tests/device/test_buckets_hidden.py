"""Padding that a large number hides: each call checks that the number is far below its scores."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, replays

Program = Callable[..., Any]
LEAST = torch.finfo(torch.float32).min
SCALES: dict[str, Program] = {
    "usual": lambda x: x,
    "tiny": lambda x: x * 1e-30,
    "near the number": lambda x: x * 1e3 - 9.5e3,
    "below it": lambda x: x - 3e5,
    "far below it": lambda x: -x.abs() * 1e30,
    "the least": lambda x: x * 0 + LEAST,
    "minus infinity": lambda x: x * 0 - math.inf,
    "not a number": lambda x: torch.where(x > 0.5, math.nan, x),
}


def filled(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x.masked_fill(mask[..., None] == 0, value)


def bias(mask: Tensor, value: float) -> Tensor:
    return (1 - mask) * value if math.isfinite(value) else mask.log()


def added(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x + bias(mask, value)[..., None]


def shares(x: Tensor, mask: Tensor, value: float) -> Tensor:
    scores = (x @ x.mT).masked_fill(mask[:, None, :] == 0, value)
    return scores.softmax(-1) @ x


def attention(x: Tensor, mask: Tensor, value: float) -> Tensor:
    hides = bias(mask, value)[:, None, None, :]
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=hides)


def scaled_after(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return (added(x, mask, value) / 0.5 + x).softmax(1).sum(1)


def by_hand(x: Tensor, mask: Tensor, value: float) -> Tensor:
    weights = added(x, mask, value).exp()
    return (weights * x).sum(1) / weights.sum(1)


def products(x: Tensor, mask: Tensor, value: float) -> Tensor:
    hides = bias(mask, value)[:, None, :].expand(-1, x.shape[1], -1)
    return torch.baddbmm(hides, x, x.mT).softmax(-1) @ x


PROGRAMS: dict[str, Program] = {
    "the largest": lambda x, m, value: filled(x, m, value).amax(1),
    "the largest and its place": lambda x, m, value: filled(x, m, value).max(1),
    "the largest of sums": lambda x, m, value: added(x, m, value).amax(1),
    "a chosen number": lambda x, m, value: torch.where(m[..., None] == 0, value, x).amax(1),
    "a logarithm of a sum": lambda x, m, value: filled(x, m, value).logsumexp(1),
    "logarithms": lambda x, m, value: (
        (filled(x, m, value).log_softmax(1) * m[..., None]).nan_to_num().sum(1)
    ),
    "shares": shares,
    "attention": attention,
    "scaled and added to": scaled_after,
    "a softmax by hand": by_hand,
    "products added": products,
}


def same(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got.cpu(), expected.cpu(), equal_nan=True, rtol=1e-4, atol=1e-4)
    else:
        for a, b in zip(got, expected, strict=True):
            same(a, b)


def calls(rand: Rand) -> list[tuple[Tensor, Tensor]]:
    """Each size of two buckets; in some calls a part is masked, in one a whole row."""
    made: list[tuple[Tensor, Tensor]] = []
    for seed, n in enumerate((3, 3, 6, 6, 2, 5, 7, 8, 1, 3)):
        mask = rand(0, 2, n) * 0 + 1
        if seed % 3 == 1:
            mask[0, (n + 1) // 2 :] = 0
        if seed == 9:
            mask[1] = 0
        made.append((rand(seed, 2, n, 4), mask))
    return made


@pytest.mark.parametrize("value", [-1e4, -1e9, LEAST, -math.inf])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_number_that_hides_padding(rand: Rand, name: str, value: float) -> None:
    def f(x: Tensor, mask: Tensor) -> Any:
        return PROGRAMS[name](x, mask, value)

    fast = ol.graph(f, buckets=ol.Buckets(1, (4, 8), pad={"mask": 0}), warmup=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "OL140|.*number that hides", ol.GraphWarning)
        for number, scale in enumerate(SCALES.values()):
            for x, mask in calls(rand)[:: 3 if number else 1]:
                same(fast(scale(x), mask), f(scale(x), mask))
    assert replays(fast)
    if value == -math.inf:  # which needs no check
        assert fast.stats().eager_calls == 0


def test_a_call_that_fails_the_check_says_so_once(rand: Rand) -> None:
    def largest(x: Tensor, mask: Tensor) -> Tensor:
        return filled(x, mask, -1e4).amax(1)

    fast = ol.graph(largest, buckets=ol.Buckets(1, (4,), pad={"mask": 0}), warmup=1)
    x, mask = rand(1, 2, 3, 4), rand(0, 2, 3) * 0 + 1
    with torch.no_grad():
        for _ in range(3):
            same(fast(x, mask), largest(x, mask))
        assert fast.stats().eager_calls == 0
        with pytest.warns(ol.GraphWarning, match="number that hides"):
            same(fast(x - 3e5, mask), largest(x - 3e5, mask))
        same(fast(x - 3e5, mask), largest(x - 3e5, mask))
    assert fast.stats().eager_calls == 2


@pytest.mark.parametrize("value", [-1e4, -65504.0, -math.inf])
def test_a_call_that_cannot_run_again_is_not_checked(rand: Rand, value: float) -> None:
    """Where a number hides padding, a call that fails the check runs eagerly, after its replay."""
    seen = rand(0, 4) * 0

    def f(x: Tensor, mask: Tensor) -> Tensor:
        seen.add_(1)
        return filled(x, mask, value).amax(1)

    buckets = ol.Buckets(1, (4,), pad={"mask": 0})
    fast = ol.graph(f, buckets=buckets, warmup=1, on_refusal="raise")
    x, mask = rand(1, 2, 3, 4), rand(0, 2, 3) * 0 + 1
    with torch.no_grad():
        fast(x, mask)
        if value == -math.inf:
            for _ in range(3):
                fast(x, mask)
            assert seen.tolist() == [4.0] * 4
            return
        with pytest.raises(ol.CaptureError, match="hides padding") as caught:
            fast(x, mask)
    assert caught.value.code == "OL140"
    fix = 'float("-inf")' if value == -1e4 else "enable_cudnn_sdp(False)"
    assert fix in str(caught.value)


def test_training_where_a_check_fails(device: torch.device, rand: Rand) -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return filled(self.layer(x), mask, -1e4).amax(1)

    eager = Pool().to(device)
    model = copy.deepcopy(eager)
    fast = ol.graph(model, buckets=ol.Buckets(1, (4, 8), pad={"mask": 0}), warmup=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*number that hides", ol.GraphWarning)
        for step, n in enumerate((3, 3, 3, 6, 6, 5, 2, 7)):
            x, mask = rand(step, 2, n, 4), rand(0, 2, n) * 0 + 1
            x = x * 1e6 if step % 3 == 2 else x
            for run, net in ((fast, model), (eager, eager)):
                net.zero_grad()
                run(x, mask).sum().backward()
            for p, q in zip(model.parameters(), eager.parameters(), strict=True):
                assert p.grad is not None
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    assert replays(fast)


class Kept(nn.Module):
    """Attention under a mask of pairs that the module keeps, of booleans or of numbers to add."""

    def __init__(self, boolean: bool) -> None:
        super().__init__()
        self.boolean = boolean
        seen = torch.ones(8, 8, dtype=torch.bool).tril()
        hides = torch.zeros(8, 8).masked_fill(~seen, -math.inf)
        self.register_buffer("mask", seen if boolean else hides)

    def forward(self, x: Tensor) -> Tensor:
        n, scores = x.shape[1], x @ x.mT
        mask = self.mask[:n, :n]
        scores = scores.masked_fill(~mask, -math.inf) if self.boolean else scores + mask
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_kept_mask_changed_in_place(
    device: torch.device, rand: Rand, boolean: bool, inference: bool
) -> None:
    net = Kept(boolean).to(device)
    eager = copy.deepcopy(net)
    fast = ol.graph(net, buckets=ol.Buckets(1, (4, 8)), warmup=1)

    def serve(sizes: tuple[int, ...]) -> None:
        for seed, n in enumerate(sizes):
            with torch.inference_mode() if inference else torch.no_grad():
                same(fast(rand(seed, 2, n, 4)), eager(rand(seed, 2, n, 4)))

    serve((3, 3, 3, 6, 6, 5))
    before = replays(fast)
    net.mask.copy_(eager.mask)  # the same values
    serve((3, 4, 5))
    assert replays(fast) == before + 3
    for model in (net, eager):
        model.mask.fill_(1 if boolean else 0)
    with pytest.warns(ol.GraphWarning, match="mask that `Kept` keeps was changed"):
        serve((3, 2, 6))
    assert replays(fast) == before + 3
    fast.reset()
    with pytest.raises(ol.CaptureError, match="OL140"):
        serve((3, 3))


CONSTANTS: dict[str, Program] = {
    "the largest": lambda scores: scores.amax(-1),
    "the least": lambda scores: scores.amin(-1),
    "the place of the largest": lambda scores: scores.argmax(-1),
    "the first of all sorted": lambda scores: scores.sort(-1)[0][..., 0],
    "the best": lambda scores: scores.topk(1, -1)[0],
    "a product": lambda scores: scores.prod(-1),
    "shares": lambda scores: scores.softmax(-1).sum(-1),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_only_a_longer_run_has(rand: Rand, name: str) -> None:
    """Zeros above a diagonal, of which a longer row has more, and which positive scores hide."""

    def f(x: Tensor) -> Tensor:
        return CONSTANTS[name]((x @ x.mT.abs()).tril())

    fast = ol.graph(f, buckets=ol.Buckets(1, (4, 8)), warmup=1, on_refusal="raise")
    with torch.no_grad(), pytest.raises(ol.CaptureError, match="OL140"):
        fast.capture(rand(1, 2, 3, 4).abs() + 0.1)


@pytest.mark.parametrize("value", [-1e4, -math.inf])
def test_scores_that_a_causal_mask_leaves_below_its_number(rand: Rand, value: float) -> None:
    def f(x: Tensor) -> Tensor:
        n = x.shape[1]
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        return (x @ x.mT - x[..., :1].abs()).masked_fill(future, value).softmax(-1) @ x.relu()

    fast = ol.graph(f, buckets=ol.Buckets(1, (4, 8)), warmup=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*number that hides", ol.GraphWarning)
        for seed, n in enumerate((3, 3, 6, 6, 5, 3, 2, 7, 1)):
            x = rand(seed, 2, n, 4)
            if seed > 3:
                x[:, :, 0] = 1e6 if seed % 2 else 2e4
                x[:, :, 1:] *= 0
                x = -x
            same(fast(x), f(x))
    assert replays(fast)
