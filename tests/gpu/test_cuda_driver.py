"""The CUDA driver by itself: ports, order, failures, random numbers, rebinding, memory, cost."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from onelaunch.driver.cuda import Capabilities, CudaDriver, capabilities, graph, order, record
from onelaunch.driver.cuda import driver as driver_module
from onelaunch.driver.cuda.graph import CudaGraph
from onelaunch.driver.cuda.memory import CudaPool
from onelaunch.errors import CaptureError

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@dataclass
class Recorded:
    """A function as one recording with a port for each argument and one for its result."""

    driver: CudaDriver
    fn: Callable[..., Tensor]
    args: Sequence[Tensor]
    pool: CudaPool
    travel: str = "node"
    generators: Sequence[torch.Generator] = ()
    graph: CudaGraph = field(init=False)
    static: Tensor = field(init=False)

    def __post_init__(self) -> None:
        with self.driver.exclusive(), torch.no_grad():
            self.driver.warmup(lambda: self.fn(*self.args), DEVICE)
            self.graph, self.static = self.driver.capture(self.body, self.pool, self.generators)

    def body(self, capture) -> Tensor:
        inside = []
        for x in self.args:
            if self.travel == "node":
                touched = self.driver.region(x)
                buffer = self.driver.empty(touched.stop - touched.start, DEVICE)
                capture.input(x, buffer, "node")
                inside.append(self.driver.alias(buffer, x.dtype, x.shape, x.stride(), 0))
            else:
                buffer = torch.empty_like(x, device=DEVICE)
                capture.input(x, buffer, self.travel)
                inside.append(buffer)
        out = self.fn(*inside)
        nbytes = self.driver.region(out).stop - self.driver.region(out).start
        capture.output(self.driver.alias(out, torch.uint8, (nbytes,), (1,), 0))
        return out

    def rebind(self, state: Sequence[Tensor] = ()) -> CudaGraph:
        with self.driver.exclusive(), torch.no_grad():
            again = self.driver.rebind(self.graph, self.body, self.pool, state, self.generators)
        assert again is self.graph
        return again

    def __call__(self, *args: Tensor) -> Tensor:
        target = torch.empty_like(self.static)
        self.graph.launch(args, (target,))
        return target


@pytest.fixture
def driver() -> CudaDriver:
    return CudaDriver()


@pytest.fixture
def pool(driver: CudaDriver) -> CudaPool:
    return driver.new_pool(DEVICE)


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def mlp() -> nn.Module:
    layers = [nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(DEVICE).requires_grad_(False)


def test_this_machine_has_all() -> None:
    found = capabilities()
    assert (found.memcpy_nodes, found.rebind, found.why_not) == (True, True, "")
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


def check_displaced_and_empty_ports(driver: CudaDriver, pool: CudaPool) -> None:
    base = torch.randn(64, device=DEVICE)

    def body(capture):
        whole = driver.empty(base.nbytes, DEVICE)
        capture.input(base[16:32], whole, "node", 64)
        nothing = driver.empty(0, DEVICE)
        capture.input(base[:0], nothing, "node")
        capture.output(driver.empty(0, DEVICE))
        capture.output(whole, 64)

    graph, _ = driver.capture(body, pool)
    assert graph.nodes == (2 if graph.travels[0] == "node" else 0)
    source, target = torch.randn(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    graph.launch((source[16:32], source[:0]), (target[:0], target[16:32]))
    assert torch.equal(source, target)


def test_a_recording_without_nodes(driver, pool) -> None:
    graph, result = driver.capture(lambda capture: 7, pool)
    graph.launch((), ())
    assert result == 7


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
                    own = Recorded(driver, torch.sin, [x], pool)
                if own is not None and not torch.equal(own(own.args[0]), own.args[0].sin()):
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
    assert held() == before


def works(driver: CudaDriver, pool: CudaPool) -> None:
    """Eager work, a capture and random numbers, as if nothing had happened."""
    torch.manual_seed(5)
    first = torch.rand(8, device=DEVICE)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(8, device=DEVICE))
    x = torch.randn(32, 1024, device=DEVICE)
    model = mlp()
    graphed = Recorded(driver, lambda x: model(x) + torch.rand_like(x[:, :10]), [x], pool)
    torch.manual_seed(6)
    expected = model(x) + torch.rand_like(x[:, :10])
    torch.manual_seed(6)
    torch.testing.assert_close(graphed(x), expected)
    del graphed.static
    graphed.graph.reset()


def fails_item(x: Tensor) -> Tensor:
    return x + x.sum().item()


def fails_memory(x: Tensor) -> Tensor:
    return x + torch.empty(1 << 42, device=DEVICE)[0]


def fails_itself(x: Tensor) -> Tensor:
    torch.rand_like(x)
    raise ValueError("mine")


def fails_unjoined(x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return x + 1


def swallows(x: Tensor) -> Tensor:
    try:
        x.sum().item()
    except RuntimeError:
        return x + 1
    raise AssertionError("not captured")


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (fails_item, "OL109"),
        (fails_memory, "OL111"),
        (fails_itself, None),
        (fails_unjoined, "OL109"),
        (swallows, "OL109"),
    ],
)
def test_after_a_failed_capture_all_goes_on(driver, pool, fn, code) -> None:
    kept = Recorded(driver, lambda x: x * 3, [torch.randn(64, device=DEVICE)], pool)
    x = torch.randn(64, device=DEVICE)
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()

    def body(capture):
        buffer = driver.empty(x.nbytes, DEVICE)
        capture.input(x, buffer, "node")
        return fn(torch.rand_like(x) + driver.alias(buffer, x.dtype, x.shape, x.stride(), 0))

    with pytest.raises(ValueError if code is None else CaptureError) as caught:
        driver.capture(body, pool)
    if code is None:
        assert str(caught.value) == "mine"
        assert caught.value.__cause__ is None
    else:
        assert caught.value.code == code
        assert isinstance(caught.value.__cause__, RuntimeError)
        if fn in (fails_item, fails_memory):
            assert "test_cuda_driver.py" in caught.value.where
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert torch.equal(kept(x), x * 3)
    works(driver, pool)
    other = driver.new_pool(DEVICE)
    works(driver, other)
    assert other.memory_bytes == 0


def test_random_numbers_are_those_of_eager(driver, pool) -> None:
    check_random_numbers(driver, pool)


def check_random_numbers(driver: CudaDriver, pool: CudaPool) -> None:
    extra = torch.Generator(DEVICE).manual_seed(11)

    def noise(x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(x, 0.4) + torch.randn_like(x)
        return y + torch.rand(x.shape, device=DEVICE, generator=extra)

    x = torch.randn(333, device=DEVICE)
    graphed = Recorded(driver, noise, [x], pool, generators=(extra,))
    plain = Recorded(driver, lambda x: torch.rand_like(x), [x], pool)

    def sequence(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(9)
        extra.manual_seed(10)
        got = []
        for _ in range(5):
            got += [a(x), torch.randn(7, device=DEVICE), b(x)]
        return [*got, torch.cuda.get_rng_state(), extra.get_state()]

    eager = sequence(noise, lambda x: torch.rand_like(x))
    replayed = sequence(graphed, plain)
    for a, b in zip(eager, replayed, strict=True):
        assert torch.equal(a, b)


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


# Without bindings, as on ROCm.


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Capabilities(False, False, "for a test", "")
    stream = torch.cuda.Stream()
    for module in (record, graph, order, driver_module):
        monkeypatch.setattr(module, "capabilities", lambda: nothing)
    for module in (record, driver_module):
        monkeypatch.setattr(module, "capture_stream", lambda index: stream)


@pytest.mark.usefixtures("plain")
class TestWithoutBindings:
    """The same protocol, with copies before and after the replay."""

    def test_launches(self, driver, pool) -> None:
        base = torch.randn(33, 257, device=DEVICE)
        graphed = Recorded(driver, lambda x: (x * 2 + 1).relu(), [base.t()], pool)
        assert graphed.graph.travels == ("copy",)
        inputs = torch.randn(200, 33, 257, device=DEVICE)
        for x, y in zip(inputs, [graphed(x.t()) for x in inputs], strict=True):
            assert torch.equal(y, (x.t() * 2 + 1).relu())
        assert graphed.rebind().travels == ("copy",)

    def test_displaced_and_empty_ports(self, driver, pool) -> None:
        check_displaced_and_empty_ports(driver, pool)

    @pytest.mark.parametrize("fn", [fails_item, fails_memory, fails_itself, swallows])
    def test_after_a_failed_capture_all_goes_on(self, driver, pool, fn) -> None:
        x = torch.randn(64, device=DEVICE)
        with pytest.raises((CaptureError, ValueError)):
            driver.capture(lambda capture: fn(torch.rand_like(x)), pool)
        works(driver, pool)

    def test_random_numbers_are_those_of_eager(self, driver, pool) -> None:
        check_random_numbers(driver, pool)


# Rebinding.


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


@pytest.mark.parametrize("make", [perceptron, bf16_matmuls, convolutions, tokens, cloned])
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
    alternating = Recorded(driver, fn, [xs[0]], driver.new_pool(DEVICE))
    for stream in both:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            alternating(xs[0])
    rows = {
        "bare replay": bare.replay,
        "launch, node in and node out": launching(copying.graph),
        "launch, rebound in and node out": launching(direct.graph),
        "launch, node in and out, pool used from several streams": launching(alternating.graph),
    }
    with capsys.disabled():
        print()
        for name, call in rows.items():
            print(f"  {name}: host {host_us(call):.2f} us, wall {wall_us(call):.2f} us")
    assert host_us(rows["launch, node in and node out"]) < host_us(bare.replay) + 8
