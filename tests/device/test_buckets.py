"""Buckets: a call of any size is the call, whatever size it ran at."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.padding.dry_run import DryRun

from .drop_in import Rand, assert_same, describe, refused, replays

BATCH = ol.Buckets(dim=0, sizes=(2, 4, 8))
BOTH = ol.Buckets(dim=(0, 1), sizes=((2, 4), (8, 16)), pad={"mask": (None, 0)})


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.no_grad():
        yield


def same(got: Any, expected: Any, exact: bool = True) -> None:
    """Equal in all that a caller can see; values but for the rounding of other kernels."""
    if exact:
        assert_same(got, expected)
        return
    for a, b in zip(_listed(got), _listed(expected), strict=True):
        assert describe(a) == describe(b)
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4)


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


class Followed(NamedTuple):
    """A callable that gives what eager gives at each size.

    Attributes:
        arguments: the arguments of a call of n rows.
        sizes: of the calls, each a number of rows or what `arguments` takes.
    """

    f: Callable[..., Any]
    arguments: Callable[[Rand, Any], tuple[Any, ...]] = lambda rand, n: (rand(n, n, 3),)
    buckets: ol.Buckets = BATCH
    exact: bool = True
    sizes: Sequence[Any] = (3, 3, 4, 7, 7, 5, 8)


def follows(case: Followed, rand: Rand) -> Any:
    fast = ol.graph(case.f, buckets=case.buckets, warmup=1)
    for n in case.sizes:
        args, own = case.arguments(rand, n), case.arguments(rand, n)
        same(fast(*args), case.f(*own), case.exact)
        assert_same(args, own)
    assert replays(fast) == len(case.sizes) - len(fast.recordings)
    return fast


class Attention(nn.Module):
    """Self-attention of two heads over (batch, length, 16), as one kernel or by hand."""

    def __init__(self, fused: bool, mask: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.fused, self.mask = fused, mask

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        given: Tensor | None = None
        if self.mask == "boolean":
            given = mask[:, None, None, :] > 0
        elif self.mask == "added":
            given = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        elif self.mask == "-10000":
            given = (1.0 - mask[:, None, None, :].float()) * -10000.0
        elif self.mask == "causal":
            given = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(8)
            if given is not None and given.dtype == torch.bool:
                scores = scores.masked_fill(~given, float("-inf"))
            elif given is not None:
                scores = scores + given
            y = scores.softmax(-1) @ v
        return y.transpose(1, 2).reshape(b, n, 16)


class Encoder(nn.Module):
    """A BERT of one layer by hand: tokens, first token and mean over the real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.register_buffer("positions", torch.arange(64)[None])
        self.norm, self.attention = nn.LayerNorm(16), Attention(True, "boolean")
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(self.tokens(ids) + self.places(self.positions[:, : ids.shape[1]]))
        x = self.norm(x + self.attention(x, mask))
        x = x + self.down(F.gelu(self.up(x)))
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return x, torch.tanh(x[:, 0]), mean


def request(rand: Rand, seed: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = rand(seed, batch, length, dtype=torch.int64)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length - length // 4 :] = 0
    return ids, mask.to(ids.device)


def test_every_size_has_a_recording_and_the_right_result(rand: Rand) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu() * 2, x.sum(1)

    fast = ol.graph(f, buckets=BATCH, warmup=1)
    kept: list[tuple[Any, Any]] = []
    for round_ in range(3):
        for n in range(1, 9):
            x = rand(10 * round_ + n, n, 3)
            before = x.clone()
            got = fast(x)
            same(got, f(x))
            same(x, before)
            kept.append((got, f(x)))
        assert len(fast.recordings) == 3
    for got, expected in kept:
        same(got, expected)
    assert replays(fast) == 21, "one warm-up for each bucket"
    assert fast.stats().captures == 3
    assert fast.stats().sizes == dict.fromkeys(range(1, 9), 3)
    assert fast.stats().padding == pytest.approx(1 - 36 / (2 * 2 + 2 * 4 + 4 * 8))


def test_a_module_of_common_layers(device: torch.device, rand: Rand) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5), nn.LayerNorm(5)]
    model = nn.Sequential(*layers, nn.Softmax(-1)).eval().requires_grad_(False).to(device)
    images, sizes = (lambda rand, n: (rand(n, n, 3, 12, 12),)), (3, 4, 1, 7, 5, 8, 2, 6)
    fast = follows(Followed(model, images, exact=False, sizes=sizes), rand)
    assert len(fast.recordings) == 3


