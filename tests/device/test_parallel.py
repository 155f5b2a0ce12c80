"""``parallel=True``: operations run at the same time where they need not wait for each other, and
give the same bits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, in_threads, on_accelerators, replays
from .steps import batch, training_of

pytestmark = pytest.mark.usefixtures("no_overlaps")
Parallel = Any


class Ensemble(nn.Module):
    """Independent networks over one input."""

    def __init__(self, heads: int = 4, p: float = 0.0) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(p)),
                *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
            )
            for _ in range(heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


def ensemble(device: torch.device, heads: int = 4, p: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return Ensemble(heads, p).to(device)


def width(fast: Any) -> float:
    (recording,) = fast.recordings
    found = recording.parallel
    return 1.0 if found is None else found.nodes / found.longest


@on_accelerators
def test_branches(device: torch.device, rand: Rand) -> None:
    model = ensemble(device)
    fast, chain = ol.graph(model, parallel=True), ol.graph(model, parallel=False)
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 5, 4)
            assert_same(fast(x), model(x), f"call {i}")
            chain(x)
    assert replays(fast) >= 4
    assert width(fast) > 2
    assert width(chain) == 1


@on_accelerators
@pytest.mark.parametrize("parallel", [True, "auto"])
def test_results_are_as_safe_as_of_a_chain(
    device: torch.device, rand: Rand, parallel: Parallel
) -> None:
    """Kept results, static results, and a pool that two callables share."""
    model, pool = ensemble(device), ol.Pool()
    kept: list[tuple[Tensor, Tensor]] = []
    fast = [
        ol.graph(model, parallel=parallel, pool=pool),
        ol.graph(model, parallel=parallel, outputs="static", pool=pool),
        ol.graph(lambda x: model(x) * 2, pool=pool),
    ]
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 5, 4)
            kept.append((fast[0](x), model(x)))
            assert_same(fast[1](x), kept[-1][1])
            assert_same(fast[2](x), model(x) * 2)
    for got, expected in kept:
        assert_same(got, expected)


@on_accelerators
@pytest.mark.parametrize("parallel", [True, "auto"])
def test_writes_and_views_keep_their_order(
    device: torch.device, rand: Rand, parallel: Parallel
) -> None:
    """What is written in place is read before and after, through views as well."""

    def f(x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        rows = table[1:3]
        a = table.sum(0)
        rows.mul_(2)
        b = table.sum(0) + x[0]
        table[0] = a
        c = rows.exp()
        rows.add_(b)
        d = torch.cat([table[:2], x[:2]]).cumsum(0)
        x[0].zero_()
        return a, b, c, d, table * 1, x.sum()

    fast = ol.graph(f, parallel=parallel)
    for i in range(7):
        mine, theirs = ((rand(i, 4, 5), rand(100 + i, 4, 5)) for _ in range(2))
        assert_same(fast(*mine), f(*theirs), f"call {i}")
        assert_same(mine, theirs)
    assert replays(fast) >= 3


@on_accelerators
@pytest.mark.parametrize("parallel", [True, "auto"])
def test_random_numbers_come_in_order(device: torch.device, rand: Rand, parallel: Parallel) -> None:
    model = ensemble(device, p=0.4)
    fast = ol.graph(model, parallel=parallel)
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 5, 4)
            torch.manual_seed(i)
            got = fast(x), torch.rand(3, device=device)
            torch.manual_seed(i)
            assert_same(got, (model(x), torch.rand(3, device=device)), f"call {i}")
    assert replays(fast) >= 4


@on_accelerators
@pytest.mark.parametrize("gradients", ["autograd", "direct"])
@pytest.mark.parametrize("parallel", [True, "auto"])
def test_pairs(device: torch.device, rand: Rand, gradients: Any, parallel: Parallel) -> None:
    eager = ensemble(device)
    fast: Any = ol.graph(copy.deepcopy(eager), parallel=parallel, gradients=gradients)
    for i in range(8):
        losses = []
        for model in (eager, fast):
            x = rand(i, 5, 4).requires_grad_()
            loss = model(x).square().sum()
            loss.backward()
            losses.append((loss.detach(), x.grad, [p.grad for p in model.parameters()]))
            for p in model.parameters():
                p.grad = None
        assert_same(losses[1], losses[0], f"call {i}")
    assert replays(fast) >= 4
    assert width(fast) > 2 or parallel == "auto"


@on_accelerators
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("parallel", [True, "auto"])
def test_a_whole_step(device: torch.device, foreach: bool, parallel: Parallel) -> None:
    """The trials of ``"auto"`` leave no trace in parameters, momenta and counts of steps."""
    jobs = []
    for _ in range(2):
        model = ensemble(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, capturable=True, foreach=foreach)
        jobs.append(training_of(model, optimizer))
    fast = ol.graph(jobs[1].step, parallel=parallel)
    for i in range(9):
        x, y = batch(i, device)
        assert_same(fast(x, y), jobs[0].step(x, y), f"call {i}")
    assert_same([*jobs[1].model.parameters()], [*jobs[0].model.parameters()])
    assert replays(fast) >= 4
    assert width(fast) > 1.5 or parallel == "auto"


@on_accelerators
def test_numbers_buckets_and_rebound_inputs(device: torch.device, rand: Rand) -> None:
    model = ensemble(device)
    scaled = ol.graph(lambda x, k: model(x) * k, parallel=True)
    sized = ol.graph(model, parallel=True, buckets=ol.Buckets(0, (2, 8)))
    in_place = ol.graph(model, parallel=True, inputs="rebind")
    with torch.no_grad():
        for i in range(9):
            x = rand(i, 1 + i % 8, 4)
            assert_same(scaled(rand(i, 5, 4), 0.5 + i), model(rand(i, 5, 4)) * (0.5 + i))
            torch.testing.assert_close(sized(x), model(x))
            assert_same(in_place(rand(i, 6, 4)), model(rand(i, 6, 4)))
    assert replays(scaled) >= 2
    assert replays(sized) >= 2
    assert replays(in_place) >= 4


@on_accelerators
def test_operators_of_ones_own_wait_for_everything(device: torch.device, rand: Rand) -> None:
    """Their kernels may touch what no schema says."""

    @torch.library.custom_op("tests_parallel::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def f(x: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        a, b, c = own(x.exp()), own(x.tanh()), own(x.sin())
        return a + b + c

    fast = [ol.graph(lambda x, own=own: f(x, own), parallel=True) for own in (twice, torch.relu)]
    with torch.no_grad():
        for i in range(6):
            assert_same(fast[0](rand(i, 2, 3)), f(rand(i, 2, 3), twice))
            fast[1](rand(i, 2, 3))
    assert width(fast[0]) == 1
    assert width(fast[1]) > 1


class Counting(nn.Module):
    """Branches over rows of a table, beside state that each call moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.register_buffer("seen", torch.zeros(50))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.index_add_(0, rows, torch.ones_like(rows, dtype=torch.float32))
        self.calls += 1
        x = self.table(rows)
        return torch.stack([head(x).tanh() for head in self.heads]).sum(0), self.calls.clone()


