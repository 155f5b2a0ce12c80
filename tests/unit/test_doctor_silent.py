"""What is silently wrong under a bare graph: what is found, at which line, and what is not."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onelaunch.finding import Finding
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.replay import replay
from onelaunch.tools.doctor.silent import silently_wrong

X = torch.arange(12.0).reshape(3, 4)


def found(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Finding]:
    return silently_wrong(Workload(fn, args, kwargs), backward=False)


def codes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    return [finding.code for finding in found(fn, *args, **kwargs)]


# What is right under a bare graph.


class Cache(nn.Module):
    """Keys in a buffer, written in place at a place that is counted on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.keys: Tensor
        self.place: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.keys.index_copy_(0, self.place, x[:1])
        self.place.add_(1).remainder_(8)
        return self.keys.sum(0) + x


class Lazy(nn.Module):
    """A table made by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 4)
            self.ready = True
        return x + self.table


class Step:
    """A training step, at a constant rate or under a schedule."""

    def __init__(self, scheduled: bool = False) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)
        if scheduled:
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def __call__(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (x * self.weight).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Frozen:
    """Turns gradients off, and on again."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(4))

    def __call__(self, x: Tensor) -> Tensor:
        self.weight.requires_grad_(False)
        y = (x * self.weight).detach().requires_grad_()
        self.weight.requires_grad_(True)
        return y.detach() * 2


class LastSeen(nn.Module):
    """Keeps its last result, which it never reads."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x + 1


def logged(x: Tensor) -> Tensor:
    logging.getLogger("footguns").warning("called")
    return x + 1


def in_place_on_its_own(x: Tensor) -> Tensor:
    y = x.clone()
    y[0].mul_(2)
    return y.add_(1)[1:]


def addresses(x: Tensor) -> Tensor:
    return x + 1 if x.data_ptr() else x - 1


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(nn.Linear(4, 4), id="pure"),
        pytest.param(torch.relu, id="torch's"),
        pytest.param(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), id="norm"),
        pytest.param(nn.Dropout(), id="dropout"),
        pytest.param(nn.LSTM(4, 4), id="lstm"),
        pytest.param(Cache(), id="cache"),
        pytest.param(Lazy(), id="lazy"),
        pytest.param(Step(), id="step"),
        pytest.param(Frozen(), id="flag put back"),
        pytest.param(LastSeen(), id="kept, not read"),
        pytest.param(logged, id="logging reads a clock"),
        pytest.param(in_place_on_its_own, id="in place on its own"),
        pytest.param(addresses, id="an address that is not kept"),
    ],
)
def test_nothing_is_found_where_a_bare_graph_is_right(fn: Callable[..., Any]) -> None:
    assert found(fn, X) == []


def test_draws_of_torch_are_those_of_eager() -> None:
    torch.manual_seed(0)
    assert found(torch.rand_like, X) == []


# Lines.


class Counters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[int] = []
        self.seen = {"rows": 0}

    def count(self) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        self.history.append(len(x))
        self.seen["rows"] += len(x)
        return x * self.calls


def test_each_place_that_moves_is_found_at_its_line() -> None:
    lines = {(f.code, f.source) for f in found(Counters(), X)}
    assert lines == {
        ("OL501", "self.calls += 1"),
        ("OL309", "self.history.append(len(x))"),
        ("OL501", 'self.seen["rows"] += len(x)'),
    }


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class OfClass(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        OfClass.calls += 1
        return x * OfClass.calls


def of_function(x: Tensor) -> Tensor:
    of_function.calls = getattr(of_function, "calls", 0) + 1
    return x * of_function.calls


def enclosed() -> Callable[[Tensor], Tensor]:
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return count


def drawn(x: Tensor) -> Tensor:
    y = x + 1
    noise = np.random.standard_normal()
    return y * noise


def shuffled(x: Tensor) -> Tensor:
    order = [0, 1, 2]
    random.shuffle(order)
    return x[order[0]] + 1


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.masks:
            self.masks[x.shape] = torch.ones(x.shape).tril()
        return x * self.masks[x.shape]


class ByAddress(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = x.data_ptr()
        if key not in self.known:
            self.known[key] = x.cos()
        return self.known[key] + 1


class Two(nn.Module):
    """Recurrent state in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.state = (torch.zeros(4), torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.state
        self.state = (torch.tanh(h + x[0]), c + h)
        return self.state[0] * 2


BOTH = ("run", "replay")
FOUND: dict[str, tuple[Callable[..., Any], str, str, tuple[str, ...] | None]] = {
    "a slot": (Slotted(), "OL501", "self.calls += 1", BOTH),
    "of a class": (OfClass(), "OL501", "OfClass.calls += 1", BOTH),
    "of a function": (
        *(of_function, "OL501", 'of_function.calls = getattr(of_function, "calls", 0) + 1', BOTH),
    ),
    "a closure": (enclosed(), "OL501", "calls += 1", BOTH),
    "a draw between operations": (drawn, "OL502", "noise = np.random.standard_normal()", BOTH),
    "a draw inside the standard library": (shuffled, "OL502", "random.shuffle(order)", None),
    # Nothing moved the rate in between; a cache keeps each size, so replays were right.
    "a schedule outside": (Step(scheduled=True), "OL508", "self.optimizer.step()", ("run",)),
    "a cache by size": (
        *(Keyed(), "OL507", "self.masks[x.shape] = torch.ones(x.shape).tril()", ("run",)),
    ),
    "an address as a key": (ByAddress(), "OL510", "key = x.data_ptr()", None),
    "state in a tuple": (Two(), "OL512", "self.state = (torch.tanh(h + x[0]), c + h)", None),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_silently_wrong_is_found_at_its_line(name: str) -> None:
    fn, code, line, found_by = FOUND[name]
    (finding,) = found(fn, X)
    assert (finding.code, finding.source) == (code, line)
    assert found_by in (None, finding.found_by)


def test_sparse_arguments_are_not_drawn() -> None:
    assert found(lambda s: torch.sparse.mm(s, X), torch.eye(3).to_sparse()) == []


def test_the_way_to_the_line_and_the_values_are_told() -> None:
    (count,) = [f for f in found(Counters(), X) if f.source == "self.calls += 1"]
    assert [call.rpartition(" in ")[2] for call in count.calls] == ["forward"]
    assert count.file.endswith("test_doctor_silent.py")
    assert count.column == 9
    assert count.what == "`calls` is 1 before a call and 2 after it"


def timed(x: Tensor) -> tuple[Tensor, float]:
    start = time.perf_counter()
    y = x + 1
    return y, time.perf_counter() - start


def test_each_clock_is_found() -> None:
    assert [f.source for f in found(timed, X)] == [
        "start = time.perf_counter()",
        "return y, time.perf_counter() - start",
    ]


# Arguments and results.


def test_arguments_are_named() -> None:
    def fill(out: dict[str, Tensor], x: Tensor) -> Tensor:
        out["y"].copy_(x)
        return x + 1

    (finding,) = found(fill, {"y": torch.zeros(3, 4)}, X)
    assert finding.what == "`copy_` writes to `args[0]['y']`"


def test_a_list_that_is_passed_and_grows() -> None:
    def collect(seen: list[int], x: Tensor) -> Tensor:
        seen.append(1)
        return x + 1

    (finding,) = found(collect, [], X)
    assert (finding.code, finding.source) == ("OL309", "seen.append(1)")


@pytest.mark.parametrize(
    "fn", [nn.Identity(), nn.Flatten(0), functools.partial(Tensor.view, size=(-1,))]
)
def test_a_result_that_is_a_view_without_a_line_of_the_users(fn: Callable[..., Any]) -> None:
    (finding,) = found(fn, X)
    assert finding.code == "OL506"
    assert finding.what == "`result` shares the memory of `args[0]`"


def test_a_buffer_that_is_returned() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3, 4))
            self.table: Tensor

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, self.table[:2]

    (finding,) = found(Model(), X)
    assert finding.what == "`result[1]` shares the memory of `table`"
    assert finding.source == "return x + 1, self.table[:2]"