def test_batch_and_length_at_once(device: torch.device, rand: Rand) -> None:
    model = Encoder().eval().requires_grad_(False).to(device)
    fast = ol.graph(model, buckets=BOTH, warmup=1)
    for seed, sizes in enumerate([(3, 11), (4, 16), (1, 5), (2, 9), (4, 8), (3, 12), (1, 16)]):
        ids, mask = request(rand, seed, *sizes)
        same(fast(ids, mask), model(ids, mask), exact=False)
        same(fast(ids, mask=mask), model(ids, mask), exact=False)
    assert fast.stats().sizes[3, 11] == 2


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mask", ["boolean", "added", "-10000", "causal", "none"])
def test_attention(device: torch.device, rand: Rand, fused: bool, mask: str) -> None:
    model = Attention(fused, mask).eval().requires_grad_(False).to(device)
    given = request(rand, 1, 3, 11)[1]
    if mask == "none":
        name = "attention" if fused and device.type != "tape" else "softmax"
        fast = ol.graph(model, buckets=BOTH, warmup=1)
        assert refused(fast, rand(1, 3, 11, 16), given, match=name).code == "OL140"
        return
    arguments = lambda rand, seed: (rand(seed, 3, 11, 16), given)  # noqa: E731
    follows(Followed(model, arguments, BOTH, exact=False, sizes=range(4)), rand)


def sums(x: Tensor, options: dict[str, Tensor], scale: Tensor, *, mask: Tensor) -> Tensor:
    return (x * mask.t()[..., None] * scale + options["bias"]).sum(1)


