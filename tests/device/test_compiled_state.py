"""``compile=True``: a capture does what Dynamo's code does from the state that the call finds."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import on_accelerators, replays
from .training import Rand

pytestmark = pytest.mark.usefixtures("compiled")


class Keeps(nn.Module):
    """Keeps its hidden state for the next call: there is none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        out = h if self.last is None else h + self.last
        self.last = h.detach()
        return out


class Starts(nn.Module):
    """Starts a running mean in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.started = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if not self.started:
            self.started = True
            return h
        with torch.no_grad():
            self.mean = self.mean * 0.5 + h.mean(0)
        return h - self.mean


class Counts(nn.Module):
    """Counts its calls, which is a number that Dynamo compiles for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Exchanged(nn.Module):
    """Gets another layer and a hook, whenever that happens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2


def equal(fast: Any, own: Any, x: Tensor, grad: bool) -> None:
    y = x.clone()
    with torch.set_grad_enabled(grad):
        found, expected = fast(x), own(y)
    torch.testing.assert_close(found, expected)
    if grad:
        found.square().sum().backward()
        expected.square().sum().backward()


@on_accelerators
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("kind", [Keeps, Starts, Counts])
def test_what_only_later_calls_read(
    device: torch.device, rand: Rand, kind: type[nn.Module], grad: bool
) -> None:
    torch.manual_seed(0)
    model, own = kind().to(device), kind().to(device)
    own.load_state_dict(model.state_dict())
    fast = ol.graph(model, compile=True)
    for i in range(12):
        equal(fast, own, rand(i, 2, 3), grad)
        assert getattr(model, "calls", 0) == getattr(own, "calls", 0)
    for (name, mine), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    for (name, mine), theirs in zip(model.named_buffers(), own.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    assert replays(fast) >= 6


def another(model: Exchanged, i: int) -> None:
    torch.manual_seed(i)
    model.layer = nn.Linear(3, 3, bias=False).to(model.layer.weight.device)


def hooked(model: Exchanged, i: int) -> None:
    model.layer.register_forward_hook(lambda module, args, out: out + i)


@on_accelerators
@pytest.mark.parametrize("when", range(1, 7))
@pytest.mark.parametrize("change", [another, hooked])
def test_a_layer_that_is_changed_between_calls(
    device: torch.device, rand: Rand, change: Callable[[Exchanged, int], None], when: int
) -> None:
    torch.manual_seed(0)
    model, own = Exchanged().to(device), Exchanged().to(device)
    own.load_state_dict(model.state_dict())
    fast = ol.graph(model, compile=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\\[OL308\\]")  # what else the hook does is not repeated
        for i in range(12):
            if i == when:
                change(model, i)
                change(own, i)
            equal(fast, own, rand(i, 2, 3), False)
    assert replays(fast) >= 4


@on_accelerators
@pytest.mark.parametrize("sizes", [[1] * 8, [1, 3] * 4, [3, *[1] * 6]])
def test_a_bucket_above_one_row(device: torch.device, rand: Rand, sizes: list[int]) -> None:
    """Dynamo has code for one row and code for more."""
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
    fast = ol.graph(model, compile=True, buckets=ol.Buckets(dim=0, sizes=(4, 16)))
    for i, rows in enumerate(sizes):
        equal(fast, model, rand(i, rows, 3), False)
    assert replays(fast) >= 3


@on_accelerators
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_refused_capture_draws_no_number(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * random.random() if random.random() > 0.5 else x + 1

    def run(call: Callable[[Tensor], Tensor]) -> list[Any]:
        random.seed(0)
        return [*(call(rand(i, 3)).tolist() for i in range(8)), random.random()]

    expected = run(f)
    with torch.no_grad(), pytest.warns(ol.GraphWarning):
        found = run(ol.graph(f, compile=True, on_refusal="eager"))
    assert found[-1] == expected[-1]
    torch.testing.assert_close(torch.tensor(found[:-1]), torch.tensor(expected[:-1]))


@on_accelerators
def test_a_write_of_the_compiled_code_alone_is_refused(device: torch.device, rand: Rand) -> None:
    """The run that is watched takes the other way; a capture could not undo the write."""
    seen = torch.zeros(4, device=device)

    def f(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            seen.add_(1)
        return x + seen

    fast = ol.graph(f, compile=True, warmup=1)
    with pytest.raises(ol.CaptureError, match=r"OL109.*`.*seen` is written by the compiled code"):
        list(map(fast, [rand(i, 4) for i in range(8)]))


def test_two_forwards_of_a_batch_norm_before_one_backward(device: torch.device, rand: Rand) -> None:
    """The first call runs as it is and saves the statistics, whose version compiled code moves."""
    torch.manual_seed(0)
    eager = nn.BatchNorm1d(4).to(device)
    model = nn.BatchNorm1d(4).to(device)
    model.load_state_dict(eager.state_dict())
    fast = ol.graph(model, compile=True, warmup=1, max_in_flight=2)
    for i in range(8):
        a, b = rand(2 * i, 8, 4), rand(2 * i + 1, 8, 4)
        for run, of in ((eager, eager), (fast, model)):
            of.zero_grad()
            (run(a).square().mean() - run(b).mean()).backward()
        for name, t in eager.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], t)
        torch.testing.assert_close(model.weight.grad, eager.weight.grad)


@on_accelerators
def test_a_step_whose_result_requires_grad(device: torch.device, rand: Rand) -> None:
    """A step has no backward left for the caller, and says so as it does without Inductor."""
    weight = nn.Parameter(rand(0, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (weight.exp() * x).mean().backward()
        optimizer.step()
        return weight.exp()

    fast = ol.graph(step, compile=True, warmup=1)

    def calls() -> None:
        for i in range(5):
            torch.testing.assert_close(fast(rand(i, 3)), weight.exp())

    with pytest.warns(ol.GraphWarning, match="OL303"):
        calls()
    assert not replays(fast)


@on_accelerators
def test_memory_that_is_replaced_says_so(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(3, 3).to(device).requires_grad_(False)

    def decayed(x: Tensor) -> Tensor:
        layer.weight.data = layer.weight.data * 0.5
        return layer(x)

    fast = ol.graph(decayed, compile=True, warmup=1)

    def calls() -> None:
        for i in range(4):
            fast(rand(i, 2, 3))

    with torch.no_grad(), pytest.raises(ol.CaptureError, match="OL105") as caught:
        calls()
    assert "p.data.copy_(new)" in caught.value.fix


@on_accelerators
@pytest.mark.parametrize("made", [True, False])
def test_a_leaf_that_is_none_of_the_callables(device: torch.device, rand: Rand, made: bool) -> None:
    """One that the call makes for itself is told from one that nothing leads to."""
    weight = nn.Parameter(rand(0, 3))

    def own(x: Tensor) -> Tensor:
        leaf = (x * 2).detach().requires_grad_()
        return leaf * 2

    fast = ol.graph(own if made else functools.partial(torch.mul, weight), compile=True, warmup=1)

    def calls() -> None:
        for i in range(5):
            fast(rand(i, 3))

    if made:
        with pytest.warns(ol.GraphWarning, match="OL303"):
            calls()
    else:
        with pytest.raises(ol.CaptureError, match="OL114"):
            calls()
