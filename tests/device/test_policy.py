"""`onelaunch.dynamo.cudagraph_policy`: what Inductor captures for ``mode="reduce-overhead"`` is a
recording.

On CUDA with Inductor's kernels; on the emulated device see inductor.py.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch import Tensor, nn
from torch._inductor import cudagraph_utils

import onelaunch as ol
from onelaunch.driver.select import driver_of
from onelaunch.dynamo import cudagraph_policy

from .drop_in import allocated, assert_same, on_accelerators
from .inductor import reduce_overhead
from .regions import F, recordings, replays, same_calls, two_models
from .test_backend import (
    Counted,
    assert_trained,
    itself,
    layers,
    none_and_numbers,
    on_the_host,
    overlapping_results,
    twice,
    view,
    written,
)
from .test_concurrency_threads import run_threads
from .training import Rand

HAS_HOOK = hasattr(cudagraph_utils, "CUDAGraphPolicy")
with_hook = pytest.mark.skipif(not HAS_HOOK, reason="the hook is torch 2.12's")
LATE = 4
"""Calls before the first replay: AOTAutograd's first is under a mode of its own."""


class Compile:
    """`torch.compile` with ``mode="reduce-overhead"`` and a policy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.policy = cudagraph_policy()

    def __call__(self, f: F, **options: Any) -> Any:
        if self.device.type == "tape":
            return reduce_overhead(f, self.policy, **options)
        config.cudagraph_policy = self.policy
        return torch.compile(f, mode="reduce-overhead", **options)


@pytest.fixture
def fast(device: torch.device) -> Iterator[Compile]:
    """Nothing compiled so far, and no policy afterwards."""
    torch._dynamo.reset()
    made = Compile(device)
    with config.patch(cudagraph_policy=None):
        yield made
    torch._dynamo.reset()
    made.policy.reset()


@pytest.fixture
def rand(rand: Rand) -> Rand:
    """Small whole numbers, with which whatever Inductor fuses is exact."""
    return lambda seed, *shape: rand(seed, *shape).mul(4).round()


# Results and arguments.


@with_hook
@on_accelerators
def test_a_function(device: torch.device, rand: Rand, fast: Compile) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().cos()

    with torch.no_grad():
        same_calls(f, fast(f), lambda i: (rand(i, 100),))
    assert replays() == 8 - LATE
    assert recordings()[0].callable == "f"


@with_hook
@on_accelerators
@pytest.mark.parametrize("f", [written, itself, view, twice, overlapping_results, none_and_numbers])
def test_aliases_and_writes(device: torch.device, rand: Rand, fast: Compile, f: F) -> None:
    with torch.no_grad():
        quick = fast(f)
        same_calls(f, quick, lambda i: (rand(i, 3, 4),))
        x = rand(9, 3, 4)
        expected, got = f(x.clone()), quick(x)
        if f is itself:
            assert got[0] is x
        if f is view:
            assert got[0].data_ptr() == x[1:].data_ptr()
        if f is twice:
            assert got[0] is got[1]
    torch.testing.assert_close(got, expected)
    assert replays() >= 9 - LATE


@with_hook
@on_accelerators
@pytest.mark.parametrize(
    "argument",
    [
        lambda rand, i: rand(i, 4)[None].expand(3, 4),
        lambda rand, i: rand(i, 13)[1:],
        lambda rand, i: rand(i, 13)[i % 2 : 12 + i % 2],
        lambda rand, i: rand(i, 4, 6)[:, ::2],
        lambda rand, i: rand(i, 4, 6).t(),
        lambda rand, i: rand(i, 0, 6),
    ],
    ids=["expanded", "unaligned", "unaligned by turns", "strided", "transposed", "empty"],
)
def test_kinds_of_arguments(device: torch.device, rand: Rand, fast: Compile, argument: Any) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return (x * 2 + 1).relu()

    with torch.no_grad():
        same_calls(f, fast(f), lambda i: (argument(rand, i), rand(i, 13)[i % 2 : 12 + i % 2]))
    assert replays() >= 8 - LATE - 1


@with_hook
@on_accelerators
def test_results_outlive_their_recordings(device: torch.device, rand: Rand, fast: Compile) -> None:
    def f(x: Tensor) -> Tensor:
        return x.relu() + 2

    quick = fast(f)
    with torch.no_grad():
        results = [quick(rand(i, 64)) for i in range(8)]
        assert replays() == 8 - LATE
        fast.policy.reset()
        assert not recordings()
        for i in range(8):
            torch.testing.assert_close(results[i], f(rand(i, 64)))
            torch.testing.assert_close(quick(rand(i, 64)), f(rand(i, 64)))
    assert replays() == 8 - LATE + 1  # no first call any more


@with_hook
@on_accelerators
def test_sizes(device: torch.device, rand: Rand, fast: Compile) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).sum(0)

    fast.policy = cudagraph_policy(max_recordings=3)
    quick = fast(f, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_calls(f, quick, lambda i: (rand(i, 2 + i // 6, 4),), calls=48)
    assert [str(w.message)[:7] for w in caught if w.category is ol.GraphWarning] == ["[OL301]"]
    assert len(recordings()) == 3


@with_hook
@on_accelerators
def test_random_numbers_follow_the_seed(device: torch.device, rand: Rand, fast: Compile) -> None:
    quick = fast(lambda x: nn.functional.dropout(x, 0.5))
    with torch.no_grad():
        for _ in range(7):
            quick(rand(1, 64))
        torch.manual_seed(3)
        first, second = quick(rand(1, 64)), quick(rand(1, 64))
        torch.manual_seed(3)
        assert_same(quick(rand(1, 64)), first)
        assert_same(quick(rand(1, 64)), second)
    assert not torch.equal(first, second)
    assert replays() >= 7


# State.


@with_hook
@on_accelerators
def test_state_that_is_written_and_replaced(
    device: torch.device, rand: Rand, fast: Compile
) -> None:
    model, other = Counted(device), Counted(device)
    with torch.no_grad():
        same_calls(model, fast(other), lambda i: (rand(i, 4),), calls=14)
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    assert replays() >= 3


@with_hook
@on_accelerators
def test_weights_that_move(device: torch.device, rand: Rand, fast: Compile) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device).requires_grad_(False)
    quick = fast(model)
    for i in range(18):
        if i == 6:
            model.weight.mul_(2)  # in place: the same recording
        if i == 7:
            model.weight.data = rand(90, 4, 4)
        if i == 12:
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
            model.requires_grad_(False)
        x = rand(i, 2, 4)
        torch.testing.assert_close(quick(x), model(x))
    assert replays() >= 5


@with_hook
@on_accelerators
def test_blocks_that_are_compiled_once(device: torch.device, rand: Rand, fast: Compile) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
    quick = [fast(block) for block in blocks]

    def through(run: Any, x: Tensor) -> Tensor:
        for layer in run:
            x = layer(x).relu()
        return x

    with torch.no_grad():
        same_calls(
            lambda x: through(blocks, x), lambda x: through(quick, x), lambda i: (rand(i, 2, 4),)
        )
    assert len(recordings()) == 3
    assert replays() >= 3 * (8 - LATE)


# Training.


@with_hook
@on_accelerators
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_training(device: torch.device, rand: Rand, fast: Compile, norm: type[nn.Module]) -> None:
    model, other = two_models(
        device, lambda: nn.Sequential(nn.Linear(4, 8), norm(8), nn.GELU(), nn.Linear(8, 2))
    )
    quick = fast(other)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for i in range(10):
        for m, optimizer in zip((model, quick), optimizers, strict=True):
            optimizer.zero_grad()
            m(rand(i, 5, 4)).square().mean().backward()
            optimizer.step()
        assert_trained(model, other)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-3)
    assert len(recordings()) == 2
    assert replays() == (10 - LATE) + (10 - LATE + 1)


@with_hook
@on_accelerators
def test_gradients_accumulate(device: torch.device, rand: Rand, fast: Compile) -> None:
    model, other = two_models(device, layers)
    quick = fast(other)
    for i in range(12):
        for m, run in ((model, model), (other, quick)):
            if i % 3 == 0:
                m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)
    assert replays() >= 2 * (12 - LATE)


@with_hook
@on_accelerators
def test_two_forwards_before_a_backward(device: torch.device, rand: Rand, fast: Compile) -> None:
    """In Inductor's trees the second overwrites what the first has saved (pytorch#169545)."""
    model, other = two_models(device, layers)
    quick = fast(other)
    for i in range(9):
        for m, run in ((model, model), (other, quick)):
            m.zero_grad()
            first, second = run(rand(i, 5, 4)), run(rand(i + 50, 5, 4))
            second.square().mean().backward()
            first.square().mean().backward()
        assert_trained(model, other)
    assert replays() >= 4 * 9 - 2 * LATE


