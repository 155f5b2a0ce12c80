"""What else PyTorch's tests ask of its CUDA graph trees, asked of the backend of `torch.compile`.

Paths that change after they were recorded, results that share memory, odd results and gradients,
and the streams that all of it runs on. The rest is in test_backend_trees.py and test_backend.py.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn

from onelaunch.dynamo import onelaunch
from onelaunch.dynamo.backend import regions

from .drop_in import allocated, on_accelerators, on_cuda
from .regions import F, compiled, recordings, replays, same_calls, two_models
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh", "whole_numbers")


# Results that share memory with a weight.


@on_accelerators
@pytest.mark.parametrize("kind", ["parameter", "argument"])
def test_chunks_of_what_requires_grad(device: torch.device, rand: Rand, kind: str) -> None:
    """Compiled code returns them by a node of its own: they are views all the same."""
    own = nn.Parameter(rand(99, 8, 4))

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (own if kind == "parameter" else w).chunk(2)
        return x @ q.t(), k

    fast = compiled(f, codegen="eager")
    for i in range(6):
        w = own if kind == "parameter" else rand(50 + i, 8, 4).requires_grad_()
        y, k = fast(rand(i, 3, 4), w)
        expected = torch.autograd.grad(sum(t.square().sum() for t in f(rand(i, 3, 4), w)), w)
        got = torch.autograd.grad(y.square().sum() + k.square().sum(), w)
        torch.testing.assert_close(got, expected)
        with torch.no_grad():
            w.add_(1)
            assert torch.equal(k, w[4:])
            k.add_(1)
            assert torch.equal(k, w[4:])
    assert replays() >= 2


# Paths through the graphs of a program.


@on_accelerators
def test_a_branch_on_data_goes_the_other_way(device: torch.device, rand: Rand) -> None:
    """After the first way is recorded, and at another size; then by turns."""

    def f(x: Tensor) -> Tensor:
        y = x + x
        if y.sum() > 0:
            return y + 10
        return y - 10

    ways = [-1] * 6 + [1] * 6 + [-1, 1] * 3
    fast = compiled(f)
    with torch.no_grad():
        same_calls(f, fast, lambda i: (rand(i, 8).abs().add(1) * ways[i],), calls=18)
        same_calls(f, fast, lambda i: (rand(i, 5).abs().add(1) * ways[i],), calls=18)
    assert replays() >= 2 * 2 * 9


@on_accelerators
def test_a_function_is_called_twice_between_breaks(device: torch.device, rand: Rand) -> None:
    def cube(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * x * x

    def f(x: Tensor) -> Tensor:
        y = cube(x)
        z = cube(y)
        return y + z

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 4, 4),))
    assert replays() >= 2 * 5


@on_accelerators
def test_a_compiled_function_writes_the_result_of_another(device: torch.device, rand: Rand) -> None:
    """And a tensor of eager's at the same place of the program."""

    def make(x: Tensor) -> Tensor:
        return x + 1

    def write(x: Tensor) -> Tensor:
        return x.add_(2)

    def both(first: F, second: F) -> F:
        return lambda x, clone: second(first(x).clone() if clone else first(x))

    fast = both(compiled(make), compiled(write))
    with torch.no_grad():
        same_calls(both(make, write), fast, lambda i: (rand(i, 4), i % 3 == 2), calls=12)
    assert replays() >= 2 * 8


