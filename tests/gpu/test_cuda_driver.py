"""The CUDA driver by itself: ports, order, failures, random numbers, rebinding, memory, cost."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from onelaunch.driver.cuda import CudaDriver, capabilities
from onelaunch.driver.cuda.memory import CudaPool
from tests.gpu.recorded import (
    DEVICE,
    Recorded,
    check_displaced_and_empty_ports,
    check_random_numbers,
    mlp,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]


def test_this_machine_has_all() -> None:
    found = capabilities()
    assert (found.records, found.rebind, found.why_not) == (True, True, "")
    print("\n", found.versions)


def test_each_of_2000_queued_launches_has_its_own_input_and_output(driver, pool) -> None:
    graphed = Recorded(
        driver, lambda x: (x * 2 + 1).relu(), [torch.randn(257, 33, device=DEVICE)], pool
    )
    inputs = torch.randn(2000, 257, 33, device=DEVICE)
    outputs = [graphed(x) for x in inputs]
    assert torch.equal(torch.stack(outputs), (inputs * 2 + 1).relu())
    assert graphed.graph.nodes == 5
    assert graphed.graph.travels == ("node",)


@pytest.mark.parametrize("travel", ["copy", "fill"])
def test_copies_and_fills_happen_before_the_launch(driver, pool, travel) -> None:
    if travel == "fill":
        sources = [torch.tensor(v, dtype=torch.float64) for v in (1.5, -2.0)]
    else:
        sources = [torch.randn(8, 1, device=DEVICE).expand(8, 8) for _ in range(2)]
    graphed = Recorded(driver, lambda x: x.to(DEVICE) * 2, [sources[0]], pool, travel)
    for source in sources:
        assert torch.equal(graphed(source), source.to(DEVICE) * 2)


def test_displaced_and_empty_ports(driver, pool) -> None:
    check_displaced_and_empty_ports(driver, pool)


def test_a_recording_without_nodes(driver, pool) -> None:
    graph, result = driver.capture(lambda capture: 7, pool)
    graph.launch((), ())
    assert result == 7


def test_warm_up_is_ordered_with_the_callers_stream(driver) -> None:
    @dataclass
    class Result:
        doubled: Tensor
        rest: dict[str, list[Tensor]]

    weight = torch.randn(4096, 4096, device=DEVICE) / 64
    with torch.cuda.stream(torch.cuda.Stream()):
        x = weight
        for _ in range(10):
            x = x @ weight
        result = driver.run_on_capture_stream(lambda: Result(x * 2, {"a": [x + 1]}), DEVICE)
        doubled, more = result.doubled * 1, result.rest["a"][0] * 1
        del result
        torch.full_like(x, 9.0)
        assert torch.equal(doubled, x * 2)
        assert torch.equal(more, x + 1)


def test_streams_in_turn_with_a_slow_kernel(driver, pool) -> None:
    weight = torch.randn(2048, 2048, device=DEVICE) / 45

    def slow(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x @ weight
        return x

    big, small = (
        Recorded(driver, slow, [torch.randn(2048, 2048, device=DEVICE)], pool),
        Recorded(driver, lambda x: slow(x) + 1, [torch.randn(4, 2048, device=DEVICE)], pool),
    )
    inputs = [torch.randn(n, 2048, device=DEVICE) for n in (2048, 4) * 6]
    expected = [slow(x) if len(x) > 4 else slow(x) + 1 for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            got.append((big if len(x) > 4 else small)(x))
    torch.cuda.synchronize()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_thread_that_has_never_touched_cuda(driver, pool) -> None:
    x, target = torch.randn(16, device=DEVICE), torch.zeros(16, device=DEVICE)
    graphed = Recorded(driver, lambda x: x + 1, [x], pool)
    torch.cuda.synchronize()
    thread = threading.Thread(target=graphed.graph.launch, args=((x,), (target,)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(target, x + 1)


def test_8_threads_each_on_a_stream_with_captures_and_resets_meanwhile(driver, pool) -> None:
    model = mlp()
    shared = [
        Recorded(driver, model, [torch.randn(n, 1024, device=DEVICE)], pool) for n in (1, 8, 32, 64)
    ]
    zeros = torch.zeros(512, device=DEVICE)
    noisy = [
        Recorded(driver, lambda x: torch.rand_like(x) + x, [zeros], p)
        for p in (pool, driver.new_pool(DEVICE))
    ]
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        own: Recorded | None = None
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(150):
                graphed = shared[(step + seed) % 4]
                size = graphed.args[0].shape
                x = torch.randn(size, device=DEVICE, generator=generator)
                if not torch.allclose(graphed(x), model(x), atol=1e-4):
                    wrong.append(f"thread {seed} step {step}: shared")
                drawn = noisy[seed % 2](torch.full_like(zeros, float(seed))) - seed
                if drawn.min() < 0 or drawn.max() > 1 or drawn.unique().numel() < 400:
                    wrong.append(f"thread {seed} step {step}: random")
                if step % 50 == 10:
                    own = Recorded(
                        driver, model, [x], pool if seed % 2 else driver.new_pool(DEVICE)
                    )
                if own is not None and not torch.allclose(
                    own(own.args[0]), model(own.args[0]), atol=1e-4
                ):
                    wrong.append(f"thread {seed} step {step}: own")
                if own is not None and step % 50 == 40:
                    own.graph.reset()
                    own = None
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("shared", [True, False])
def test_many_captures_and_resets_hold_no_memory(driver, pool, shared) -> None:
    model, x = mlp(), torch.randn(64, 1024, device=DEVICE)
    kept = Recorded(driver, model, [x], pool)

    def cycles(n: int) -> tuple[int, int, int]:
        for _ in range(n):
            graphed = Recorded(driver, model, [x], pool if shared else driver.new_pool(DEVICE))
            graphed(x)
            del graphed.static
            graphed.graph.reset()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pool.memory_bytes

    assert cycles(5) == cycles(60)
    torch.testing.assert_close(kept(x), model(x))


def test_reset_leaves_others_and_gives_memory_back(driver) -> None:
    def once() -> None:
        pool = driver.new_pool(DEVICE)
        weight = torch.randn(1024, 1024, device=DEVICE)
        x = torch.randn(4096, 1024, device=DEVICE)
        first = Recorded(driver, lambda x: x @ weight + 1, [x], pool)
        second = Recorded(driver, lambda x: (x @ weight).relu(), [x], pool)
        assert first.graph.memory_bytes > x.nbytes
        assert pool.memory_bytes >= first.graph.memory_bytes + second.graph.memory_bytes
        expected = second(x)
        first.graph.reset()
        first.graph.reset()
        with pytest.raises(RuntimeError, match="reset"):
            first(x)
        for _ in range(10):
            assert torch.equal(second(x), expected)
        launch = second.graph.launch
        del first.static, second.static
        second.graph.reset()
        with pytest.raises(RuntimeError, match="reset"):
            launch((x,), (expected,))
        assert pool.memory_bytes == 0

    def held() -> tuple[int, int]:
        torch.cuda.synchronize()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    once()
    before = held()
    for _ in range(3):
        once()
    # Less, where what an earlier test left has gone meanwhile.
    assert all(now <= then for now, then in zip(held(), before, strict=True))


def test_random_numbers_are_those_of_eager(driver, pool) -> None:
    check_random_numbers(driver, pool)


def test_a_launch_that_fails_leaves_the_recording_usable(driver, pool) -> None:
    x = torch.randn(64, device=DEVICE)
    graphed = Recorded(driver, lambda x: x + 1, [x], pool)
    with pytest.raises(AttributeError):
        graphed.graph.launch((x,), (None,))
    with pytest.raises(IndexError):
        graphed.graph.launch((), ())
    assert torch.equal(graphed(x), x + 1)


def test_a_recording_that_is_dropped_gives_its_memory_back_at_once(driver) -> None:
    def once() -> None:
        pool = driver.new_pool(DEVICE)
        graphed = Recorded(driver, lambda x: x + 1, [torch.randn(1 << 22, device=DEVICE)], pool)
        graphed(*graphed.args)
        assert pool.memory_bytes > 1 << 24

    once()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gc.disable()
    once()
    gc.enable()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_a_reset_keeps_the_unused_memory_of_the_ordinary_allocator(driver, pool) -> None:
    graphed = Recorded(driver, lambda x: x + 1, [torch.randn(1 << 22, device=DEVICE)], pool)
    del graphed.static
    torch.empty(1 << 28, device=DEVICE)
    held, taken = torch.cuda.memory_reserved(), pool.memory_bytes
    assert taken > 1 << 24
    graphed.graph.reset()
    assert torch.cuda.memory_reserved() == held - taken
    assert pool.memory_bytes == 0


def test_a_reset_does_not_disturb_a_capture_of_another_thread(driver, pool) -> None:
    graphed = Recorded(driver, lambda x: x + 1, [torch.randn(1 << 22, device=DEVICE)], pool)
    del graphed.static
    x = torch.ones(8, device=DEVICE)
    torch.cuda.synchronize()
    foreign = torch.cuda.CUDAGraph()
    with torch.cuda.graph(foreign):  # in global mode, the strictest
        y = x * 2
        thread = threading.Thread(target=graphed.graph.reset)
        thread.start()
        thread.join()
        y = y + 1
    foreign.replay()
    assert torch.equal(y, x * 3)
    assert pool.memory_bytes == 0


def test_streams_that_forked_are_joined(driver: CudaDriver, pool: CudaPool) -> None:
    """As FSDP's, which wait for the step's stream once more when they are done."""
    x, side, idle = torch.ones(8, device=DEVICE), torch.cuda.Stream(), torch.cuda.Stream()

    def body(capture: object) -> Tensor:
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y + 1
        driver.join([side, idle])
        return z

    with driver.exclusive():
        graph, z = driver.capture(body, pool)
    x.fill_(5)
    graph.launch((), ())
    assert torch.equal(z, torch.full_like(z, 11))
