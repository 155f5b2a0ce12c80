"""What PyTorch's tests ask of its CUDA graph trees, asked of the backend of `torch.compile`.

Results that live on, die and are used again; memory that is reused; kinds of arguments and state;
modes, hooks and streams. More of it is in test_backend.py.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol

from .drop_in import allocated, on_accelerators, on_cuda
from .regions import F, compiled, recordings, replays, same_calls, two_models
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh", "whole_numbers")


# Results.


@on_accelerators
def test_what_code_between_the_graphs_keeps(device: torch.device, rand: Rand) -> None:
    """And writes to: the result of a graph is the caller's before the next one reads it."""
    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        y = x * 2
        z = y + 1
        keep(y, z)
        return (y + z).relu()

    @torch.compiler.disable
    def keep(y: Tensor, z: Tensor) -> None:
        kept.append(y)
        z.mul_(2)

    fast = compiled(f)
    with torch.no_grad():
        same_calls(f, fast, lambda i: (rand(i, 100),), calls=10)
    for i, (expected, got) in enumerate(zip(kept[::2], kept[1::2], strict=True)):
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(got, rand(i, 100) * 2)
    assert replays() == 14


@on_accelerators
def test_a_result_is_the_next_argument(device: torch.device, rand: Rand) -> None:
    """And is written in between."""

    def f(x: Tensor) -> Tensor:
        return x * 0.5 + 1

    def run(step: F) -> Tensor:
        x = rand(1, 64)
        for _ in range(12):
            x = step(x)
            x[:8].add_(2)
        return x

    with torch.no_grad():
        torch.testing.assert_close(run(compiled(f)), run(f))
    assert replays() == 9


@on_accelerators
def test_results_of_several_functions_live_together(device: torch.device, rand: Rand) -> None:
    """One pool, in turns, all results kept: none is written over."""
    steps = [lambda x, n=n: (x + n).relu() * n for n in range(4)]
    fast = [compiled(step) for step in steps]
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for i in range(9):
            for step, compiled_step in zip(steps, fast, strict=True):
                x = rand(i, 32, 4)
                kept.append((compiled_step(x), step(x)))
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
    assert replays() >= 4 * 5


@pytest.mark.thorough
@on_accelerators
def test_results_that_die_leave_their_memory(device: torch.device, rand: Rand) -> None:
    fast = compiled(lambda x: (x * 2, x + 1))
    with torch.no_grad():
        for i in range(6):
            fast(rand(i, 256, 64))
        before = allocated(device)
        kept = [fast(rand(i, 256, 64)) for i in range(8)]
        assert allocated(device) >= before + 8 * 2 * 256 * 64 * 4
        alive = weakref.ref(kept[0][0])
        kept.clear()
        gc.collect()
        assert alive() is None
        assert allocated(device) <= before


