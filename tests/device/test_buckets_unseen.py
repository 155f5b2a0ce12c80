"""Buckets of programs whose examples hide what padding does: a proof goes by more than values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.padding.taint.mode import TaintMode

from .drop_in import Rand, replays

Program = Callable[..., Any]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda t: t,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "negative": lambda t: -t.abs(),
}


def right_or_refused(
    f: Program, buckets: ol.Buckets, calls: list[tuple[Tensor, ...]]
) -> str | None:
    """Each call is eager's, or one is refused; the words of the refusal."""
    fast = ol.graph(f, buckets=buckets, warmup=1)
    with torch.no_grad():
        for args in calls:
            expected = f(*args)
            try:
                got = fast(*args)
            except ol.CaptureError as error:
                if error.code == "OL140":
                    return error.what
                raise
            assert got.shape == expected.shape
            torch.testing.assert_close(got.cpu(), expected.cpu())
    assert replays(fast)
    return None


MOVING: dict[str, Program] = {
    "a reshape": lambda x, y: x.reshape(2, -1)[1, 0] * 1,
    "a row": lambda x, y: torch.cat([x, y])[6] * 1,
    "unbind": lambda x, y: torch.cat([x, y]).unbind(0)[6] * 1,
    "gather": lambda x, y: torch.cat([x, y]).gather(
        0, torch.full((1, 4), 6, device=x.device, dtype=torch.int64)
    ),
    "a stride": lambda x, y: torch.cat([x, y])[::9] * 1,
    "diagonal": lambda x, y: torch.cat([x, y]).diagonal(-5) * 1,
    "negative pads": lambda x, y: F.pad(torch.cat([x, y]), (0, 0, -6, 0))[:2] * 1,
    "a strided convolution": lambda x, y: F.conv1d(
        torch.cat([x, y]).t()[None], torch.ones(1, 4, 2, device=x.device, dtype=x.dtype), stride=4
    ),
    "a strided maximum": lambda x, y: F.max_pool1d(torch.cat([x, y]).t()[None], 4)[..., 1] * 1,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MOVING)
def test_elements_that_move_with_the_size_are_refused(rand: Rand, name: str, kind: str) -> None:
    calls = [tuple(KINDS[kind](rand(seed, 6, 4)) for seed in (1, 2)) for _ in range(2)]
    calls += [(rand(3, n, 4), rand(4, n, 4)) for n in (5, 6, 7, 8)]
    if name == "a reshape":
        calls = [pair for pair in calls if len(pair[0]) % 2 == 0]
    assert right_or_refused(MOVING[name], ol.Buckets(0, (4, 8)), calls) is not None


SUMS: dict[str, Program] = {
    "a mean": lambda x, w: x.mean(-1, keepdim=True),
    "a sum": lambda x, w: x.sum(-1, keepdim=True),
    "a product": lambda x, w: x @ w,
    "a product of vectors": lambda x, w: x @ w[0],
    "a batch of products": lambda x, w: torch.bmm(x[None], w[None])[0],
    "a product with itself": lambda x, w: x @ x.mT @ x,
    "a layer": F.linear,
    "a convolution": lambda x, w: F.conv1d(x.mT, w[..., None]).mT,
    "a padded convolution": lambda x, w: F.conv1d(x.mT, w[..., None].expand(4, 4, 3), padding=1).mT,
    "a norm": lambda x, w: x.norm(dim=-1, keepdim=True),
}
COUNTS: dict[str, Program] = {
    "sorted": lambda t: t.sort(0)[0],
    "order": lambda t: t.argsort(0),
    "least": lambda t: t.min(0)[0],
    "median": lambda t: t.median(0)[0],
    "mean": lambda t: t.mean(0),
}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sums", SUMS)
def test_sums_of_padding_remain_padding(rand: Rand, sums: str, counts: str) -> None:
    """Zeros are behind all numbers that are negative, and before those that are not."""
    weight = rand(0, 4, 4).abs()
    calls = [(-rand(1, 5, 4).abs() - 0.1,), *[(rand(seed, 5, 4),) for seed in range(4)]]

    def f(x: Tensor) -> Tensor:
        return COUNTS[counts](SUMS[sums](x, weight))

    assert right_or_refused(f, ol.Buckets(0, (8,), pad={"x": 0}), calls) is not None


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("whole", ["sum", "norm", "count_nonzero", "renorm"])
def test_zeros_that_are_known_add_nothing(rand: Rand, sums: str, whole: str) -> None:
    weight = rand(0, 4, 4).abs()

    def f(x: Tensor) -> Tensor:
        t = SUMS[sums](x, weight)
        if whole == "renorm":
            return t.reshape(len(t), -1).renorm(2, 1, 1.0)
        return torch.norm(t, dim=0) if whole == "norm" else getattr(torch, whole)(t, 0)

    calls = [(rand(seed, n, 4),) for seed, n in enumerate((5, 5, 6, 3, 8, 1))]
    why = right_or_refused(f, ol.Buckets(0, (8,), pad={"x": 0}), calls)
    assert (why is None) == (sums != "a padded convolution"), why


