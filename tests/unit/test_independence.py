"""What padding reaches, program by program: right rows pass, and a refusal names the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelaunch.driver.distance import close
from onelaunch.errors import CaptureError
from onelaunch.padding.taint.mode import TaintMode
from onelaunch.padding.taint.trace import Trace
from onelaunch.sizes.buckets import Buckets
from onelaunch.sizes.dims import SizeLink
from tests.unit.padded import Program, proof


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def first(_: int) -> tuple[SizeLink, ...]:
    return (SizeLink(0, 0, 1, 0),)


WEIGHT = torch.eye(6) * 2

PASS: dict[str, Program] = {
    "elementwise": lambda x: torch.where(x > 0, x.relu() * 2, x.exp()) ** 2,
    "sum over features": lambda x: x.sum(1),
    "softmax over features": lambda x: x.softmax(-1),
    "norm of a row": lambda x: x / x.norm(dim=1, keepdim=True),
    "linear": nn.Linear(6, 3),
    "layer norm": nn.LayerNorm(6),
    "batch norm in eval": nn.BatchNorm1d(6).eval(),
    "dropout in eval": nn.Dropout().eval(),
    "positions": lambda x: x + torch.arange(x.shape[0])[:, None],
    "running sum": lambda x: x.cumsum(0),
    "sort of each row": lambda x: x.sort(1)[0],
    "there and back": lambda x: x.flip(0).flip(0),
    "reshaped": lambda x: x.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6),
    "scatter into columns": lambda x: torch.zeros_like(x).index_put((torch.arange(len(x)),), x),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "its own product": lambda x: (x[:, None, :] @ x[:, :, None])[:, 0],
    "masked mean": lambda x: torch.zeros(len(x), 6).masked_fill(x > 0, 1.0),
    "gathered columns": lambda x: x.gather(1, torch.zeros(len(x), 2, dtype=torch.int64)),
    "what has no flow, of no rows": lambda x: x @ torch.linalg.inv(WEIGHT),
    "frequencies of each row": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "a constant row": lambda x: x + torch.ones(1, 6).expand(len(x), 6),
}


@pytest.mark.parametrize("name", PASS)
def test_rows_of_their_own_pass(name: str) -> None:
    found = proof(PASS[name], torch.randn(6, 6))
    assert found.follows[0][0] == SizeLink(0, 0, 1, 0)


REFUSE: dict[str, tuple[str, Program]] = {
    "the largest of all": ("amax", lambda x: x - x.amax(0)),
    "mean of all": ("mean", lambda x: x - x.mean(0)),
    "variance of all": ("var|std", lambda x: x / x.std(0)),
    "softmax over rows": ("softmax", lambda x: x.softmax(0)),
    "batch norm in training": ("batch_norm", nn.BatchNorm1d(6)),
    "dropout in training": ("bernoulli|dropout", nn.Dropout()),
    "noise": ("rand", lambda x: x + torch.randn(len(x), 1)),
    "backwards": ("flip", lambda x: x.flip(0)),
    "shifted": ("roll", lambda x: x.roll(1, 0)),
    "the last row": ("select", lambda x: x[-1] * 1),
    "the last rows": ("slice", lambda x: x[-2:] * 1),
    "the second half": ("slice", lambda x: x[len(x) // 2 :] * 1),
    "all pairs, summed": ("sum", lambda x: (x @ x.t()).sum(1)),
    "sorted rows": ("sort", lambda x: x.sort(0)[0]),
    "the number of rows": ("number", lambda x: x * len(x)),
    "the number of rows, counted": ("add", lambda x: x + torch.ones(len(x)).sum()),
    "the number of rows, made": ("full|mul", lambda x: x * torch.full((1,), float(len(x)))),
    "positions from the end": ("arange", lambda x: x + torch.arange(len(x) - 1, -1, -1)[:, None]),
    "places between 0 and 1": ("linspace", lambda x: x + torch.linspace(0, 1, len(x))[:, None]),
    "a branch": ("branches on the size", lambda x: x * 2 if len(x) > 6 else x + 1),
    "a running sum from behind": ("flip|cumsum", lambda x: x.flip(0).cumsum(0).flip(0)),
    "neighbours": (
        "convolution",
        lambda x: F.conv1d(x.t()[:, None], torch.ones(1, 1, 3), padding=1),
    ),
    "a frequency": ("fft", lambda x: torch.fft.rfft(x, dim=0).abs()),
    "a number": ("not a tensor", lambda x: (x * 2, len(x))),
    "a view": ("view", lambda x: x[:, :2]),
}


@pytest.mark.parametrize("name", REFUSE)
def test_what_brings_rows_together_is_refused_by_name(name: str) -> None:
    import re

    words, f = REFUSE[name]
    with pytest.raises(CaptureError) as caught:
        proof(f, torch.randn(6, 6))
    assert caught.value.code == "OL140"
    assert re.search(words, caught.value.what), caught.value.what


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    x = torch.randn(3, 7, 6)
    rows, steps = Buckets(0, (2, 4)), Buckets(1, (4, 8))
    forward, both = kind(6, 4, batch_first=True), kind(6, 4, batch_first=True, bidirectional=True)
    for model in (forward, both):
        assert proof(lambda x, m=model: m(x)[0], x, buckets=rows).follows[0]
    if kind is nn.LSTM:  # the others are an operation for each step, as many as there are steps
        assert proof(lambda x: forward(x)[0] * 1, x, buckets=steps).follows[0]
    for program in (lambda x: both(x)[0] * 1, lambda x: forward(x)[1][0] * 1):
        with pytest.raises(CaptureError):  # from the end on; the last state
            proof(program, x, buckets=steps)


@torch.no_grad()
def test_a_masked_encoder_and_what_size_1_needs() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    x, mask = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)

    def encode(x: Tensor, mask: Tensor) -> Tensor:
        return layer(x, src_key_padding_mask=~mask)

    def buckets(*lengths: int) -> Buckets:
        return Buckets(dim=(0, 1), sizes=((1, 4), lengths), pad={"mask": (None, 0)})

    assert proof(encode, x, mask, buckets=buckets(8)).follows  # by the fused operation
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with pytest.raises(CaptureError, match="branches on the size") as caught:
            proof(encode, x, mask, buckets=buckets(8))
        assert "sizes=(1, ...)" in caught.value.fix
        proof(encode, x, mask, buckets=buckets(1, 8))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


VARYING: dict[str, tuple[str, Program, Tensor]] = {
    "chosen": ("mean", lambda x, y: torch.where(y > 0, x, x.mean(0)), torch.ones(6, 1)),
    "times": ("mean", lambda x, y: x + x.mean(0) * y, torch.zeros(6, 1)),
    "hidden": ("mean", lambda x, y: (x - x.mean(0)).masked_fill(y == 0, 0), torch.zeros(6, 1)),
    "from the end": ("index", lambda x, y: x[y], torch.zeros(6, dtype=torch.int64)),
    "gathered": (
        "mean",
        lambda x, y: torch.cat([x, x - x.mean(0)], 1).gather(1, y),
        torch.zeros(6, 1, dtype=torch.int64),
    ),
}


@pytest.mark.parametrize("name", VARYING)
def test_what_another_call_may_choose_counts(name: str) -> None:
    words, f, y = VARYING[name]
    with pytest.raises(CaptureError, match=words) as caught:
        proof(f, torch.randn(6, 6), y)
    assert caught.value.code == "OL140"


def test_an_index_that_stays_in_its_row() -> None:
    def last(x: Tensor, lengths: Tensor) -> Tensor:
        return x[torch.arange(len(x)), lengths - 1]

    def hot(x: Tensor, _: Tensor) -> Tensor:
        return torch.zeros(len(x), 6).scatter(1, x.argmax(1, keepdim=True), 1.0)

    for f in (last, hot):
        found = proof(f, torch.randn(6, 6), torch.full((6,), 3))
        assert found.follows[0][0] == SizeLink(0, 0, 1, 0)


def test_sizes_of_results_are_told_apart() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.transpose(0, 1) * 1, x.sum(1), x.sum(2), x.reshape(len(x), -1) * 1, x[:, :-1] * 1

    both = Buckets((0, 1), ((2, 4), (2, 4)))
    with pytest.raises(CaptureError, match="sum"):
        proof(f, torch.randn(3, 3, 5), buckets=both)

    def g(x: Tensor) -> tuple[Tensor, ...]:
        return x.transpose(0, 1).contiguous(), x.sum(2), x.reshape(len(x), -1), x[:, :-1] * 1

    found = proof(
        g, torch.randn(3, 3, 5), buckets=Buckets((0, 1), ((2, 4), (2, 4)), independent=True)
    )
    assert found.follows[0] == (SizeLink(0, 1, 1, 0), SizeLink(1, 0, 1, 0))
    assert found.follows[1] == (SizeLink(0, 0, 1, 0), SizeLink(1, 1, 1, 0))
    assert found.follows[2] == (SizeLink(0, 0, 1, 0), SizeLink(1, 1, 5, 0))
    assert found.follows[3] == (SizeLink(0, 0, 1, 0), SizeLink(1, 1, 1, -1))


def spread_over(f: Callable[[Tensor], Any], x: Tensor, padded: Tensor) -> tuple[TaintMode, Any]:
    trace = Trace()
    with torch.no_grad(), trace:
        f(x)
    spread = TaintMode(torch.device("cpu"), trace.steps)
    spread.mark(x, padded, padded)
    with torch.no_grad(), spread:
        result = f(x)
    return spread, result


def test_views_share_what_is_known() -> None:
    x, padded = torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.bool)
    padded[3] = True

    def f(x: Tensor) -> Tensor:
        y = x.t() * 1
        y[0, :].mul_(2)
        y.t().view(-1)[:2] = 0.0
        return y

    spread, y = spread_over(f, x, padded)
    assert not spread.depends(y, (slice(None), slice(0, 3)))
    assert spread.depends(y, (slice(1, 2), slice(3, 4)))


def test_what_is_written_without_a_result_is_not_forgotten() -> None:
    x, padded = torch.randn(4), torch.tensor([False, False, False, True])

    def f(x: Tensor) -> Tensor:
        y = torch.zeros(4)
        torch._foreach_copy_([y], [x])
        return y

    spread, y = spread_over(f, x, padded)
    assert spread.depends(y)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
def test_rows_that_are_not_finite_are_compared_too(dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, dtype=dtype)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    assert proof(lambda x: x * 2, x).follows == [first(1)]
    assert close(x, x.clone())
    for place, value in (((0, 0), 1.0), ((1, 0), float("nan")), ((2, 1), 9.0)):
        other = x.clone()
        other[place] = value
        assert not close(x, other)
        assert not close(other, x)


def test_results_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onelaunch.driver.distance._PIECE", 3)
    x = torch.randn(4, 5)
    for index in range(x.numel()):
        other = x.clone()
        other.view(-1)[index] += 1
        assert not close(x, other)
    assert close(x, x + 1e-4 * torch.randn(4, 5))