@with_hook
@on_accelerators
def test_a_backward_works_in_saved_memory(device: torch.device, rand: Rand, fast: Compile) -> None:
    """AOTAutograd donates what is saved for one backward alone, and a gradient is made there."""
    weight = rand(90, 4, 4)

    def f(x: Tensor, bias: Tensor) -> Tensor:
        return (x @ weight + bias).tanh() @ weight

    quick = fast(f)
    kept: list[tuple[Any, Any]] = []
    for i in range(9):
        bias, other = (rand(i, 3, 4).mul_(0.1).requires_grad_() for _ in range(2))
        f(rand(i, 3, 4), bias).square().sum().backward()
        quick(rand(i, 3, 4), other).square().sum().backward()
        kept.append((other.grad, bias.grad))
        for got, expected in kept:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert replays() >= 2 * (9 - LATE)


@with_hook
@on_accelerators
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_training_over_graph_breaks(device: torch.device, rand: Rand, fast: Compile) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(y)

    model, other = two_models(device, Broken)
    quick = fast(other)
    for i in range(9):
        for m, run in ((model, model), (other, quick)):
            m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)
    assert len(recordings()) == 4
    assert replays() >= 4 * (9 - LATE)


@with_hook
@on_accelerators
def test_dropout_in_training(device: torch.device, rand: Rand, fast: Compile) -> None:
    """The backward has the mask of its forward."""
    quick = fast(lambda x: nn.functional.dropout(x, 0.5))
    for i in range(9):
        x = rand(i, 64).abs().add(1).requires_grad_()
        y = quick(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
    assert replays() >= 2 * (9 - LATE)


# What Inductor does not capture.


@with_hook
@on_accelerators
def test_a_part_on_the_host(device: torch.device, rand: Rand, fast: Compile) -> None:
    quick = fast(on_the_host)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_calls(on_the_host, quick, lambda i: (rand(i, 3, 8),))
    codes = [str(w.message)[:7] for w in caught if w.category is ol.GraphWarning]
    assert codes in ([], ["[OL312]"])  # Inductor may have moved the part out of the way
    assert replays() >= 8 - LATE


@with_hook
@on_accelerators
def test_a_part_writes_what_another_one_computed(
    device: torch.device, rand: Rand, fast: Compile
) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        total = y.cpu().sum()
        y.add_(total.to(x.device))
        z = y.cpu() * 2
        y.mul_(3)
        return y, z.to(x.device) + y.relu()

    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL312"):
        same_calls(f, fast(f), lambda i: (rand(i, 3, 8),))
    assert replays() >= 2 * (8 - LATE)


@with_hook
@on_accelerators
def test_training_around_a_part_on_the_host(
    device: torch.device, rand: Rand, fast: Compile
) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            scale = y.detach().cpu().sum(0).sign()
            return self.second(y * scale.to(x.device))

    model, other = two_models(device, Split)
    quick = fast(other)

    def step(i: int) -> None:
        for m, run in ((model, model), (other, quick)):
            m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)

    with pytest.warns(ol.GraphWarning, match="OL312"):
        step(0)
    for i in range(1, 9):
        step(i)
    assert replays() >= 2 * (9 - LATE)