@pytest.mark.parametrize("part", [0, 1])
def test_the_number_of_a_largest_that_moves_is_refused(rand: Rand, part: int) -> None:
    """Where the example has it before what moves."""

    def f(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        both, masks = torch.cat([x, y]), torch.cat([mask, mask])
        return both.masked_fill(masks == 0, -1e9).max(0)[part]

    x, y, mask = rand(1, 5, 4).abs() + 5, rand(2, 5, 4), torch.ones_like(rand(0, 5, 1))
    calls = [(x, y, mask), (x, y, mask), (-x, y, mask), (-x, y, mask)]
    why = right_or_refused(f, ol.Buckets(0, (8,), pad={"mask": 0}), calls)
    assert (why is None) == (part == 0)


def gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return x + gate * torch.cat([x, y]).unbind(0)[6]


def test_what_a_gate_of_zero_hides_is_followed(rand: Rand) -> None:
    gate = torch.zeros_like(rand(0, 1))
    x, y = rand(1, 6, 4), rand(2, 6, 4)
    words = right_or_refused(lambda x, y: gated(x, y, gate), ol.Buckets(0, (4, 8)), [(x, y)] * 2)
    assert words is not None
    assert "unbind" in words


STILL: dict[str, Program] = {
    "two copies, apart again": lambda x, y: torch.cat([x, y]).chunk(2)[1] * 2,
    "behind the first": lambda x, y: torch.cat([x, y])[len(x) :] * 2,
    "from the end": lambda x, y: torch.cat([x, y[:1]])[-1] * 2,
    "shifted": lambda x, y: F.pad(x, (0, 0, 1, -1)) + y,
    "there and back": lambda x, y: torch.cat([x, y]).flip(0).flip(0).split(len(x))[0] * 1,
}


@pytest.mark.parametrize("name", STILL)
def test_what_moves_and_comes_back_is_right(rand: Rand, name: str) -> None:
    calls = [(rand(n, n, 4), rand(n + 1, n, 4)) for n in (6, 6, 5, 7, 8, 3, 3, 2, 1, 4)]
    assert right_or_refused(STILL[name], ol.Buckets(0, (4, 8)), calls) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [7, 3])
def test_a_bucket_has_a_proof_of_its_own(rand: Rand, kind: str, first: int) -> None:
    def f(x: Tensor) -> Tensor:
        return x[:3].relu().sum(0)

    second = 10 - first
    calls = [(KINDS[kind](rand(1, n, 4)),) for n in (first, first, second, second)]
    calls += [(rand(2, n, 4),) for n in range(1, 8)]
    words = right_or_refused(f, ol.Buckets(0, (3, 7)), calls)
    assert words is not None
    assert "padding to 3" in words
    fast = ol.graph(f, buckets=ol.Buckets(0, (3, 7)))
    with torch.no_grad(), contextlib.suppress(ol.CaptureError, ol.GraphWarning):
        fast.warm_up([KINDS[kind](rand(1, 5, 4))])  # refuses all buckets, or some of them
    assert {call.code for call in fast.readiness().refused} == {"OL140"}