@on_accelerators
@pytest.mark.parametrize("options", [{}, {"outputs": "static"}, {"inputs": "rebind"}])
def test_a_trial_leaves_state_as_it_was(device: torch.device, options: Any) -> None:
    """It runs with the tensors of the call: rows of memory that nobody filled are anywhere."""
    torch.manual_seed(2)
    eager = Counting().to(device)
    model = copy.deepcopy(eager)
    fast = ol.graph(model, parallel="auto", warmup=1, **options)
    with torch.no_grad():
        for i in range(6):
            rows = torch.arange(i, i + 20).to(device)
            assert_same(fast(rows), eager(rows), f"call {i}")
            assert_same([*model.buffers()], [*eager.buffers()], f"call {i}")
    assert replays(fast) >= 4
    (recording,) = fast.recordings
    if device.type == "cuda" and recording.parallel is not None:
        assert recording.parallel.gain >= 1.02


@on_accelerators
def test_the_picture(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(ensemble(device), parallel=True, warmup=1)
    with torch.no_grad():
        [fast(rand(i, 5, 4)) for i in range(3)]
    (found,) = (r.parallel for r in fast.recordings)
    assert found is not None
    head, *rows = str(found).splitlines()
    assert f"{found.nodes} nodes in {found.width} lanes, {found.longest} in a chain" == head
    assert found.width == len(rows) >= 4
    assert sum(row.count("#") for row in rows) == found.longest
    assert sum(map(len, found.lanes)) > found.longest


@on_accelerators
def test_threads(device: torch.device, rand: Rand) -> None:
    model = ensemble(device)
    fast = ol.graph(model, parallel=True)
    inputs = [rand(i, 5, 4) for i in range(32)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        [fast(x) for x in inputs[:4]]
    found: dict[int, Tensor] = {}

    def work(numbers: range) -> None:
        with torch.no_grad():
            for i in numbers:
                found[i] = fast(inputs[i])

    in_threads(*(functools.partial(work, range(n, 32, 8)) for n in range(8)))
    assert_same([found[i] for i in range(32)], expected)


@on_accelerators
@pytest.mark.usefixtures("compiled")
def test_compiled_code(device: torch.device, rand: Rand) -> None:
    """The same bits as of its chain."""
    model = ensemble(device)
    fast, chain = (ol.graph(model, parallel=p, compile=True) for p in (True, False))
    with torch.no_grad():
        for i in range(6):
            x = rand(i, 5, 4)
            assert_same(fast(x), chain(x))
            torch.testing.assert_close(fast(x), model(x))
    assert width(fast) > 2
    assert width(chain) == 1


@on_accelerators
@pytest.mark.usefixtures("compiled")
def test_the_backend(device: torch.device, rand: Rand) -> None:
    model, pool = ensemble(device), ol.Pool()
    options = {"parallel": True, "pool": pool}
    fast: Any = torch.compile(model, backend="onelaunch", options=options)
    with torch.no_grad():
        for i in range(6):
            x = rand(i, 5, 4)
            torch.testing.assert_close(fast(x), model(x))
    (recording,) = pool.stats().recordings
    assert recording.parallel is not None
    assert recording.parallel.width > 2


@on_accelerators
@pytest.mark.usefixtures("compiled")
def test_compiled_pairs(device: torch.device, rand: Rand) -> None:
    models = [ensemble(device) for _ in range(2)]
    fast: list[Any] = [
        ol.graph(model, parallel=parallel, compile=True)
        for model, parallel in zip(models, (True, False), strict=True)
    ]
    for i in range(7):
        found = []
        for call, model in zip(fast, models, strict=True):
            x = rand(i, 5, 4).requires_grad_()
            call(x).square().sum().backward()
            found.append((x.grad, [p.grad for p in model.parameters()]))
            model.zero_grad()
        assert_same(found[0], found[1], f"call {i}")
    assert replays(fast[0]) >= 3
    assert width(fast[0]) > 2