def parameter(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return model.weight, model(x)


def part_of_a_parameter(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return model.weight[1:].t(), model(x)


def constant(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(3, device=x.device), model(x)


def same_storage(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x)
    return y, y.view(-1)


@on_accelerators
@pytest.mark.parametrize("f", [parameter, part_of_a_parameter, constant, same_storage])
def test_results_that_alias(device: torch.device, rand: Rand, f: F) -> None:
    model = nn.Linear(4, 4).to(device).requires_grad_(False)
    model.weight.copy_(rand(70, 4, 4))
    model.bias.copy_(rand(71, 4))
    fast = compiled(lambda x: f(model, x))
    same_calls(lambda x: f(model, x), fast, lambda i: (rand(i, 2, 4),))
    first, _ = fast(rand(1, 2, 4))
    if f is parameter:
        assert first is model.weight
    if f is part_of_a_parameter:
        assert first.data_ptr() == model.weight[1:].data_ptr()
    if f is constant:
        first.add_(1)  # the caller's own: the next call's is 1 again
        torch.testing.assert_close(fast(rand(1, 2, 4))[0], torch.ones(3, device=device))
    if f is same_storage:
        y, flat = fast(rand(1, 2, 4))
        y.zero_()
        assert not flat.count_nonzero()
    assert replays() >= 5


# Arguments and state.


@on_accelerators
def test_a_parameter_that_is_not_aligned(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(3, 3).to(device).requires_grad_(False)
    whole = rand(50, 10)
    model.weight = nn.Parameter(whole[1:].view(3, 3), requires_grad=False)
    model.bias.copy_(rand(51, 3))
    same_calls(model, compiled(model), lambda i: (rand(i, 2, 3),))
    assert replays() == 5


@on_accelerators
def test_a_tensor_of_a_closure_is_written_and_replaced(device: torch.device, rand: Rand) -> None:
    table = rand(50, 8)

    def f(x: Tensor) -> Tensor:
        return x + table

    fast = compiled(f)
    with torch.no_grad():
        for i in range(18):
            if i == 6:
                table.mul_(2)
            if i == 12:
                table = rand(51, 8)
            torch.testing.assert_close(fast(rand(i, 8)), f(rand(i, 8)))
    assert replays() >= 8


@on_accelerators
def test_complex_numbers_and_their_conjugates(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 + x.conj()

    def arguments(i: int) -> tuple[Tensor]:
        x = torch.complex(rand(i, 6), rand(i + 50, 6))
        return (x.conj() if i % 2 else x,)

    with torch.no_grad():
        same_calls(f, compiled(f, codegen="eager"), arguments, calls=12)


@on_accelerators
def test_host_tensors_and_numbers_among_the_arguments(device: torch.device, rand: Rand) -> None:
    """An empty one of the host is used for nothing; a larger one makes a part of its own."""

    def f(x: Tensor, empty: Tensor, sizes: list[int]) -> Tensor:
        return x.view(sizes) * 2 + empty.numel()

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 8), torch.empty(0), [2, 4]))
    assert replays() == 5

    def g(x: Tensor, table: Tensor) -> Tensor:
        return (x * 2 + table.to(x.device)).relu()

    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL312"):
        same_calls(g, compiled(g), lambda i: (rand(i, 8), torch.arange(8.0) + i))


@on_accelerators
def test_shapes_that_depend_on_data(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        return y[y > 0].sum() + y.relu()

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_calls(f, compiled(f), lambda i: (rand(i, 40),))
    assert replays() >= 5


@on_cuda  # on the emulated device torch's own backends do not run it either
def test_an_operator_that_writes_its_argument(device: torch.device, rand: Rand) -> None:
    with torch.library._scoped_library("onelaunch_tests", "FRAGMENT") as library:
        library.define("add_two_(Tensor(a!) x) -> ()")
        library.impl("add_two_", lambda x: [None, x.add_(2)][0], "CompositeExplicitAutograd")
        torch.library.register_fake("onelaunch_tests::add_two_", lambda x: None, lib=library)

        def f(x: Tensor) -> Tensor:
            y = x * 2
            torch.ops.onelaunch_tests.add_two_(x)
            return x + y

        with torch.no_grad():
            same_calls(f, compiled(f), lambda i: (rand(i, 8),))
        assert replays() == 5


@on_accelerators
def test_many_functions_of_one_code(device: torch.device, rand: Rand) -> None:
    def times(n: int) -> F:
        return lambda x: x * n + n

    with torch.no_grad():
        for n in range(6):
            same_calls(times(n), compiled(times(n)), lambda i: (rand(i, 8),), calls=5)
    assert replays() >= 6 * 2  # more where the number is followed


# Modes.


@pytest.mark.cpu
@on_accelerators
def test_grad_mode_inference_mode_and_autocast(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.Linear(8, 8))
    fast = compiled(other)
    modes: list[Any] = [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast(device.type, torch.bfloat16),
    ]
    if device.type == "tape":
        modes.pop()  # it has no autocast of its own
    for i in range(8 * len(modes)):
        with modes[i % len(modes)]():
            expected, got = model(rand(i, 4, 8)), fast(rand(i, 4, 8))
        torch.testing.assert_close(got, expected)
        assert got.dtype == expected.dtype
        assert got.requires_grad == expected.requires_grad
        assert got.is_inference() == expected.is_inference()
    assert replays() >= 4 * len(modes)


@on_accelerators
def test_arguments_that_need_a_gradient_by_turns(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * x).sum(1)

    fast = compiled(f)
    for i in range(20):
        x, y = rand(i, 4, 3).requires_grad_(i % 2 == 0), rand(i, 4, 3).requires_grad_(i % 2 == 0)
        expected, got = f(x), fast(y)
        torch.testing.assert_close(got, expected)
        if i % 2 == 0:
            expected.sum().backward()
            got.sum().backward()
            torch.testing.assert_close(y.grad, x.grad)
    assert replays() >= 8


@on_accelerators
def test_random_numbers_of_the_eager_kernels(device: torch.device, rand: Rand) -> None:
    """The same numbers as in eager, and the generator is left where eager leaves it."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand_like(x) + x, torch.bernoulli(torch.full_like(x, 0.5))

    fast = compiled(f, codegen="eager")
    drawn: list[list[Tensor]] = []
    for run in (f, fast):
        torch.manual_seed(5)
        with torch.no_grad():
            drawn.append([t for i in range(8) for t in (*run(rand(i, 32)), torch.rand(1))])
    for got, expected in zip(drawn[1], drawn[0], strict=True):
        torch.testing.assert_close(got, expected)
    assert replays() == 5


# Training.


@on_accelerators
def test_forwards_whose_backward_never_comes(device: torch.device, rand: Rand) -> None:
    """Their recordings are free again once their results are gone."""
    model, other = two_models(device, lambda: nn.Linear(8, 8))
    fast = compiled(other)
    for i in range(24):
        torch.testing.assert_close(fast(rand(i, 4, 8)), model(rand(i, 4, 8)))
    assert len(recordings()) == 1
    assert replays() >= 18


@on_accelerators
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_hooks_between_graphs_and_on_results(device: torch.device, rand: Rand) -> None:
    def run(f: F) -> list[Tensor]:
        seen: list[Tensor] = []
        for i in range(8):
            x = rand(i, 4, 3).requires_grad_()
            y = f(x)
            y.register_hook(lambda grad: seen.append(grad.clone()))
            x.register_hook(lambda grad: grad * 2)
            y.square().sum().backward()
            seen.append(x.grad)
        return seen

    def f(x: Tensor) -> Tensor:
        y = x * 3
        between(y)
        return y.relu() + 1

    @torch.compiler.disable
    def between(y: Tensor) -> None:
        y.register_hook(lambda grad: grad + 1)

    for got, expected in zip(run(compiled(f)), run(f), strict=True):
        torch.testing.assert_close(got, expected)
    assert replays() >= 8


@on_accelerators
def test_gradients_of_some_results_alone(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))

    def both(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m[0](x), m[1](x)

    fast = compiled(both)
    for i in range(14):
        for m, run in ((model, both), (other, fast)):
            m.zero_grad()
            run(m, rand(i, 4, 4))[i % 2].square().sum().backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(
                q.grad if q.grad is not None else torch.zeros_like(q),
                p.grad if p.grad is not None else torch.zeros_like(p),
                rtol=1e-3,
                atol=1e-3,
            )
    assert replays() >= 8


@on_accelerators
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of the checkpoint's generators
def test_a_checkpoint_inside(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))

    def f(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: m[1](m[0](y).relu()), x, use_reentrant=False)

    fast = compiled(f)
    for i in range(8):
        for m, run in ((model, f), (other, fast)):
            m.zero_grad()
            run(m, rand(i, 3, 4)).square().mean().backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3)
    assert replays() >= 5


@on_accelerators
def test_training_at_sizes_that_change(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    fast = compiled(other)
    for i in range(24):
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            run(rand(i, 3 + i % 3, 4)).square().mean().backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3)
    assert replays() >= 9


@on_accelerators
def test_a_step_of_an_optimizer(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (model, other)]
    steps = [optimizers[0].step, compiled(optimizers[1].step)]
    for i in range(10):
        for m, step in zip((model, other), steps, strict=True):
            for number, p in enumerate(m.parameters()):
                p.grad = rand(i + 50 * number, *p.shape)
            step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q, p)
    assert replays() >= 4


# Threads, streams, and the end.


@on_cuda
def test_streams(device: torch.device, rand: Rand) -> None:
    """Two graphs of one pool, launched from two streams by turns, each result used on its own."""

    def f(x: Tensor) -> Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y.relu() + 1

    fast = compiled(f)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    current = torch.cuda.current_stream(device)
    found: list[tuple[int, Tensor]] = []
    with torch.no_grad():
        for i in range(24):
            x, stream = rand(i, 128, 128), streams[i % 2]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                found.append((i, fast(x) * 2))
            x.record_stream(stream)
        for stream in streams:
            current.wait_stream(stream)
        for i, got in found:
            torch.testing.assert_close(got, f(rand(i, 128, 128)) * 2)
    assert replays() >= 2 * 18


@on_cuda
def test_a_recording_made_on_another_stream(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).sum(0)

    fast, side = compiled(f), torch.cuda.Stream(device)
    with torch.no_grad():
        with torch.cuda.stream(side):
            for i in range(5):
                fast(rand(i, 64, 64))
        torch.cuda.current_stream(device).wait_stream(side)
        same_calls(f, fast, lambda i: (rand(i, 64, 64),))
    assert replays() == 2 + 8