def taints(f: Program, rand: Rand, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Warm up 32, then 16 rows; the refusals, and one more entry for each run under taint."""
    found: list[str | None] = []
    made = TaintMode.__init__

    def init(*args: Any, **kwargs: Any) -> None:
        found.append(None)
        made(*args, **kwargs)

    monkeypatch.setattr(TaintMode, "__init__", init)
    fast: Any = ol.graph(f, buckets=ol.Buckets(0, (8, 16, 32)))
    with torch.no_grad():
        for n in (31, 15):
            try:
                fast.capture(rand(n, n, 4))
            except ol.CaptureError as error:
                found.append(error.what)
            else:
                x = rand(n + 1, n - 2, 4)
                torch.testing.assert_close(fast(x).cpu(), f(x).cpu())
    return found


def test_taint_by_operations_alone_is_that_of_smaller_buckets(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4).to(device)
    assert taints(lambda x: linear(x).relu() * 2 + x, rand, monkeypatch) == [None]


def test_taint_by_values_is_followed_in_each_bucket(
    rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ten rows are real ones in calls of 17 to 32 rows, and not in calls of 9. No example
    shows it: their numbers are small."""

    def f(x: Tensor) -> Tensor:
        counts = (torch.arange(x.shape[0], device=x.device) < 10)[:, None]
        return ((x - 100).relu() * counts).sum(0) + x

    of_32, of_16, refusal = taints(f, rand, monkeypatch)
    assert of_32 is of_16 is None
    assert refusal is not None
    assert "sum" in refusal


def test_what_has_nothing_to_do_at_the_smallest_size(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return F.pad(x.softmax(0), (0, 0, 3, -3))

    calls = [(rand(seed, n, 4),) for seed, n in enumerate((3, 3, 6, 7, 4))]
    words = right_or_refused(f, ol.Buckets(0, (2, 8)), calls)
    assert words is not None
    assert "softmax" in words


def test_a_dimension_that_is_the_lesser_of_two(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x.diagonal(0, 0, 1) * 1

    buckets = ol.Buckets((0, 1), ((4, 8), (3, 7)))
    calls = [(rand(1, 5, 6, 2),)] * 2 + [(rand(1, *sizes, 2),) for sizes in ((7, 4), (5, 7))]
    assert right_or_refused(f, buckets, calls) is not None


@pytest.mark.parametrize("hides", ["added", "chosen"])
def test_real_scores_below_what_hides_others(rand: Rand, hides: str) -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        scores = x[..., 0]
        if hides == "added":
            scores = scores + (1 - mask) * -10000.0
        else:
            scores = scores.masked_fill(mask == 0, -10000.0)
        return (scores.softmax(1)[..., None] * x).sum(1)

    buckets = ol.Buckets(1, (4, 8), pad={"mask": 0})
    for scale, right in ((1, True), (3e4, False)):
        calls: list[tuple[Tensor, ...]] = []
        for n in (6, 6, 5, 7, 8):
            x = -rand(n, 2, n, 4).abs() * scale - scale
            mask = torch.ones_like(x[..., 0])
            calls.append((x, mask))
        words = right_or_refused(attend, buckets, calls)
        assert (words is None) == right
    assert words is not None
    assert "softmax" in words


def test_gradients_where_a_constant_fills_the_padding(device: torch.device, rand: Rand) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w).sqrt()

    def train(pad: Any, sign: int) -> Tensor:
        model = Root().to(device)
        fast = ol.graph(model, buckets=ol.Buckets(0, (8,), pad=pad), warmup=1)
        for n in (5, 5, 3):
            model.zero_grad()
            fast((rand(n, n, 4).abs() + 0.1) * sign).sum().backward()
        assert model.w.grad is not None
        return model.w.grad

    for sign in (1, -1):  # whose gradients are NaN at any size
        with pytest.raises(ol.CaptureError, match="gradient") as caught:
            train({"x": 0}, sign)
        assert caught.value.code == "OL140"
        for pad in ({"x": 1}, None):
            assert bool(train(pad, sign).isfinite().all()) == (sign == 1)


INTEGERS: dict[str, Program] = {
    "nine of ten": lambda x: torch.where(
        torch.arange(10, device=x.device) == 3, (x > 0).sum(), (x[:, :1] > 9).long()
    ),
    "a count of rows": lambda x: (x > 0).long() + (x > 0).sum(0).clamp(max=1) * 0 + x.shape[0] // 8,
    "places": lambda x: torch.cat([x[:1], x.mean(0, keepdim=True)]).argmax(1),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_compared_one_by_one(rand: Rand, name: str) -> None:
    calls = [(rand(seed, n, 10),) for seed, n in enumerate((6, 6, 5, 7, 8))]
    assert right_or_refused(INTEGERS[name], ol.Buckets(0, (4, 8)), calls) is not None


def test_values_alone_show_what_no_flow_says(rand: Rand) -> None:
    """An operation that says of itself that each element depends on its own place alone."""
    library = torch.library.Library("onelaunch_unseen", "DEF")
    try:
        library.define("tenth(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
        library.impl(
            "tenth",
            lambda x: (
                (x > 0).long()
                + torch.nn.functional.pad(
                    x.new_full((1, 1), x.shape[0] > 7).long(), (3, x.shape[1] - 4, 0, len(x) - 1)
                )
            ),
            "CompositeExplicitAutograd",
        )
        calls = [(rand(seed, n, 10),) for seed, n in enumerate((6, 6, 5, 7, 8))]
        words = right_or_refused(torch.ops.onelaunch_unseen.tenth, ol.Buckets(0, (4, 8)), calls)
        assert words is not None
        assert "other real rows" in words
    finally:
        library._destroy()


@pytest.mark.parametrize("independent", [False, True], ids=["proven", "independent"])
def test_a_kernel_that_may_make_an_index_of_a_float_gets_the_calls_own(
    device: torch.device, rand: Rand, independent: bool
) -> None:
    """As `torchvision::roi_align` does. No device survives an index out of bounds."""
    seen: list[float] = []

    def rows(boxes: Tensor) -> Tensor:
        if device.type != "cuda" or not torch._C._cuda_isCurrentStreamCapturing():
            seen.append(boxes[:, 0].amax().item())
        return boxes[:, 0].long().clamp(0, 3)[:, None] * boxes

    library = torch.library.Library("onelaunch_unseen", "DEF")
    try:
        library.define("rows(Tensor boxes) -> Tensor")
        library.impl("rows", rows, "CompositeExplicitAutograd")
        calls = [(rand(n, n, 5).abs() + 100,) for n in (6, 6, 5, 7, 8, 3, 3)]
        for (boxes,) in calls:
            boxes[:, 0] = torch.arange(len(boxes), device=device) % 4
        buckets = ol.Buckets(0, (4, 8), independent=independent)
        words = right_or_refused(torch.ops.onelaunch_unseen.rows, buckets, calls)
        assert (words is None) == independent
        assert max(seen) <= 3
    finally:
        library._destroy()


def test_an_argmax_of_near_equals_is_rounding(rand: Rand) -> None:
    """A kernel of another size may pick the other: that is no other program."""
    weight = rand(1, 64, 2).repeat(1, 300)

    def f(x: Tensor) -> Tensor:
        return (x @ weight).argmax(1)

    fast = ol.graph(f, buckets=ol.Buckets(0, (4, 64)), warmup=1)
    with torch.no_grad():
        for seed in range(3):
            x = rand(seed, 40, 64)
            got = fast(x)
            scores = x @ weight
            picked = scores.gather(1, got[:, None])[:, 0]
            torch.testing.assert_close(picked, scores.amax(1))
    assert replays(fast) == 2


SCATTERED: dict[str, Program] = {
    "select": lambda x, m: x.select_scatter(x[:, 0], 1, 1),
    "select, a row": lambda x, m: x.select_scatter(x[0] * 2, 0, 0),
    "diagonal": lambda x, m: x.view(-1, 2, 3).diagonal_scatter(x[:, :2], 0, 1, 2).view(-1, 6) * 1,
    "diagonal of an argument": lambda x, m: m.diagonal_scatter(x[:, :3] > 0, 0, 1, 2),
    "slice": lambda x, m: x.slice_scatter(x[:, :1], 1, 2, 3),
}


@pytest.mark.parametrize("name", SCATTERED)
@pytest.mark.parametrize("sizes", [None, (4, 8)])
def test_scatters_of_slices(rand: Rand, name: str, sizes: tuple[int, ...] | None) -> None:
    f = SCATTERED[name]
    buckets = None if sizes is None else ol.Buckets(0, sizes)
    fast = ol.graph(f, buckets=buckets, warmup=1)
    with torch.no_grad():
        for n in (3, 3, 4, 7, 7) if sizes else (3, 3, 3):
            x, m = rand(n, n, 6), rand(n, n, 3, 3, dtype=torch.bool)
            assert torch.equal(fast(x, m).cpu(), f(x, m).cpu())
    assert replays(fast) >= 2


STORED: dict[str, tuple[Callable[[Any, Tensor], object], bool]] = {
    "the size": (lambda _, x: len(x), False),
    "the shape": (lambda _, x: tuple(x.shape), False),
    "what comes of the size": (lambda _, x: 1.0 / len(x), False),
    "the sum of sizes": (lambda kept, x: kept + len(x), False),
    "a constant": (lambda _, x: 7, True),
    "another dimension": (lambda _, x: x.shape[1], True),
    "a count": (lambda kept, x: kept + 1, True),
}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_number_that_changes_with_the_size_is_refused(rand: Rand, name: str) -> None:
    """A replay would store that of its bucket."""
    value, right = STORED[name]
    state = [{"kept": 0}, {"kept": 0}]

    def program(state: dict[str, Any]) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            state["kept"] = value(state["kept"], x)
            return x * 2

        return f

    eager, fast = program(state[0]), ol.graph(program(state[1]), buckets=ol.Buckets(0, (4, 8)))
    calls = [rand(n, n, 4) for n in (3, 3, 3, 3, 2, 4, 6, 6, 6, 6, 7)]
    if not right:
        with pytest.raises(ol.CaptureError, match=r"OL140.*`.*kept.*changes with the size"):
            list(map(fast, calls))
        return
    for x in calls:
        assert torch.equal(fast(x), eager(x))
        assert state[0] == state[1]
    assert replays(fast)


BY_PLACE: dict[str, Program] = {
    "a triangle": lambda x: x.tril(),
    "a constant for some rows": lambda x: torch.cat([x[:3] * 2, x[3:]]),
}


@pytest.mark.parametrize("name", BY_PLACE)
def test_chunks_of_rows_that_depend_on_their_place_are_refused(rand: Rand, name: str) -> None:
    buckets = ol.Buckets(0, (4, 8), overflow="chunk")
    calls = [(rand(n, n, 4),) for n in (8, 8, 8, 11)]
    words = right_or_refused(BY_PLACE[name], buckets, calls)
    assert words is not None
    assert "before" in words


SAME_FOR_ALL: dict[str, Program] = {
    "made zeros": lambda x: x + torch.zeros(x.shape[0], 1, device=x.device),
    "one row, expanded": lambda x: x + x.new_ones(1, 4).expand(x.shape[0], 4),
}
OF_THEIR_NUMBER: dict[str, Program] = {
    "their sum": lambda x: x + x.new_ones(x.shape[0], 1).sum(0),
    "the sum of one, expanded": lambda x: x + x.new_ones(1, 4).expand(x.shape[0], 4).sum(0),
    "every other": lambda x: x + (torch.arange(x.shape[0], device=x.device) % 2)[:, None],
}


@pytest.mark.parametrize("name", [*SAME_FOR_ALL, *OF_THEIR_NUMBER])
def test_chunks_with_constants_for_each_row(rand: Rand, name: str) -> None:
    buckets = ol.Buckets(0, (4, 8), overflow="chunk")
    program = SAME_FOR_ALL.get(name) or OF_THEIR_NUMBER[name]
    words = right_or_refused(program, buckets, [(rand(n, n, 4),) for n in (8, 8, 8, 11)])
    assert (words is None) == (name in SAME_FOR_ALL)


def test_chunks_of_a_callable_that_counts_its_calls_are_refused(rand: Rand) -> None:
    state = {"calls": 0}

    def f(x: Tensor) -> Tensor:
        state["calls"] += 1
        return x * 2

    fast = ol.graph(f, buckets=ol.Buckets(0, (4, 8), overflow="chunk"), warmup=1)
    for n in (3, 3, 8, 8, 5):
        fast(rand(n, n, 4))
    assert state["calls"] == 5
    with pytest.raises(ol.CaptureError, match=r"OL140.*calls.*for each chunk"):
        fast(rand(11, 11, 4))


def _added(x: Tensor) -> Tensor:
    y = x * 2
    y += x
    return y


def _filled(x: Tensor) -> Tensor:
    return torch.zeros(len(x), 4, device=x.device).masked_fill_(x > 0, 1).add_(x)


ROW_BY_ROW = {
    "an argument": lambda x: x.mul_(2) + 1,
    "a result": _added,
    "a new tensor": _filled,
    "inplace=True": torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Softmax(1)),
}


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_chunks_of_a_callable_that_writes_row_by_row(
    rand: Rand, name: str, independent: bool
) -> None:
    f = ROW_BY_ROW[name]
    buckets = ol.Buckets(0, (4, 8), overflow="chunk", independent=independent)
    fast = ol.graph(f, buckets=buckets, warmup=1)
    for n in (3, 3, 8, 8, 11, 17, 17):
        x = rand(n, n, 4)
        expected = x.clone()
        assert torch.equal(fast(x), f(expected))
        assert torch.equal(x, expected)
    assert not fast.stats().eager_reasons.get("OL140")


def _shifted(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:] += x[:-1]
    return y


def _behind(x: Tensor) -> Tensor:
    return x.clone().add_(torch.arange(len(x), device=x.device)[:, None])


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (_shifted, "depends on the rows before, by `add_"),
        (lambda x: x.cumsum(0), "depends on the rows before, by `cumsum"),
        (lambda x: x.clone().add_(x[0]), "depends on the rows before, by `select"),
        (_behind, "depends on the rows before"),
    ],
)
def test_chunks_of_writes_that_bring_rows_together_are_refused(
    rand: Rand, f: Any, why: str
) -> None:
    fast = ol.graph(f, buckets=ol.Buckets(0, (4, 8), overflow="chunk"), warmup=1)
    for _ in range(2):  # a refusal is kept, and raised again
        with pytest.raises(ol.CaptureError, match=f"OL140.*{why}"):
            fast(rand(11, 11, 4))
