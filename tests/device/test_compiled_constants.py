"""``compile=True``: the host's values are constants of a recording, as they are without it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, drop_in_worlds, on_accelerators, replays
from .test_host_constants import LARGE, PROGRAMS, TABLE, refused
from .training import Rand

pytestmark = pytest.mark.usefixtures("compiled")

NUMBER = torch.tensor(2.0)
PICKED = torch.tensor([0, 2])


def in_a_helper(x: Tensor) -> Tensor:
    def helper(t: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0, 3.0]).to(t.device) + TABLE.to(t.device)

    return x + helper(x)


def written_on_the_host(x: Tensor) -> Tensor:
    row = torch.zeros(3)
    row[1] = 2
    row.add_(TABLE)
    return x + row.to(x.device)


def changed_state(x: Tensor) -> Tensor:
    """Each call changes a copy, and never the one that is kept."""
    table = TABLE.to(x.device)
    table.add_(x[0].detach())
    return x * table


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[0, 0] = torch.tensor(3.0)
    return y


OWN: dict[str, Callable[[Tensor], Any]] = {
    "an assigned number": assigned,
    "a number": lambda x: x * NUMBER,
    "a computed number": lambda x: x * (NUMBER * 2),
    "a number in a branch": lambda x: torch.where(x > 0.5, x, NUMBER),
    "a moved number": lambda x: x * NUMBER.to(x.device),
    "an index": lambda x: x[:, PICKED] * 2,
    "computed of state": lambda x: x + (TABLE * 2).to(x.device),
    "in a helper": in_a_helper,
    "written on the host": written_on_the_host,
    "changed state": changed_state,
}
REFUSED = {
    "array_mask": "OL103",
    "list_of_bools": "OL103",
    "host_mask": "OL102",
    "masked": "OL103",
    "masked_with_negative_zeros": "OL103",
    "masked_by_rows": "OL102",
    "put": "OL104",
    "state_returned": "OL104",
    "of_default_device": "OL103",
}
"""Without ``compile`` these are recorded: masks, and what breaks Dynamo's graph."""
LEFT = {*REFUSED, "numbers_of_numpy"}  # Dynamo fails on the last
FAULTS_OF_INDUCTOR = {"assigned_by_index", "masked", "masked_by_rows", "put"}
"""On a GPU torch 2.11 compiles these wrongly or not at all, without us too."""
LIFTED = {name: f for name, f in PROGRAMS.items() if name not in LEFT} | OWN


def skip_faults_of_inductor(name: str, rand: Rand) -> None:
    f, x = PROGRAMS.get(name), rand(0, 2, 3)
    if f is None or name not in FAULTS_OF_INDUCTOR or x.device.type != "cuda":
        return
    compiled = torch.compile(f, dynamic=False)
    try:
        with torch.no_grad():
            for i in range(9):
                torch.testing.assert_close(compiled(rand(i, 2, 3)), f(rand(i, 2, 3)))
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"Inductor alone: {type(error).__name__}")


@on_accelerators
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", LIFTED)
def test_it_replays(name: str, grad: bool, rand: Rand) -> None:
    skip_faults_of_inductor(name, rand)
    f = LIFTED[name]
    fast = ol.graph(f, compile=True)
    for i in range(7):
        x, y = (rand(i, 2, 3).requires_grad_(grad) for _ in range(2))
        with torch.set_grad_enabled(grad):
            found, expected = fast(x), f(y)
        torch.testing.assert_close(found, expected)
        if grad:
            first = found[0] if isinstance(found, tuple) else found
            own = expected[0] if isinstance(expected, tuple) else expected
            first.sum().backward()
            own.sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
    assert replays(fast) == 4
    assert len(fast.recordings) == 1
    assert not fast.recordings[0].untraced