def attends(x: Tensor, allowed: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ x


def doubles_in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def otherwise(x: Tensor) -> tuple[Tensor, ...]:
    twice = torch.cat([x, x], 1).reshape(-1)  # a multiple of the size
    return x @ x.t(), twice, x[:-1] * 2, x[0] * 1


def triangles(rand: Rand, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    batch, length = sizes
    x = rand(batch, batch, length, 4)
    return x, torch.ones(batch, length, length).tril().bool().to(x.device)


FOLLOWED: dict[str, Followed] = {
    "nothing of an earlier request remains": Followed(
        lambda x: x.sum(0),
        buckets=ol.Buckets(dim=0, sizes=(8,), pad={0: 0}, independent=True),
        exact=False,
        sizes=(8, 5) * 3,
    ),
    "padding repeats a real row": Followed(
        lambda x: x.amin(0),
        lambda rand, seed: (rand(seed, 3, 2) + 5,),
        buckets=ol.Buckets(dim=0, sizes=(8,), independent=True),
        sizes=range(4),
    ),
    "a dimension that an argument has twice": Followed(
        attends,
        triangles,
        buckets=ol.Buckets(
            dim=(0, 1),
            sizes=((4,), (8,)),
            dims={"allowed": (0, (1, 2))},
            pad={"allowed": (None, False)},
        ),
        exact=False,
        sizes=((3, 5), (3, 5), (4, 8), (2, 7)),
    ),
    "a broadcast argument is left alone": Followed(
        lambda x, y: x * y, lambda rand, n: (rand(n, n, 3), rand(1, 1, 3))
    ),
    "an argument written in place": Followed(doubles_in_place),
    "results that follow otherwise": Followed(otherwise, exact=False),
    "channels last": Followed(
        lambda x: x * 2,
        lambda rand, n: (rand(n, n, 3, 4, 4).to(memory_format=torch.channels_last),),
    ),
    "stated outputs and asserted independence": Followed(
        lambda x: (x * 2, x.amax(0)),
        lambda rand, seed: (rand(seed, 3, 2),),
        buckets=ol.Buckets(0, (4,), independent=True, outputs={0: 0, 1: None}),
        sizes=range(3),
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_call_of_each_size_is_the_call(rand: Rand, name: str) -> None:
    follows(FOLLOWED[name], rand)


REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "the largest of the batch": ("amax", lambda x: x - x.amax(0)),
    "mean over the batch": ("mean", lambda x: x.mean(0)),
    "batch norm in training": ("batch_norm", nn.BatchNorm1d(3, affine=False)),
    "the last row": ("select", lambda x: x[-1] * 1),
    "backwards": ("flip", lambda x: x.flip(0)),
    "the size as a number": ("changes with the size", lambda x: x * x.shape[0]),
    "a branch": ("branches on the size", lambda x: x * 2 if x.shape[0] > 6 else x + 1),
    "random rows": ("rand", lambda x: x + torch.rand(x.shape[0], 1).to(x.device)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(device: torch.device, rand: Rand, name: str) -> None:
    words, f = REFUSED[name]
    f = copy.deepcopy(f).to(device) if isinstance(f, nn.Module) else f
    x = rand(1, 5, 3).abs() + 1
    fast = ol.graph(f, buckets=BATCH, warmup=1)
    fast(x)
    state = torch.get_rng_state()
    with pytest.raises(ol.CaptureError, match=words) as caught:
        fast(x)
    assert caught.value.code in ("OL140", "OL103")
    assert torch.equal(torch.get_rng_state(), state)
    eager = ol.graph(f, buckets=BATCH, warmup=1, on_refusal="eager")
    eager(x)
    with pytest.warns(ol.GraphWarning):
        eager(x)


def test_a_refused_callable_is_refused_again_whatever_the_values(rand: Rand) -> None:
    fast = ol.graph(lambda x: x - x.mean(0), buckets=BATCH, warmup=1)
    for n in (5, 3):
        refused(fast, torch.ones_like(rand(1, n, 3)), match="mean")  # which padding does not change
    assert not fast.recordings


def test_a_refusal_names_the_line(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        return y - y.amax(0)  # the line

    error = refused(ol.graph(f, buckets=BATCH, warmup=1), rand(1, 3, 3))
    assert "# the line" in str(error.where)
    assert "result 0" in error.what
    assert "independent=True" in error.fix


def test_batch_norm_that_goes_to_training(device: torch.device, rand: Rand) -> None:
    model = nn.BatchNorm1d(3).eval().requires_grad_(False).to(device)
    fast = ol.graph(model, buckets=BATCH, warmup=1)
    x = rand(1, 3, 3)
    for _ in range(3):
        same(fast(x), model(x), exact=False)
    before = copy.deepcopy(model.state_dict())
    fast.train()
    model(x)
    fast.load_state_dict(before)
    fast(x)  # its warm-up, at its own size
    expected = copy.deepcopy(model.state_dict())
    with pytest.raises(ol.CaptureError, match="batch_norm"):
        fast(x)
    same(dict(model.state_dict()), dict(expected))


def test_above_the_largest(rand: Rand) -> None:
    f, x = torch.tanh, rand(1, 19, 3)
    eager = ol.graph(f, buckets=BATCH)
    said = r'OL310\] such calls run eagerly: .* size 19, above 8\n[\s\S]*overflow="chunk"'
    with pytest.warns(ol.GraphWarning, match=said):
        same(eager(x), f(x))
    strict = ol.graph(f, buckets=ol.Buckets(0, (2, 4, 8), overflow="raise"))
    with pytest.raises(ol.ReplayError, match="OL210"):
        strict(x)
    pieces = ol.graph(f, buckets=ol.Buckets(0, (2, 4, 8), overflow="chunk"), warmup=1)
    for _ in range(3):
        same(pieces(x), f(x))
    assert replays(pieces) >= 5
    rows = x.shape[0]
    assert pieces.stats().sizes == {rows: 3}, "what was called, not what became of it"
    whole, rest = divmod(rows, 8)
    bucket = next(size for size in (2, 4, 8) if size >= rest)
    assert pieces.stats().padding == pytest.approx(1 - rows / (8 * whole + bucket))


def test_the_padding_of_a_pool(rand: Rand) -> None:
    pool = ol.Pool()
    assert pool.stats().padding == 0
    first = ol.graph(lambda x: x * 2, buckets=ol.Buckets(0, (8,)), warmup=1, pool=pool)
    second = ol.graph(lambda x: x + 2, buckets=ol.Buckets(0, (4,)), warmup=1, pool=pool)
    exact = ol.graph(lambda x: x - 2, warmup=1, pool=pool)
    for _ in range(2):
        for each, n in ((first, 2), (second, 3), (exact, 5)):
            each(rand(1, n, 3))
    second(rand(1, 4, 3))
    assert (first.stats().bucket_rows, second.stats().bucket_rows) == (16, 12)
    assert pool.stats().padding == pytest.approx(1 - (4 + 6 + 4) / (16 + 12))


def test_two_dimensions_above_the_largest(rand: Rand) -> None:
    buckets = ol.Buckets((0, 1), ((2, 4), (8, 16)), overflow="chunk")
    fast = ol.graph(lambda x: x * 2, buckets=buckets, warmup=1)
    x = rand(1, 5, 17)
    with pytest.warns(ol.GraphWarning, match="size 5 x 17, above 4 x 16") as caught:
        same(fast(x), x * 2)
    text = str(caught[0].message)
    assert "overflow" not in text
    assert "0 and 1 are above" in text
    with pytest.raises(ol.ReplayError, match="no bucket for size 5 x 17"):
        fast.capture(x)


def test_pieces_of_a_module_whose_mode_changes(rand: Rand) -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x * 2

    model = Centred().eval()
    fast = ol.graph(model, buckets=ol.Buckets(0, (3, 4), overflow="chunk"), warmup=1)
    for seed in range(3):
        x = rand(seed, 8, 3)
        same(fast(x), x * 2)
    fast.train()
    with pytest.raises(ol.CaptureError, match="OL140"):
        fast(rand(4, 8, 3))
    fast.eval()
    x = rand(5, 8, 3)
    same(fast(x), x * 2)


def test_pieces_of_many_signatures_are_bounded(rand: Rand) -> None:
    """Each is shown to be right by runs of its own, and remembered."""
    buckets = ol.Buckets(0, (2,), overflow="chunk")
    fast = ol.graph(lambda x, k: x * k, buckets=buckets, warmup=1, max_recordings=1)
    x = rand(0, 3, 2)

    def call_all() -> None:
        for k in range(7):
            same(fast(x, k), x * k)

    with pytest.warns(ol.GraphWarning, match="OL301|OL310"):
        call_all()
    assert len(fast._chunks.kept) == 4
    assert fast.stats().eager_calls >= 3
    fast.reset()
    assert not fast._chunks.kept


def test_pieces_that_depend_on_each_other_are_refused(rand: Rand) -> None:
    buckets = ol.Buckets(0, (2, 4, 8), overflow="chunk")
    fast = ol.graph(lambda x: x.cumsum(0), buckets=buckets, warmup=1)
    for seed in range(3):  # padding at the end does not matter to it
        x = rand(seed, 5, 2)
        same(fast(x), x.cumsum(0), exact=False)
    with pytest.raises(ol.CaptureError, match="cumsum"):
        fast(rand(1, 19, 2))


def test_pieces_that_are_refused_run_eagerly_where_that_is_asked_for(
    rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def f(x: Tensor) -> Tensor:
        return x - x.mean(0)

    runs = itertools.count()
    run = DryRun.run

    def counted(self: DryRun, inputs: Any, mode: Any) -> Any:
        next(runs)
        return run(self, inputs, mode)

    monkeypatch.setattr(DryRun, "run", counted)
    buckets = ol.Buckets(0, (2, 4), overflow="chunk")
    fast = ol.graph(f, buckets=buckets, warmup=1, on_refusal="eager")
    x = rand(1, 9, 3)
    with pytest.warns(ol.GraphWarning, match="OL140.*mean") as caught:
        same(fast(x), f(x))
    assert len(caught) == 1
    proving = next(runs)
    for seed in range(3):
        same(fast(rand(seed, 9, 3)), f(rand(seed, 9, 3)))
    assert next(runs) == proving + 1, "it is shown once"
    assert fast.stats().eager_calls == 4
    fast.reset()
    with pytest.warns(ol.GraphWarning, match="OL140"):
        fast(x)


@pytest.mark.parametrize("asserted", [False, True])
def test_what_happens_once_for_each_piece_is_refused(rand: Rand, asserted: bool) -> None:
    counter = torch.zeros_like(rand(1, 1))

    def counts(x: Tensor, y: Tensor) -> Tensor:
        return x + counter.add_(1)

    def writes(x: Tensor, y: Tensor) -> Tensor:
        return x + y.add_(1)

    def draws(x: Tensor, y: Tensor) -> Tensor:
        return x + torch.rand_like(y)

    buckets = ol.Buckets(
        0, (2, 4), dims={1: None}, overflow="chunk", independent=asserted, outputs={0: 0}
    )
    for f in (counts, writes, draws):
        fast = ol.graph(f, buckets=buckets, warmup=1)
        y = rand(2, 3)
        before, count = y.clone(), counter.clone()
        with pytest.raises(ol.CaptureError, match="chunks") as caught:
            fast(rand(1, 9, 3), y)
        assert caught.value.code == "OL140"
        same((y, counter), (before, count))


def test_no_rows(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, buckets=BATCH, warmup=1)
    for n in (3, 0, 3, 0):
        x = rand(n, n, 3)
        same(fast(x), x * 2)
    found = fast.stats()
    assert (found.sizes, found.replays, found.eager_calls) == ({3: 2, 0: 2}, 1, 2)


def test_dimensions_and_padding_by_argument(rand: Rand) -> None:
    buckets = ol.Buckets(
        dim=0,
        sizes=(4, 8),
        dims={"x": 1, "mask": 0, "scale": None, "args[1]['bias']": None},
        pad={"mask": 0},
        independent=True,
    )
    fast = ol.graph(sums, buckets=buckets, warmup=1)
    for n in (3, 3, 7, 7, 8, 4, 1, 6):
        x, bias, scale = rand(n, 2, n, 5), {"bias": torch.zeros_like(rand(1, 5))}, rand(2, 5)
        mask = torch.ones_like(rand(1, n, 2))
        same(fast(x, bias, scale, mask=mask), sums(x, bias, scale, mask=mask), exact=False)
    assert len(fast.recordings) == 2


def test_arguments_that_do_not_agree(rand: Rand) -> None:
    fast = ol.graph(lambda x, y: x[:3] * y[:3], buckets=BATCH)
    with pytest.raises(ol.GraphError, match=r"`args\[0\]` has 3 rows and `args\[1\]` 4"):
        fast(rand(1, 3, 2), rand(2, 4, 2))
    eager = ol.graph(lambda x, y: x[:3] * y[:3], buckets=BATCH, on_refusal="eager")
    x, y = rand(1, 3, 2), rand(2, 4, 2)
    with pytest.warns(ol.GraphWarning, match="OL402") as caught:
        same(eager(x, y), x * y[:3])
    same(eager(x, y), x * y[:3])
    assert len(caught) == 1
    assert eager.stats().eager_calls == 2


def test_a_result_that_is_an_argument(rand: Rand) -> None:
    fast = ol.graph(lambda x: (x, x * 2), buckets=BATCH, warmup=1)
    for _ in range(3):
        x = rand(1, 3, 3)
        first, second = fast(x)
        assert first is x
        same(second, x * 2)


def test_a_slice_of_something_longer(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, buckets=ol.Buckets(dim=1, sizes=(4, 8)), warmup=1)
    whole = rand(1, 2, 9, 3)
    for n in (3, 3, 4, 7, 7):
        same(fast(whole[:, :n]), whole[:, :n] * 2)


@pytest.mark.parametrize("asserted", [False, True])
@pytest.mark.parametrize("stated", [None, 1])
def test_outputs_stated_wrong_are_refused(rand: Rand, stated: int | None, asserted: bool) -> None:
    buckets = ol.Buckets(0, (1, 4), independent=asserted, outputs={0: stated})
    fast = ol.graph(lambda x: x + 1, buckets=buckets, warmup=1)
    error = refused(fast, rand(1, 3, 5), match="result 0 is ")
    assert error.code == "OL140"
    assert "outputs" in error.fix


@pytest.mark.parametrize("outputs", [{3: 0}, {1: None}, {-1: 0}, {0: 7}])
@pytest.mark.parametrize("overflow", ["eager", "chunk"])
def test_outputs_of_what_there_is_not(rand: Rand, outputs: Any, overflow: Any) -> None:
    buckets = ol.Buckets(0, (1, 4), outputs=outputs, overflow=overflow)
    fast = ol.graph(lambda x: x + 1, buckets=buckets, warmup=1, on_refusal="eager")
    for n in (3, 9) if overflow == "chunk" else (3,):
        x = rand(1, n, 5)
        if n == 3:
            same(fast(x), x + 1)
        with pytest.raises(ol.GraphError, match="outputs names") as caught:
            fast(x)
        assert caught.value.code == "OL401"


def test_a_position_names_a_keyword_too(rand: Rand) -> None:
    def f(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    fast = ol.graph(f, buckets=ol.Buckets(0, (8,), dims={1: None}), warmup=1)
    for n in (3, 3, 4):
        x, scale = rand(n, n, 4), rand(1, 4)
        same(fast(x, scale=scale), f(x, scale))
    assert replays(fast) == 2


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, -math.inf),
        (torch.int64, 2**70),
        (torch.float32, 2**70),
        (torch.float16, 1e60),
        (torch.bfloat16, 1e39),
        (torch.int32, 0.5),
        (torch.int32, math.nan),
        (torch.uint8, -1),
        (torch.bool, 2),
    ],
)
def test_a_fill_that_an_argument_cannot_hold(rand: Rand, dtype: torch.dtype, value: float) -> None:
    buckets = ol.Buckets(0, (1, 4), pad={"x": value})
    fast = ol.graph(lambda x: x * 2, buckets=buckets, warmup=1)
    with pytest.raises(ol.GraphError, match=f"pad fills .*{dtype}") as caught:
        fast(rand(1, 3, 2).to(dtype))
    assert caught.value.code == "OL401"


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, 3.0),
        (torch.float16, -math.inf),
        (torch.float32, math.nan),
        (torch.float16, 65504),
        (torch.uint8, 255),
        (torch.bool, 1),
        (torch.complex64, 3),
        (torch.float32, True),
    ],
)
def test_a_fill_that_an_argument_can_hold(rand: Rand, dtype: torch.dtype, value: float) -> None:
    buckets = ol.Buckets(0, (1, 4), pad={"x": value})
    arguments = lambda rand, seed: (rand(seed, 3, 2).to(dtype),)  # noqa: E731
    follows(Followed(torch.clone, arguments, buckets, sizes=range(3)), rand)


def test_an_example_without_rows(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, buckets=BATCH)
    with pytest.raises(ol.GraphError, match="no rows") as caught:
        fast.warm_up([rand(1, 0, 8)])
    assert caught.value.code == "OL401"


def test_all_ahead(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(3, 2).requires_grad_(False).to(device)
    fast = ol.graph(model, buckets=BATCH)
    fast.warm_up([rand(1, 3, 3)])
    assert [r.spec.tensors[0].shape[0] for r in reversed(fast.recordings)] == [8, 4, 2]
    for n in range(1, 9):
        x = rand(n, n, 3)
        same(fast(x), model(x), exact=False)
    assert replays(fast) == 8, "no call warmed up"
    fast.reset()
    assert not fast.recordings
    assert not fast.stats().sizes
    assert len(copy.deepcopy(fast).recordings) == 0


def test_all_buckets_share_what_looks_at_the_state(device: torch.device, rand: Rand) -> None:
    """One guard, for as long as the state is one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout()).requires_grad_(False).to(device).eval()
    fast: Any = ol.graph(model, buckets=BATCH)
    fast.warm_up([rand(1, 3, 3)])
    assert len({id(e.captured.guard) for e in fast.__graphed__._table.entries}) == 1
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data * 2
    for n in range(1, 9):
        x = rand(n, n, 3)
        same(fast(x), model(x), exact=False)


def test_a_later_bucket_is_compared_at_one_size_only(
    rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = DryRun.run

    def counted(self: DryRun, inputs: Any, mode: Any) -> Any:
        sizes.append(inputs[0].shape[0])
        return run(self, inputs, mode)

    monkeypatch.setattr(DryRun, "run", counted)

    def f(x: Tensor) -> Tensor:
        return x[:-1] * 2

    fast = ol.graph(f, buckets=ol.Buckets(0, (4, 8, 16)))
    fast.warm_up([rand(1, 3, 3)])
    assert sizes == [9, 16, 15, 16, 5, 8, 1, 4], "the first bucket at both of its ends"
    for n in range(1, 17):
        x = rand(n, n, 3)
        same(fast(x), f(x))


def test_the_runs_of_the_proof_warm_a_bucket_up(rand: Rand) -> None:
    runs = itertools.count()  # which no walk of the state looks into

    def f(x: Tensor) -> Tensor:
        next(runs)
        return x * 2

    fast = ol.graph(f, buckets=ol.Buckets(0, (1, 4, 8)))
    with torch.no_grad():
        fast.warm_up([rand(1, 3, 3)])
        first, later, exact = 4 + 1, 2 + 1, 1 + 1
        assert next(runs) == first + later + exact, "each bucket's last is its capture"
        for n in range(1, 9):
            x = rand(n, n, 3)
            same(fast(x), x * 2)
    assert next(runs) == first + later + exact + 1


def test_a_bucket_is_not_captured_ahead_of_lasting_state(rand: Rand) -> None:
    seen: dict[str, Any] = {}

    def f(x: Tensor) -> Tensor:
        seen["last"] = x.shape[0]
        return x * 2

    fast = ol.graph(f, buckets=BATCH)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(ol.CaptureError, match="OL110"):
            fast.warm_up([rand(1, 3, 3)])
        assert not seen


def test_a_branch_in_a_later_bucket_is_refused(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * (2 if x.shape[0] > 6 else 3), buckets=BATCH, warmup=1)
    for _ in range(2):
        x = rand(1, 2, 3)
        same(fast(x), x * 3)
    refused(fast, rand(1, 5, 3), match="changes with the size")


def test_other_signatures_get_recordings_too(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, buckets=BATCH, warmup=1)
    for dtype in (torch.float32, torch.float64):
        for n in (3, 3, 4, 3):
            x = rand(n, n, 2, dtype=dtype)
            same(fast(x), x * 2)
    assert len(fast.recordings) == 2
    strict = ol.graph(lambda x: x * 2, buckets=BATCH, warmup=1, on_mismatch="raise")
    for n in (3, 3, 7, 7):
        strict(rand(n, n, 2))
    with pytest.raises(ol.ReplayError, match="dtype"):
        strict(rand(3, 3, 2, dtype=torch.float64))


def test_stored_state_of_the_padded_size_is_refused(rand: Rand) -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last + 1

    module = Keeps()
    fast = ol.graph(module, buckets=BATCH, warmup=1)
    fast(rand(1, 3, 2))
    kept = module.last
    with pytest.raises(ol.CaptureError, match="`last`"):
        fast(rand(1, 3, 2))
    assert module.last is kept


def test_sizes_that_are_new_to_a_recorded_bucket(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They find its recording by their bucket, without another look at the arguments."""
    buckets = ol.Buckets(dim=(0, 1), sizes=((4, 8), (4, 8)))
    fast: Any = ol.graph(lambda x: x * 2, buckets=buckets, warmup=1)
    with torch.no_grad():
        for _ in range(4):
            fast(torch.ones(7, 7, device=device))
        slow = fast._recorded_or_eager
        monkeypatch.setattr(fast, "_recorded_or_eager", None)
        for rows, length in ((5, 6), (8, 8), (6, 7), (5, 6)):
            x = torch.randn(rows, length, device=device)
            assert torch.equal(fast(x).cpu(), x.cpu() * 2)
        monkeypatch.setattr(fast, "_recorded_or_eager", slow)
        assert fast(torch.ones(0, 6, device=device)).shape == (0, 6)
        assert torch.equal(fast(torch.ones(3, 6, device=device)).cpu(), torch.full((3, 6), 2.0))
    assert fast.stats().sizes[5, 6] == 2