# Threads, and the end.


@with_hook
@on_accelerators
def test_several_threads(device: torch.device, rand: Rand, fast: Compile) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 3).relu() - 1

    quick = fast(f)

    def work(seed: int) -> None:
        for i in range(8):
            x = rand(100 * seed + i, 64)
            torch.testing.assert_close(quick(x), f(x))

    with torch.no_grad():
        quick(rand(1, 64))  # Dynamo compiles in one thread
    run_threads(3, work)
    assert replays() >= 6


@with_hook
@on_accelerators
def test_a_backward_while_another_thread_has_the_lock(
    device: torch.device, rand: Rand, fast: Compile
) -> None:
    """That thread may be waiting for this backward, as in the warm-up of a whole step."""

    def f(x: Tensor) -> Tensor:
        return x.exp() * 2

    quick, driver = fast(f), driver_of(device.type)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.exclusive():
            held.set()
            assert done.wait(60)

    for i in range(8):
        x, y = rand(i, 4).requires_grad_(), rand(i, 4).requires_grad_()
        f(x).sum().backward()
        got = quick(y).sum()
        if i % 2:
            thread = threading.Thread(target=hold)
            thread.start()
            assert held.wait(60)
            got.backward()
            done.set()
            thread.join()
            held.clear()
            done.clear()
        else:
            got.backward()
        torch.testing.assert_close(y.grad, x.grad)


@with_hook
@on_accelerators
def test_inside_of_a_graphed_callable(device: torch.device, rand: Rand, fast: Compile) -> None:
    """The outer capture takes the compiled code in, in a whole step too."""
    model, other = two_models(device, layers)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    quick = fast(other)

    def step(m: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    outer = ol.graph(lambda x: step(quick, optimizers[1], x))
    for i in range(12):
        got, expected = outer(rand(i, 5, 4)), step(model, optimizers[0], rand(i, 5, 4))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        assert_trained(model, other)


@with_hook
@on_accelerators
def test_what_is_gone_is_freed(device: torch.device, rand: Rand, fast: Compile) -> None:
    left: list[int] = []
    for _ in range(2):  # cuBLAS keeps the memory of its first use on a stream
        model = nn.Linear(64, 64).to(device)
        alive = weakref.ref(model.weight)
        quick = fast(lambda x, model=model: model(x).relu())
        for i in range(7):
            quick(rand(i, 32, 64)).sum().backward()
        assert len(recordings()) == 2
        del model, quick
        torch._dynamo.reset()
        gc.collect()
        assert alive() is None
        assert not recordings()
        left.append(allocated(device))
    assert left[1] <= left[0]