# What a diagnosis leaves behind.

level = 1.0


def falling(x: Tensor) -> Tensor:
    global level
    level *= 0.5
    return x * level * random.random() * float(np.random.rand())


def test_globals_and_generators_are_as_before() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert set(codes(falling, X)) == {"OL502", "OL504"}
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after
    assert level == 1.0


class Uncopyable(nn.Module):
    """Shared by all its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.total: Tensor

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise TypeError("not this one")

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x[0])
        return self.total + 1


def test_a_module_that_cannot_be_copied_is_put_back() -> None:
    model = Uncopyable()
    assert found(model, X) == []
    assert model.total.tolist() == [0, 0, 0, 0]


# Replays.


def test_a_callable_that_does_not_repeat_itself_is_not_judged() -> None:
    class Unrepeatable:
        def __call__(self, x: Tensor) -> Tensor:
            return x * (id(object()) % 97 + next(ticks))

    ticks = iter(range(10**6))
    differences = replay(Workload(Unrepeatable(), (X,))).differences
    assert differences
    assert codes(Unrepeatable(), X) == []


def test_a_capture_that_is_refused_is_told() -> None:
    refused = replay(Workload(lambda x: x * x.sum().item(), (X,))).refused
    assert refused is not None
    assert "OL101" in refused


def test_another_size_that_the_callable_refuses_is_left_out() -> None:
    table = torch.ones(3, 1)
    replayed = replay(Workload(lambda x: x + table, (X,)), other_size=True)
    assert replayed.refused is None
    assert replayed.differences == ()


def test_a_difference_is_named_with_its_call() -> None:
    counters = Counters()
    texts = [str(d) for d in replay(Workload(counters, (X,))).differences]
    assert "`result` is another than eager's after the second replay on the same inputs" in texts
    assert "`calls` is another than eager's after the second replay on the same inputs" in texts


def test_a_large_state_is_compared_by_sums() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(300, 300))
            self.calls = 0
            self.table: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.table[0, 0] += self.calls
            return x + 1

    names = {d.name for d in replay(Workload(Large(), (X,))).differences}
    assert names == {"table", "calls"}
