"""What holds however compiled code is recorded: each program runs in each world of worlds.py.

What a world alone shows is in test_backend.py, test_policy.py and test_compiled.py.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import allocated, assert_same, on_accelerators
from .regions import F, on_the_host, same_calls, two_models
from .test_concurrency_threads import run_threads
from .training import Rand
from .worlds import Whole, World

pytestmark = [on_accelerators, pytest.mark.usefixtures("whole_numbers")]
cut = pytest.mark.parametrize("world", ["backend", "policy"], indirect=True)
"""For programs that Dynamo has to cut."""


# Arguments and results.


def test_a_function(rand: Rand, world: World) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().cos()

    with torch.no_grad():
        same_calls(f, world.compile(f), lambda i: (rand(i, 100),))
    assert world.replays() == world.least(8)
    assert [recording.callable for recording in world.recordings()] == ["f"]


def written(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x + 1


def view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[1:].view(-1), x.sum()


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


def overlapping_results(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y[0], y[1]


def none_and_numbers(x: Tensor) -> tuple[Tensor, None, int, float]:
    return x * 2, None, x.shape[0], 0.5


@pytest.mark.parametrize("f", [written, itself, view, twice, overlapping_results, none_and_numbers])
def test_aliases_and_writes(rand: Rand, world: World, f: F) -> None:
    with torch.no_grad():
        fast = world.compile(f)
        same_calls(f, fast, lambda i: (rand(i, 3, 4),))
        x = rand(9, 3, 4)
        expected, got = f(x.clone()), fast(x)
        if f is itself:
            assert got[0] is x
        if f is view:
            assert got[0]._base is x or got[0].data_ptr() == x[1:].data_ptr()
        if f is twice:
            assert got[0] is got[1]
    torch.testing.assert_close(got, expected)
    assert world.replays() >= world.least(9)


@pytest.mark.parametrize(
    "argument",
    [
        lambda rand, i: rand(i, 4)[None].expand(3, 4),
        lambda rand, i: rand(i, 13)[1:],
        lambda rand, i: rand(i, 13)[i % 2 : 12 + i % 2],
        lambda rand, i: rand(i, 4, 6)[:, ::2],
        lambda rand, i: rand(i, 4, 6).t(),
        lambda rand, i: rand(i, 0, 6),
        lambda rand, i: rand(i, 6)[None].expand(3, 6)[:, :4],
    ],
    ids=[
        *("expanded", "unaligned", "unaligned by turns", "strided", "transposed", "empty"),
        "expanded and cut",
    ],
)
def test_kinds_of_arguments(rand: Rand, world: World, argument: Any) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return (x * 2 + 1).relu()

    with torch.no_grad():
        arguments = lambda i: (argument(rand, i), rand(i, 13)[i % 2 : 12 + i % 2])  # noqa: E731
        same_calls(f, world.compile(f), arguments)
    assert world.replays() >= world.least(8) - 1


def test_results_outlive_their_recordings(rand: Rand, world: World) -> None:
    def f(x: Tensor) -> Tensor:
        return x.relu() + 2

    fast = world.compile(f)
    with torch.no_grad():
        results = [fast(rand(i, 64)) for i in range(8)]
        assert world.replays() == world.least(8)
        world.reset()
        assert not world.recordings()
        for i in range(8):
            torch.testing.assert_close(results[i], f(rand(i, 64)))
            torch.testing.assert_close(fast(rand(i, 64)), f(rand(i, 64)))
    assert world.replays() >= world.least(8)
    world.reset()
    assert not world.recordings()


def test_sizes(rand: Rand, world: World) -> None:
    """A recording for each, and no more than `max_recordings`."""

    def f(x: Tensor) -> Tensor:
        return (x * 2).sum(0)

    fast = world.compile(f, max_recordings=3, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_calls(f, fast, lambda i: (rand(i, 2 + i // 6, 4),), calls=36)
    assert [str(w.message)[:7] for w in caught if w.category is ol.GraphWarning] == ["[OL301]"]
    assert len(world.recordings()) == 3


def test_random_numbers_follow_the_seed(rand: Rand, world: World) -> None:
    fast = world.compile(lambda x: nn.functional.dropout(x, 0.5))
    with torch.no_grad():
        for _ in range(world.late + 3):
            fast(rand(1, 64))
        torch.manual_seed(3)
        first, second = fast(rand(1, 64)), fast(rand(1, 64))
        torch.manual_seed(3)
        assert_same(fast(rand(1, 64)), first)
        assert_same(fast(rand(1, 64)), second)
    assert not torch.equal(first, second)
    assert world.replays() >= 7


# State.


class Counted(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), device=device))
        self.h = torch.zeros(4, device=device)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.h = self.h * 0.5 + x
        return self.h * self.count


def test_state_that_is_written_and_replaced(device: torch.device, rand: Rand, world: World) -> None:
    model, other = Counted(device), Counted(device)
    with torch.no_grad():
        same_calls(model, world.compile(other), lambda i: (rand(i, 4),), calls=12)
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    assert world.replays() >= 3


def test_weights_that_move(device: torch.device, rand: Rand, world: World) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device).requires_grad_(False)
    fast = world.compile(model)
    for i in range(18):
        if i == 6:
            model.weight.mul_(2)  # in place: the same recording
        if i == 7:
            model.weight.data = rand(90, 4, 4)
        if i == 12:
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
            model.requires_grad_(False)
        x = rand(i, 2, 4)
        torch.testing.assert_close(fast(x), model(x))
    assert world.replays() >= 5


def test_blocks_that_are_compiled_once(device: torch.device, rand: Rand, world: World) -> None:
    """One code, and a recording for the parameters of each block."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
    fast = [world.compile(block) for block in blocks]

    def through(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).relu()
        return x

    with torch.no_grad():
        same_calls(
            lambda x: through(blocks, x), lambda x: through(fast, x), lambda i: (rand(i, 2, 4),)
        )
    assert len(world.recordings()) == 3
    assert world.replays() == 3 * world.least(8)