@on_accelerators
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_its_code_and_line(name: str, rand: Rand) -> None:
    """Or Inductor makes code of it that is right, as some versions do."""
    skip_faults_of_inductor(name, rand)
    fast, refused = ol.graph(PROGRAMS[name], compile=True), None
    with torch.no_grad():
        try:
            found = [fast(rand(i, 2, 3)) for i in range(9)]
        except ol.CaptureError as error:
            refused = error
        if refused is None and rand(0, 2, 3).device.type == "cuda":
            torch.testing.assert_close(found, [PROGRAMS[name](rand(i, 2, 3)) for i in range(9)])
            return
    assert refused is not None
    assert refused.code == REFUSED[name]
    assert "tests/device/test_" in str(refused.where)


class Scaled(nn.Module):
    """State of the host, in all the ways that it reaches the device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [1.0, 2.0, 3.0]
        self.table = torch.arange(3.0)
        self.large = torch.ones(3, 300)
        self.number = torch.tensor(2.0)
        self.picked = torch.tensor([0, 2])
        self.register_buffer("row", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.tensor(self.scale, device=x.device) + self.table.to(x.device)
        product = scaled @ self.large.to(x.device) * self.number
        return product[:, self.picked] * self.row[:2].to(x.device)


CHANGES: list[Callable[[Scaled], object]] = [
    lambda model: model.scale.__setitem__(1, 5.0),
    lambda model: model.table.add_(1),
    lambda model: model.large.mul_(2),
    lambda model: model.number.fill_(3),
    lambda model: model.table.data.mul_(2),
    lambda model: model.table.numpy().__setitem__(1, 50.0),
    lambda model: model.picked.add_(1),
    lambda model: setattr(model, "table", torch.zeros(3)),
    lambda model: setattr(model, "number", torch.tensor(7.0)),
    lambda model: setattr(model, "row", torch.full((3,), 4.0)),
]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_state_that_it_comes_from_is_compared(rand: Rand, grad: bool) -> None:
    model = Scaled()
    fast = ol.graph(model, compile=True)
    for change in (lambda _: None, *CHANGES):
        change(model)
        for i in range(5):
            x, y = (rand(i, 2, 3).round().requires_grad_(grad) for _ in range(2))
            with torch.set_grad_enabled(grad):
                found, expected = fast(x), model(y)
            torch.testing.assert_close(found, expected)
            if grad:
                found.sum().backward()
                expected.sum().backward()
                torch.testing.assert_close(x.grad, y.grad)
    assert replays(fast) >= 2 * len(CHANGES)


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_state_that_is_replaced_between_calls(rand: Rand, when: int) -> None:
    """Before the capture too: it is watched where it is, not as the tensor that it was."""

    def world() -> Any:
        class Holder:
            table = torch.arange(4.0)

        def f(x: Tensor) -> Tensor:
            return x * Holder.table.to(x.device)

        def arguments(i: int) -> tuple[Tensor]:
            if i in (when, when + 2):
                Holder.table = torch.arange(4.0) + i
            if i == when + 4:
                Holder.table.add_(1)
            return (rand(i, 4).round(),)

        return f, arguments

    drop_in_worlds(world, compile=True, warmup=2, calls=12, recordings=None, min_replays=1)


@on_accelerators
def test_one_capture_is_enough(rand: Rand, missed: list[int]) -> None:
    """The run under watch shows which values will be wanted."""

    def f(x: Tensor) -> Tensor:
        for i in range(5):
            x = x + torch.tensor([i + 0.5, 1.0, 2.0]).to(x.device) * TABLE.to(x.device)
        return x

    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        for i in range(6):
            torch.testing.assert_close(fast(rand(i, 3)), f(rand(i, 3)))
    assert len(missed) == 1  # on a GPU, Inductor makes the five that are written here there
    assert not fast.recordings[0].retries


@on_accelerators
def test_ahead_of_time(rand: Rand) -> None:
    fast = ol.graph(in_a_helper, compile=True)
    with torch.no_grad():
        fast.capture(rand(0, 2, 3))
        torch.testing.assert_close(fast(rand(1, 2, 3)), in_a_helper(rand(1, 2, 3)))
    assert replays(fast) == 1


@torch._dynamo.disable
def clock() -> Tensor:
    return torch.tensor([time.perf_counter() % 1, 1.0, 2.0])


TURNS = itertools.cycle([1.0, 2.0, 3.0])


@torch._dynamo.disable
def turning() -> Tensor:
    """As it was three runs before."""
    return torch.tensor([next(TURNS), 1.0, 2.0])


@on_accelerators
@pytest.mark.parametrize(
    ("moving", "code"),
    [
        (lambda x: clock().to(x.device), "OL117"),
        (lambda x: clock()[0], "OL117"),
        (lambda x: clock()[0].item(), "OL109"),  # Dynamo compiles it anew for each number
        (lambda x: turning().to(x.device), "OL117"),
        (lambda x: torch.rand(3).to(x.device), "OL103"),
        (lambda x: torch.rand(()), "OL104"),
        (lambda x: LARGE.repeat(6, 1)[0, :3].to(x.device), None),
        (lambda x: HUGE.to(x.device)[:3], "OL103"),
        (lambda x: WEIGHT.to(x.device), "OL103"),
    ],
    ids=[
        *("clock", "number of a clock", "float of a clock", "turns"),
        *("random", "random number", "computed of large", "large", "gradients"),
    ],
)
def test_what_moves_is_refused(
    moving: Callable[[Tensor], Tensor], code: str | None, rand: Rand
) -> None:
    fast = ol.graph(lambda x: x + moving(x), compile=True)
    if code is None:
        with torch.no_grad():
            for i in range(6):
                torch.testing.assert_close(fast(rand(i, 3)), rand(i, 3) + moving(rand(i, 3)))
        return
    with torch.set_grad_enabled(code == "OL103"):
        error = refused(fast, rand)
    assert error.code == code
    assert "test_compiled_constants.py" in str(error.where)


HUGE = torch.arange(10_000.0)
WEIGHT = torch.ones(3, requires_grad=True)


@on_accelerators
@pytest.mark.parametrize("made", [False, True])
def test_with_buckets(rand: Rand, made: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * TABLE.to(x.device) + torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return y + torch.arange(x.shape[0]).to(x.device)[:, None] if made else y

    fast = ol.graph(f, compile=True, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    with torch.no_grad():
        for i in range(20):
            x = rand(i, 1 + i % 8, 3)
            torch.testing.assert_close(fast(x), f(x))
    assert replays(fast) > 8
    assert made or not any(recording.retries for recording in fast.recordings)


# What the host reads decides on the code that a call runs.


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = torch.tensor(2)
        self.sizes = torch.tensor([1, 2])

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.split(self.sizes.tolist(), 1)
        y = first.sum(1, keepdim=True) + second.sum(1, keepdim=True) * 3
        return y * self.number.item() if self.number > 0 else y


@on_accelerators
@pytest.mark.parametrize("ahead", [False, True])
def test_state_that_the_host_reads(rand: Rand, ahead: bool) -> None:
    model = Read()
    fast = ol.graph(model, compile=True)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: model.number.fill_(3),
            lambda: model.sizes.copy_(torch.tensor([2, 1])),
            lambda: model.number.fill_(-1),
            lambda: setattr(model, "number", torch.tensor(5)),
        ):
            change()
            if ahead:
                fast.capture(rand(0, 2, 3))
            for i in range(5):
                x = rand(i, 2, 3).round()
                assert_same(fast(x), model(x))
    assert replays(fast) >= 10


@on_accelerators
@pytest.mark.parametrize("ahead", [False, True])
def test_an_argument_that_the_host_reads(rand: Rand, ahead: bool) -> None:
    """Each of its values has a recording."""

    def f(x: Tensor, sizes: Tensor) -> Tensor:
        first, second = x.split(sizes.tolist(), 1)
        return first.sum(1, keepdim=True) + second.sum(1, keepdim=True) * 3

    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        for sizes in (torch.tensor([1, 2]), torch.tensor([2, 1]), torch.tensor([1, 2])):
            if ahead:
                fast.capture(rand(0, 2, 3), sizes)
            for i in range(6):
                x = rand(i, 2, 3).round()
                assert_same(fast(x, sizes), f(x, sizes))
    assert replays(fast) >= 6
