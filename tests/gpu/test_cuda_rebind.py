"""Inputs that kernels read where the caller has them, and what a launch costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onelaunch.driver.cuda.graph import CudaGraph
from tests.gpu.recorded import DEVICE, Recorded, mlp

pytestmark = pytest.mark.gpu


def bf16_matmuls() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    layers = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    layers = layers.to(DEVICE, torch.bfloat16).requires_grad_(False)
    return layers, lambda: torch.randn(512, 4096, device=DEVICE, dtype=torch.bfloat16)


def convolutions() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    layers = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 3))
    layers = layers.to(DEVICE).eval().requires_grad_(False)
    return layers, lambda: torch.randn(4, 3, 56, 56, device=DEVICE)


def perceptron() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    return mlp(), lambda: torch.randn(32, 1024, device=DEVICE)


def tokens() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    table = nn.Embedding(1000, 64).to(DEVICE).requires_grad_(False)
    return (lambda i: table(i) * 2), lambda: torch.randint(1000, (4, 128), device=DEVICE)


def cloned() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    return (lambda x: x.clone() + x.sin()), lambda: torch.randn(1000, device=DEVICE)


def identity() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    return (lambda x: x), lambda: torch.randn(1000, device=DEVICE)


@pytest.mark.parametrize("make", [perceptron, bf16_matmuls, convolutions, tokens, cloned, identity])
def test_kernels_read_the_input_where_the_caller_has_it(driver, pool, make) -> None:
    fn, example = make()
    graphed = Recorded(driver, fn, [example()], pool)
    copying = graphed.graph.nodes
    x = example()
    expected = graphed(x)
    before = torch.cuda.get_rng_state()
    graph = graphed.rebind()
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert graph.travels == ("rebind",)
    assert graph.nodes <= copying
    assert torch.equal(graphed(x), expected)
    inputs = [example() for _ in range(8)]
    reference = [fn(x) for x in inputs]
    for _ in range(3):
        for x, y in zip([graphed(x) for x in inputs * 40], reference * 40, strict=True):
            torch.testing.assert_close(x, y)
    # What a copying launch of the same kernels gives, from an address that cannot be rebound.
    flat = torch.empty(x_bytes(inputs[0]) + 64, dtype=torch.uint8, device=DEVICE)
    size = inputs[0].itemsize
    shifted = driver.alias(flat, inputs[0].dtype, inputs[0].shape, inputs[0].stride(), size)
    shifted.copy_(inputs[0])
    assert torch.equal(graphed(shifted), graphed(inputs[0]))


def x_bytes(x: Tensor) -> int:
    return x.numel() * x.itemsize


def test_an_input_in_the_pools_own_memory_is_copied_first(driver, pool) -> None:
    fn, example = perceptron()
    square = nn.Linear(1024, 1024).to(DEVICE).requires_grad_(False)
    first = Recorded(driver, lambda x: square(x).relu(), [example()], pool)
    second = Recorded(driver, lambda x: fn(square(x)), [example()], pool)
    second.rebind()
    first.rebind()
    assert first.graph.travels == second.graph.travels == ("rebind",)
    expected = second(first(example()))
    x = first.static
    expected = fn(square(x.clone()))
    torch.testing.assert_close(second(x), expected)


def test_what_cannot_be_proven_stays_a_node(driver, pool) -> None:
    state = torch.zeros(256, device=DEVICE)
    buffer = torch.randn(256, device=DEVICE)

    def body_fn(x: Tensor, y: Tensor, constant: Tensor) -> Tensor:
        x.add_(1)  # written: rebinding would write to the caller's memory
        state.add_(y)
        return x * y + constant

    ones = torch.ones(256, dtype=torch.int64, device=DEVICE)  # all equal: no poison to tell
    graphed = Recorded(driver, body_fn, [buffer, torch.randn_like(buffer), ones], pool)
    state.zero_()
    graphed.rebind(state=[state])
    assert torch.equal(state, torch.zeros_like(state))
    assert graphed.graph.travels == ("node", "rebind", "node")
    x, y = torch.randn_like(buffer), torch.randn_like(buffer)
    kept = x.clone()
    assert torch.equal(graphed(x, y, ones * 3), (x + 1) * y + 3)
    assert torch.equal(x, kept)
    assert torch.equal(state, y)


def test_a_float_that_a_kernel_makes_an_index(driver, pool) -> None:
    """The proof launches on values of the call alone: any others end the use of the device."""
    table = torch.randn(4, 1024, device=DEVICE)
    graphed = Recorded(
        driver, lambda x, boxes: x + table[boxes[:, 0].long()], [images(), boxes(0)], pool
    )
    graphed.rebind()
    assert graphed.graph.travels == ("rebind", "rebind")
    x, y = images(), boxes(1)
    assert torch.equal(graphed(x, y), x + table[y[:, 0].long()])


def images() -> Tensor:
    return torch.randn(256, 1024, device=DEVICE)


def boxes(first: int) -> Tensor:
    """Rows of the number of an image, and of a place in it, as those of detectors."""
    rows = torch.full((256, 5), 1e9, device=DEVICE)
    rows[:, 0] = torch.arange(first, first + 256, device=DEVICE) % 4
    return rows


# Outputs.


def larger_before() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    """The result lies where something larger was."""

    def fn(x: Tensor) -> Tensor:
        wide = x.repeat(1, 4).sin()
        narrow = wide[:, ::4].contiguous()
        del wide
        return narrow.cos()

    return fn, lambda: torch.randn(512, 1024, device=DEVICE)


def accumulated() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    """The result is set to zero, and then added to."""
    places = torch.arange(1000, device=DEVICE) % 7
    return (
        lambda x: torch.zeros(7, device=DEVICE).index_add_(0, places, x),
        lambda: torch.randint(9, (1000,), device=DEVICE).float(),
    )


def filled() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    """The result is filled by a memset."""

    def fn(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[3:] = x[3:]
        return y

    return fn, lambda: torch.randn(4096, 256, device=DEVICE)


def read_again() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.mul_(y.cumsum(0))
        return y.add_(y.flip(0))

    return fn, lambda: torch.randn(1000, 16, device=DEVICE)


def a_part() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    return (lambda x: torch.cat([x, x + 1])[5:]), lambda: torch.randn(1000, 16, device=DEVICE)


MAKERS = [
    *(perceptron, bf16_matmuls, convolutions, tokens, cloned, identity),
    *(larger_before, accumulated, filled, read_again, a_part),
]
COPIED = (identity, a_part)
"""The result is an argument, or a part of something larger."""
GUARD = 1 << 20


@pytest.mark.parametrize("make", MAKERS)
def test_kernels_write_the_output_where_the_caller_has_it(driver, pool, make) -> None:
    fn, example = make()
    graphed = Recorded(driver, fn, [example()], pool)
    x = example()
    expected = graphed(x)
    graph = graphed.rebind(outputs=0)
    assert make is filled or graph.rebound == (set() if make in COPIED else {0})
    assert torch.equal(graphed(x), expected)
    inputs = [example() for _ in range(8)]
    reference = [graphed(x) for x in inputs]
    for x, y in zip(inputs, reference, strict=True):
        torch.testing.assert_close(y, fn(x))
    for _ in range(3):
        for x, y in zip([graphed(x) for x in inputs * 40], reference * 40, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_written_beside_the_output(driver, pool, make) -> None:
    fn, example = make()
    graphed = Recorded(driver, fn, [example()], pool)
    graphed.rebind(outputs=0)
    nbytes = x_bytes(graphed.static)
    slab = torch.full((GUARD + nbytes + GUARD,), 0x5A, dtype=torch.uint8, device=DEVICE)
    for shift in (0, graphed.static.itemsize):  # the second is copied there
        x = example()
        expected = graphed(x)
        slab.fill_(0x5A)
        start = GUARD + shift
        target = driver.alias(slab, expected.dtype, expected.shape, expected.stride(), start)
        graphed.graph.launch((x,), (target,))
        assert torch.equal(target, expected)
        assert bool((slab[:start] == 0x5A).all())
        assert bool((slab[start + nbytes :] == 0x5A).all())


def test_results_of_one_recording_are_read_by_the_next(driver, pool) -> None:
    fn, example = perceptron()
    square = nn.Linear(1024, 1024).to(DEVICE).requires_grad_(False)
    first = Recorded(driver, lambda x: square(x).relu(), [example()], pool)
    second = Recorded(driver, fn, [example()], pool)
    first.rebind(outputs=0)
    second.rebind(outputs=0)
    assert first.graph.rebound == second.graph.rebound == {0}
    inputs = [example() for _ in range(20)]
    between = [first(x) for x in inputs]
    results = [second(y) for y in between]
    for x, y, z in zip(inputs, between, results, strict=True):
        torch.testing.assert_close(y, square(x).relu())
        torch.testing.assert_close(z, fn(y))


# Cost.


def host_us(call: Callable[[], object], n: int = 400) -> float:
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def wall_us(call: Callable[[], object], n: int = 1000) -> float:
    call()
    rounds = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            call()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / n * 1e6)
    return statistics.median(rounds)


def test_host_time_of_a_launch(driver, pool, capsys) -> None:
    fn, example = perceptron()
    xs = [example() for _ in range(4)]
    copying = Recorded(driver, fn, [xs[0]], pool)
    direct = Recorded(driver, fn, [xs[0]], pool)
    direct.rebind()
    bare = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(bare):
        fn(xs[0])
    targets = [torch.empty_like(copying.static) for _ in range(4)]
    step = 0

    def launching(graph: CudaGraph) -> Callable[[], None]:
        launch = graph.launch

        def call() -> None:
            nonlocal step
            step += 1
            launch((xs[step & 3],), (targets[step & 3],))

        return call

    both = [torch.cuda.Stream(), torch.cuda.Stream()]
    in_place = Recorded(driver, fn, [xs[0]], pool)
    in_place.rebind(outputs=0)
    alternating = Recorded(driver, fn, [xs[0]], driver.new_pool(DEVICE))
    for stream in both:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            alternating(xs[0])
    rows = {
        "bare replay": bare.replay,
        "launch, node in and node out": launching(copying.graph),
        "launch, rebound in and node out": launching(direct.graph),
        "launch, rebound in and out": launching(in_place.graph),
        "launch, node in and out, pool used from several streams": launching(alternating.graph),
    }
    with capsys.disabled():
        print()
        for name, call in rows.items():
            print(f"  {name}: host {host_us(call):.2f} us, wall {wall_us(call):.2f} us")
    assert host_us(rows["launch, node in and node out"]) < host_us(bare.replay) + 8