@on_accelerators
def test_the_way_out_of_a_write(device: torch.device, rand: Rand) -> None:
    """`out=` of another type, and of a size that does not fit."""

    def f(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return torch.logical_xor(x, y, out=out)

    def arguments(i: int) -> tuple[Tensor, Tensor, Tensor]:
        return rand(i, 4, 6), rand(i + 50, 4, 6), rand(i, 4, 6).half()

    with torch.no_grad():
        same_calls(f, compiled(f), arguments)
    assert replays() >= 4


@on_accelerators
def test_no_more_is_compiled(device: torch.device, rand: Rand) -> None:
    """`torch._dynamo.run` leaves out the compiler, and no recording."""

    def f(x: Tensor) -> Tensor:
        return x * 2 + 1

    fast = compiled(f)
    with torch.no_grad():
        fast(rand(1, 8))
        same_calls(f, torch._dynamo.run(fast), lambda i: (rand(i, 8),))
        same_calls(f, torch._dynamo.run(fast), lambda i: (rand(i, 3, 3),))  # not compiled: eager
    assert replays() == 6


@on_accelerators
def test_steps_that_are_marked_as_for_the_trees(device: torch.device, rand: Rand) -> None:
    """`cudagraph_mark_step_begin` frees nothing here."""

    def f(x: Tensor) -> Tensor:
        return x * 3

    fast = compiled(f)
    kept: list[Tensor] = []
    with torch.no_grad():
        for i in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            kept.append(fast(rand(i, 8)))
    for i, got in enumerate(kept):
        torch.testing.assert_close(got, f(rand(i, 8)))
    assert replays() == 5


# Results.


@pytest.mark.thorough
@on_accelerators
def test_results_that_share_memory_die_one_by_one(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y[0], y[1]

    fast = compiled(f)
    with torch.no_grad():
        for i in range(6):
            fast(rand(i, 2, 4096))
        x = rand(7, 2, 4096)
        before = allocated(device)
        first, second = fast(x)
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        held = allocated(device)
        del first
        gc.collect()
        assert allocated(device) == held > before
        torch.testing.assert_close(second, x[1] + 1)
        del second
        assert allocated(device) <= before


@on_accelerators
def test_views_across_a_break_share_memory(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x * 2, x * 3
        first, second = y[0], z[0]
        torch._dynamo.graph_break()
        return y, first, y[2:], z, second, z[3:]

    fast = compiled(f)
    with torch.no_grad():
        same_calls(f, fast, lambda i: (rand(i, 5, 5),))
        results = fast(rand(9, 5, 5))
    storages = [t.untyped_storage().data_ptr() for t in results]
    assert len(set(storages[:3])) == len(set(storages[3:])) == 1
    assert storages[0] != storages[3]
    assert replays() >= 5


@on_accelerators
def test_views_of_a_parameter_that_trains(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, lambda: nn.Linear(4, 4))

    def f(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        return m.weight.T @ x, m.weight.T, m.weight[0:2]

    fast = compiled(f)
    for i in range(8):
        for m, run in ((model, f), (other, fast)):
            m.zero_grad()
            product, whole, part = run(m, rand(i, 4, 3))
            assert whole.untyped_storage().data_ptr() == m.weight.untyped_storage().data_ptr()
            assert part.untyped_storage().data_ptr() == m.weight.untyped_storage().data_ptr()
            (product.square().sum() + whole.sum() + part.square().sum()).backward()
        torch.testing.assert_close(other.weight.grad, model.weight.grad, rtol=1e-4, atol=1e-4)
    assert replays() == 5


@on_accelerators
def test_results_without_elements(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        empty = torch.zeros(0, device=x.device)
        return x + 1, empty, torch.zeros(100, device=x.device)[0:0], x[:0] * 2

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 4),))
        same_calls(f, compiled(f), lambda i: (rand(i, 0),))
    assert replays() >= 5


@on_accelerators
def test_a_result_on_the_host(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ x, torch.tensor([])

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_calls(f, compiled(f), lambda i: (rand(i, 4, 4),))
    assert replays() >= 4


@on_accelerators
@pytest.mark.parametrize("what", ["a number", "its use", "a shape", "its use there"])
def test_reads_that_dynamo_captures(device: torch.device, rand: Rand, what: str) -> None:
    """They make a part of their own, with the symbols that they bring in."""

    def f(x: Tensor) -> Any:
        y = x * 2
        if what.endswith("there") or what == "a shape":
            found = y.nonzero()
            return found if what == "a shape" else (found + 1).sum(0) + y.sum()
        n = y.sum().item()
        return n if what == "a number" else (y * 3 + n).relu()

    captured = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch.no_grad(), dynamo_config.patch(captured), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_calls(f, compiled(f), lambda i: (rand(i % 3, 4),), calls=16)
    assert replays() >= 13  # of what comes before
    if what.startswith("its"):
        assert len(recordings()) >= 2


def doubled_where_large(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0.5] *= 2
    return y


def summed_where_large(x: Tensor) -> Tensor:
    y = x * 2
    large = y > 0.5
    return y.index_put((large,), y[large].cumsum(0)) + 1


def histogram(x: Tensor) -> Tensor:
    y = x * 2
    return torch.histc(y, 4, min=y.min().item(), max=y.max().item()) + 1


def written_over_a_view(x: Tensor) -> Tensor:
    large = (x * 2)[x > 0.5]
    large[1:].add_(1)
    return large.sum() + x


@on_accelerators
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "f", [doubled_where_large, summed_where_large, histogram, written_over_a_view]
)
def test_sizes_and_numbers_that_no_rule_asks_for(f: F, dynamic: bool | None, rand: Rand) -> None:
    """They are symbols when the graph is compiled, and the data says them."""
    if f is written_over_a_view and torch.__version__ < (2, 13):
        pytest.skip("torch 2.11: Inductor fails with its own backend too: shape error in scatter")
    captured = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch.no_grad(), dynamo_config.patch(captured), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = torch.compile(f, backend=onelaunch, dynamic=dynamic)
        same_calls(f, fast, lambda i: (rand(i, 6 + (i // 6 if dynamic else 0), 8),), calls=10)
    assert replays() >= 4


# Gradients.


@on_accelerators
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_with_create_graph(device: torch.device, rand: Rand) -> None:
    """Accumulates in new memory then, as in eager, and where it is else."""

    def f(x: Tensor) -> Tensor:
        return x + 2

    fast = compiled(f)
    for i in range(16):
        x = rand(i, 5, 5).requires_grad_()
        y = fast(x)
        y.backward(rand(i + 50, 5, 5), retain_graph=True)
        assert x.grad is not None
        first, before = x.grad, x.grad.clone()
        y.backward(rand(i + 50, 5, 5), create_graph=i % 2 == 1)
        torch.testing.assert_close(x.grad, before * 2)
        torch.testing.assert_close(first, before if i % 2 else before * 2)
    assert replays() >= 8


@on_accelerators
def test_gradients_of_other_strides(device: torch.device, rand: Rand) -> None:
    """Expanded, transposed and sliced: what a backward gets is not as its forward has foreseen."""

    def f(x: Tensor) -> Tensor:
        return x * x * x

    kinds: list[F] = [
        lambda seed: rand(seed, 6, 6),
        lambda seed: rand(seed, 6).expand(6, 6),
        lambda seed: rand(seed, 6, 6).t(),
        lambda seed: rand(seed, 6, 12)[:, ::2],
    ]
    fast = compiled(f)
    for i in range(32):
        x, y = rand(i, 6, 6).requires_grad_(), rand(i, 6, 6).requires_grad_()
        f(x).backward(kinds[i // 2 % 4](i + 90))
        fast(y).backward(kinds[i // 2 % 4](i + 90))
        torch.testing.assert_close(y.grad, x.grad)
    assert replays() >= 24


@on_accelerators
def test_sizes_among_the_results_of_training(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> tuple[Tensor, int]:
        x = torch.cat([x, x])
        return torch.addmm(x, x, x).relu(), x.size(0)

    fast = torch.compile(f, backend=onelaunch, dynamic=True)
    for i in range(18):
        shape = (2 + i // 6, 4 + 2 * (i // 6))
        x, y = rand(i, *shape).requires_grad_(), rand(i, *shape).requires_grad_()
        (expected, n), (got, m) = f(x), fast(y)
        torch.testing.assert_close(got, expected)
        assert n == m
        expected.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(y.grad, x.grad)
    assert replays() >= 3 * 2


# Modes and streams.


@on_accelerators
def test_convolutions_that_are_tried_out(device: torch.device, rand: Rand) -> None:
    """Under `cudnn.benchmark`, which times kernels in the first call of a size."""
    model, other = two_models(device, lambda: nn.Conv2d(3, 4, 3))
    fast = compiled(other)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        for i in range(8):
            for m, run in ((model, model), (other, fast)):
                m.zero_grad()
                run(rand(i, 2, 3, 8, 8)).square().mean().backward()
            torch.testing.assert_close(other.weight.grad, model.weight.grad, rtol=1e-3, atol=1e-2)
    assert replays() >= 4


@on_cuda
def test_autocast_does_not_keep_a_result(device: torch.device, rand: Rand) -> None:
    fast = compiled(lambda x: x + x)
    for i in range(8):
        got = fast(rand(i, 4, 4).add(1).requires_grad_())
        other = torch.ones(4, 4, device=device)
        with torch.autocast("cuda"):
            before = got @ other
            got.detach().zero_()
            assert not (got @ other).count_nonzero()
            assert before.count_nonzero()


@on_cuda
def test_the_first_calls_on_a_stream_of_ones_own(device: torch.device, rand: Rand) -> None:
    """Warm-ups and the capture run on another one; what is used at once is complete."""

    def f(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ x).clamp(-1, 1)
        return x

    fast, side = compiled(f, codegen="eager"), torch.cuda.Stream(device)
    x = rand(1, 1024, 1024)
    expected = f(x) + 1
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(side):
        found = [fast(x) + 1 for _ in range(8)]
    torch.cuda.current_stream(device).wait_stream(side)
    for got in found:
        torch.testing.assert_close(got, expected)
    assert replays() == 5


@on_cuda
def test_a_backward_on_another_stream(device: torch.device, rand: Rand) -> None:
    """It runs on the stream of its forward, whatever the stream of its call."""
    model, other = two_models(device, lambda: nn.Linear(64, 64))
    fast, side = compiled(other), torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)
    for i in range(10):
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            x = rand(i, 64, 64)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                loss = run(x).square().mean()
            if i % 2:
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    loss.backward()
            else:
                current.wait_stream(side)
                loss.backward()
            current.wait_stream(side)
            x.record_stream(side)
        torch.testing.assert_close(other.weight.grad, model.weight.grad, rtol=1e-3, atol=1e-3)
    assert replays() >= 6


@on_cuda
def test_recordings_share_one_stream(device: torch.device, rand: Rand) -> None:
    """However many graphs and callers' streams: their pool has segments of one stream."""

    def held() -> set[tuple[Any, int]]:
        segments: Any = torch.cuda.memory_snapshot()
        pools = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
        return {(tuple(s["segment_pool_id"]), s["stream"]) for s in pools}

    before = held()
    fast = [compiled(lambda x, n=n: (x * n).relu()) for n in range(3)]
    with torch.no_grad():
        for i in range(6):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for run in fast:
                    run(rand(i, 64))
            torch.cuda.synchronize()
    assert len({stream for _, stream in held() - before}) <= 1
    assert replays() >= 3 * 2


# The end.


@pytest.mark.thorough
@on_accelerators
@pytest.mark.parametrize("first", ["results", "recordings"])
def test_all_memory_comes_back(device: torch.device, rand: Rand, first: str) -> None:
    """Whichever goes first: the results, or what made them."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 3
        torch._dynamo.graph_break()
        return y, (y * 10).relu()

    left: list[int] = []
    for _ in range(2):
        fast = compiled(f)
        with torch.no_grad():
            kept = [fast(rand(i, 512)) for i in range(8)]
        assert len(recordings()) == 2
        if first == "results":
            kept.clear()
        torch._dynamo.reset()
        del fast
        gc.collect()
        assert not regions.graphs()
        for i, (y, z) in enumerate(kept):
            torch.testing.assert_close(
                (y, z), (rand(i, 512) + 3, (rand(i, 512) + 3).mul(10).relu())
            )
        kept.clear()
        y = z = None
        left.append(allocated(device))
    assert left[1] <= left[0]