# Training.


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))


def assert_trained(model: nn.Module, other: nn.Module) -> None:
    """Of one state and the same gradients, but for rounding."""
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [layers, with_statistics])
def test_training(device: torch.device, rand: Rand, world: World, make: Any) -> None:
    model, other = two_models(device, make)
    fast = world.compile(other)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for i in range(9):
        for m, optimizer in zip((model, fast), optimizers, strict=True):
            optimizer.zero_grad()
            m(rand(i, 5, 4)).square().mean().backward()
            optimizer.step()
        assert_trained(model, other)
    assert len(world.recordings()) == (1 if world.joined else 2)
    assert world.replays() == world.least_trained(9)


@pytest.mark.parametrize("make", [layers, with_statistics])
def test_gradients_accumulate(device: torch.device, rand: Rand, world: World, make: Any) -> None:
    model, other = two_models(device, make)
    fast = world.compile(other)
    for i in range(10):
        for m, run in ((model, model), (other, fast)):
            if i % 3 == 0:
                m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)
    assert world.replays() == world.least_trained(10)


def test_two_forwards_before_a_backward(device: torch.device, rand: Rand, world: World) -> None:
    """In Inductor's trees the second overwrites what the first has saved (pytorch#169545)."""
    model, other = two_models(device, layers)
    fast = world.compile(other)
    for i in range(8):
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            first, second = run(rand(i, 5, 4)), run(rand(i + 50, 5, 4))
            second.square().mean().backward()
            first.square().mean().backward(retain_graph=world.keeps)
            if world.keeps:
                first.sum().backward()
        assert_trained(model, other)
    assert world.replays() >= 8


@cut
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_training_over_graph_breaks(device: torch.device, rand: Rand, world: World) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(y)

    model, other = two_models(device, Broken)
    fast = world.compile(other)
    for i in range(8):
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)
    assert len(world.recordings()) == (2 if world.joined else 4)
    assert world.replays() == 2 * world.least_trained(8)


def test_dropout_in_training(rand: Rand, world: World) -> None:
    """The backward has the mask of its forward."""
    fast = world.compile(lambda x: nn.functional.dropout(x, 0.5))
    for i in range(8):
        x = rand(i, 64).abs().add(1).requires_grad_()
        y = fast(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
    assert world.replays() >= world.least_trained(8)


# Work on the host.


@cut
def test_a_part_on_the_host(rand: Rand, world: World) -> None:
    fast = world.compile(on_the_host)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_calls(on_the_host, fast, lambda i: (rand(i, 3, 8),))
    told = [str(w.message) for w in caught if w.category is ol.GraphWarning]
    if world.joined:
        (message,) = told
        assert message.startswith("[OL312]")
        assert "offsets = torch.arange" in message
        assert len(world.recordings()) == 2
        assert world.replays() == 2 * world.least(8)
    else:  # Inductor may have moved the part out of the way
        assert [message[:7] for message in told] in ([], ["[OL312]"])
        assert world.replays() >= world.least(8)


@cut
def test_training_around_a_part_on_the_host(device: torch.device, rand: Rand, world: World) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            scale = y.detach().cpu().sum(0).sign()
            return self.second(y * scale.to(x.device))

    model, other = two_models(device, Split)
    fast = world.compile(other)

    def step(i: int) -> None:
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)

    with pytest.warns(ol.GraphWarning, match="OL312"):
        step(0)
    for i in range(1, 8):
        step(i)
    assert world.replays() >= (2 * world.least_trained(8) if world.joined else 2 * world.least(8))


# Threads, an outer capture, and the end.


def test_several_threads(rand: Rand, world: World) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 3).relu() - 1

    fast = world.compile(f)

    def work(seed: int) -> None:
        for i in range(8):
            x = rand(100 * seed + i, 64)
            torch.testing.assert_close(fast(x), f(x))

    with torch.no_grad():
        fast(rand(1, 64))  # Dynamo compiles in one thread
    run_threads(3, work)
    assert world.replays() >= 6


def test_inside_of_a_graphed_callable(device: torch.device, rand: Rand, world: World) -> None:
    """The outer capture takes the compiled code in, of a whole step too, and launches no other."""
    model, other = two_models(device, layers)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    fast = world.compile(other)

    def step(m: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    outer = ol.graph(lambda x: step(fast, optimizers[1], x))
    for i in range(8):
        got, expected = outer(rand(i, 5, 4)), step(model, optimizers[0], rand(i, 5, 4))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        assert_trained(model, other)
    assert outer.stats().replays > 0


@pytest.mark.thorough
def test_what_is_gone_is_freed(device: torch.device, rand: Rand, world: World) -> None:
    left: list[int] = []
    for _ in range(2):  # cuBLAS keeps the memory of its first use on a stream
        model = nn.Linear(64, 64).to(device)
        alive = weakref.ref(model.weight)
        fast = world.compile(lambda x, model=model: model(x).relu())
        for i in range(7):
            fast(rand(i, 32, 64)).sum().backward()
        assert len(world.recordings()) == (1 if world.joined else 2)
        del model, fast
        torch._dynamo.reset()
        if isinstance(world, Whole):
            world.forget()
        gc.collect()
        assert alive() is None
        assert not world.recordings()
        left.append(allocated(device))
    assert left[1] <= left[0]
