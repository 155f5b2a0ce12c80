"""Table of concurrency: threads and streams."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

import onelaunch as ol
from onelaunch.optimizers.capturable import _WATCHES

from .drop_in import Rand, alike, assert_same, in_threads, on_accelerators, on_cuda, replays


def run_threads(n: int, body: Callable[[int], None]) -> None:
    """Run `body(k)` in n threads, without gradients."""

    def run(k: int) -> None:
        with torch.no_grad():
            body(k)

    in_threads(*(functools.partial(run, k) for k in range(n)))


def test_threads_share_one_callable(device: torch.device, rand: Rand) -> None:
    """Four threads, three signatures."""
    weight = rand(99, 8, 8)
    fast = ol.graph(lambda x: (x @ weight).relu() + x, warmup=2)

    def body(k: int) -> None:
        for i in range(25):
            x = rand(100 * k + i, 4 + i % 3, 8)
            assert_same(fast(x), (x @ weight).relu() + x)

    run_threads(4, body)
    reasons = [(str(r.spec), r.why) for r in fast.recordings]
    assert len(reasons) == 3, reasons
    assert all(r.replays > 0 for r in fast.recordings)


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_what_torch_believes_of_modes_that_are_gone(rand: Rand, flags: tuple[bool, bool]) -> None:
    """It notes modes for each thread, but from a flag of the process: those of two threads at once
    leave it on in a thread that has none, where guards see other keys of a subclass's tensors."""
    note: Any = torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals
    fast = ol.graph(lambda x: x * 2 + 1, warmup=1)

    def body(k: int) -> None:
        for i in range(3):
            note(flags[k])
            x = rand(10 * k + i, 4, 8)
            assert_same(fast(x), x * 2 + 1)
        note(False)

    for k in range(2):
        run_threads(1, lambda _, k=k: body(k))
    assert [r.why for r in fast.recordings] == ["first signature"]


def test_threads_with_callables_of_their_own_in_one_pool(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()

    def body(k: int) -> None:
        fast = ol.graph(lambda x: x * (k + 1) + k, warmup=1, pool=pool)
        for i in range(25):
            x = rand(100 * k + i, 8)
            assert_same(fast(x), x * (k + 1) + k)
            if i % 8 == 7:
                fast.reset()
        assert replays(fast) >= 0

    run_threads(4, body)


def test_threads_that_mutate_their_own_caches(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x, cache: cache.add_(x) * 2, warmup=1)

    def body(k: int) -> None:
        cache, expected = rand(k, 8), rand(k, 8)
        for i in range(25):
            x = rand(100 * k + i, 8)
            expected.add_(x)
            assert_same(fast(x, cache), expected * 2)
            assert_same(cache, expected)

    run_threads(4, body)
    assert replays(fast) > 0


def test_reset_while_threads_call(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2 + 1, warmup=1)
    done = threading.Event()

    def resets() -> None:
        while not done.wait(0.002):
            fast.reset()

    resetting = threading.Thread(target=resets)
    resetting.start()
    try:
        run_threads(3, lambda k: alike(fast, lambda x: x * 2 + 1, rand, 8, calls=40))
    finally:
        done.set()
        resetting.join()


def test_grad_mode_is_per_thread(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * (2 if torch.is_inference_mode_enabled() else 3), warmup=1)
    barrier = threading.Barrier(2)

    def body(k: int) -> None:
        for i in range(10):
            barrier.wait()
            x = rand(i, 3)
            with torch.inference_mode(k == 0):
                got = fast(x)
            assert_same(got.clone(), x * (2 if k == 0 else 3))

    run_threads(2, body)
    assert len(fast.recordings) == 2


@on_cuda
def test_streams_in_turn(device: torch.device, rand: Rand) -> None:
    weight = rand(9, 256, 256)
    fast = ol.graph(lambda x: x @ weight @ weight, warmup=1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results: list[tuple[Tensor, int]] = []
    with torch.no_grad():
        for i in range(30):
            stream = streams[i % 3]
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                results.append((fast(rand(i, 256, 256)), i))
        torch.cuda.synchronize()
        for y, i in results:
            assert_same(y, rand(i, 256, 256) @ weight @ weight)
    assert replays(fast) > 20


@on_cuda
def test_two_recordings_of_one_pool_on_two_streams(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    weight = rand(9, 512, 512)
    a = ol.graph(lambda x: (x @ weight).relu() @ weight, warmup=1, pool=pool)
    b = ol.graph(lambda x: (x @ weight).tanh() @ weight, warmup=1, pool=pool)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for i in range(40):
            x = rand(i, 512, 512)
            expected = (x @ weight).relu() @ weight if i % 2 else (x @ weight).tanh() @ weight
            stream = streams[i % 2]
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                results.append(((a if i % 2 else b)(x), expected))
        torch.cuda.synchronize()
    for got, expected in results:
        assert_same(got, expected)


def test_threads_that_wait_for_each_other_in_eager_calls(rand: Rand) -> None:
    """A signature that runs eagerly runs without any lock."""
    wait = [lambda: None]

    def f(x: Tensor) -> Tensor:
        wait[0]()
        return x.nonzero()

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    fast(rand(0, 2, 3))
    with pytest.warns(ol.GraphWarning, match="OL102"):
        fast(rand(0, 2, 3))
    barrier = threading.Barrier(2)
    wait[0] = lambda: barrier.wait(10)
    in_threads(*[lambda: fast(rand(1, 2, 3))] * 2)


def test_a_backward_and_a_first_call_at_once_leave_no_mode_on(
    device: torch.device, rand: Rand
) -> None:
    """The call begins before the backward has ended, and ends after it."""
    ready, inside, begun, ended = (threading.Event() for _ in range(4))
    weight = rand(9, 4).requires_grad_()
    # Torch makes a leaf's node under a lock of the leaf. On the emulated device that waits for the
    # interpreter, which another thread may hold while it waits for the lock. So it is made once.
    node = (weight * 1).grad_fn

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            if ready.is_set():
                inside.set()
                assert begun.wait(20)
            return g * 2

    def second(x: Tensor) -> Tensor:
        begun.set()
        assert ended.wait(20)
        return x * weight

    def body(k: int) -> None:
        fast = ol.graph((lambda x: Waits.apply(x * weight), second)[k], warmup=1)
        for i in range(4):
            if k:
                assert inside.wait(20)
            with torch.enable_grad():
                fast(rand(i, 4)).sum().backward()
            if not k:
                (ended if ready.is_set() else ready).set()
        assert replays(fast) == 3

    run_threads(2, body)
    assert not is_in_torch_dispatch_mode()
    del node


def test_a_call_that_no_graph_can_hold_waits_for_a_capture(device: torch.device) -> None:
    """The capture puts stand-ins in place of the parameters: such a call would train those. The
    signals are locks: they have no attributes, which would be state."""
    layer = torch.nn.Linear(4, 4, device=device)
    weight, known = layer.weight, id(layer.weight)
    captures, called = threading.Lock(), threading.Lock()  # free is given
    assert captures.acquire()
    assert called.acquire()

    def f(x: Tensor) -> Tensor:
        if id(layer.weight) != known:
            captures.release()
            called.acquire(timeout=0.5)
        return layer(x)

    fast, x = ol.graph(f, warmup=1), torch.ones(2, 4, device=device)

    def packs() -> None:
        assert captures.acquire(timeout=20)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            fast(x).sum().backward()
        called.release()

    thread = threading.Thread(target=packs)
    thread.start()
    for _ in range(3):
        fast(x)  # without a backward: the gradient is the other thread's
    thread.join(20)
    assert captures.locked()  # by the other thread, which was given it
    assert_same(weight.grad, torch.full_like(weight, 2.0))


def test_no_capture_ahead_beside_a_run_that_reads_the_parameters(device: torch.device) -> None:
    """It would go on with the stand-ins that the capture puts there."""
    layer = torch.nn.Linear(4, 4, device=device)
    inside, go = threading.Event(), threading.Event()

    def f(x: Tensor, waits: bool) -> Tensor:
        if waits:
            inside.set()
            go.wait(20)
        return layer(x)

    fast, x = ol.graph(f, warmup=1), torch.ones(2, 4, device=device)

    def packs() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            fast(x, True).sum().backward()

    thread = threading.Thread(target=packs)
    thread.start()
    inside.wait(20)
    with torch.no_grad():
        fast.capture(x, False)  # reads the parameters themselves
    with pytest.raises(ol.CaptureError, match="another thread is in an eager run"):
        fast.capture(x, False)
    go.set()
    thread.join(20)
    fast.capture(x, False)
    fast(x, False).sum().backward()
    assert replays(fast) == 1
    assert_same(layer.weight.grad, torch.full_like(layer.weight, 4.0))


@pytest.mark.usefixtures("compiled")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # a queue of Python's
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@on_accelerators
def test_what_other_threads_compute_is_in_no_recording(
    device: torch.device, rand: Rand, compile: bool, ahead: bool
) -> None:
    """Each run reads memory that they made for it."""
    towers = [torch.nn.Linear(4, 4).to(device) for _ in range(2)]

    def f(x: Tensor) -> Tensor:
        def run(tower: torch.nn.Module) -> Tensor:
            with torch.no_grad():
                return tower(x + 0)  # torch warns of a thread that begins with cuBLAS

        with ThreadPoolExecutor(2) as workers:
            parts = list(workers.map(run, towers))
        return torch.cat(parts, -1) * 2

    fast = ol.graph(f, compile=compile)
    with torch.no_grad(), pytest.raises(ol.CaptureError, match="another thread") as caught:  # noqa: PT012
        if ahead:
            fast.capture(rand(0, 3, 4))
        alike(fast, f, rand, 3, 4, calls=6)
    assert caught.value.code == "OL117"
    assert "in the thread that makes the call" in caught.value.fix


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compile", [False, True], ids=["", "compiled"])
def test_a_result_of_another_thread_is_refused(
    device: torch.device, rand: Rand, compile: bool
) -> None:
    """No operation of the call meets it."""
    weight = rand(0, 4)
    with ThreadPoolExecutor(1) as workers, torch.no_grad():

        def f(x: Tensor) -> Tensor:
            return workers.submit(torch.add, x, weight).result()

        fast = ol.graph(f, compile=compile)
        for i in range(3):
            fast(rand(i, 2, 4))
        with pytest.raises(ol.CaptureError, match=r"OL117.*another thread"):
            fast(rand(3, 2, 4))


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compile", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("how", ["a thread", "an executor of its own", "an executor"])
def test_what_other_threads_do_in_place_is_refused(
    device: torch.device, rand: Rand, how: str, compile: bool
) -> None:
    """No operation of the call shows it: what they write, and the Python state that they read."""
    state, seen = {"scale": 2.0}, torch.zeros(4, device=device)
    kept = ThreadPoolExecutor(1)

    def work(x: Tensor) -> None:
        state["twice"] = state["scale"] * 2
        seen.add_(x)

    def f(x: Tensor) -> Tensor:
        if how == "a thread":
            thread = threading.Thread(target=work, args=(x,))
            thread.start()
            thread.join()
        elif how == "an executor":
            kept.submit(work, x).result()
        else:
            with ThreadPoolExecutor(1) as workers:
                workers.submit(work, x)
        return x * state["twice"]

    fast = ol.graph(f, compile=compile)
    with torch.no_grad(), kept:
        for i in range(3):
            fast(rand(i, 4))
        with pytest.raises(ol.CaptureError, match="another thread") as caught:
            fast(rand(3, 4))
    assert caught.value.code == "OL117"
    assert ("thread.start()" if how == "a thread" else "submit(work, x)") in caught.value.where


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compile", [False, True], ids=["", "compiled"])
def test_a_thread_that_the_first_call_starts_is_no_part_of_it(
    device: torch.device, rand: Rand, compile: bool
) -> None:
    """A monitor, say, or a pool of workers that it does not use again."""
    stop, threads = threading.Event(), list[threading.Thread]()

    def f(x: Tensor) -> Tensor:
        if not threads:
            threads.append(threading.Thread(target=stop.wait, args=(30,)))
            threads[0].start()
        return x * 2

    fast = ol.graph(f, compile=compile)
    alike(fast, lambda x: x * 2, rand, 4, calls=6)
    stop.set()
    threads[0].join()
    assert replays(fast) > 0


@pytest.mark.parametrize("trains", [False, True])
def test_torch_keeps_no_object_for_a_thread(trains: bool, device: torch.device, rand: Rand) -> None:
    """It drops such an object after the thread has ended: if Python ends just then, by an abort."""
    if trains and not hasattr(torch._C, "_remove_obj_from_tls"):
        pytest.skip("a backward leaves an object, without us too")
    fast, kept = ol.graph(lambda x: x * 2 + 1, warmup=1), list[bool]()

    def body(k: int) -> None:
        with torch.set_grad_enabled(trains), torch.inference_mode(not trains):
            for i in range(4):
                x = rand(i, 4).requires_grad_(trains)
                result = fast(x)
                assert_same(result.detach(), (x * 2 + 1).detach())
                if trains:
                    result.sum().backward()
        kept.append(torch._C._is_key_in_tls(_WATCHES))

    run_threads(2, body)
    assert replays(fast) > 0
    assert kept == [False, False]


@contextmanager
def drawing(*devices: torch.device) -> Generator[None]:
    """Another thread draws from the default generators of these devices, and alone. It gets the
    numbers that it would get by itself."""
    over = threading.Event()
    drawn: list[list[Tensor]] = []
    errors: list[BaseException] = []

    def draw() -> list[Tensor]:
        return [torch.randn(3, device=device) for device in devices]

    def draws() -> None:
        try:
            while not over.is_set():
                drawn.append(draw())
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            errors.append(error)

    torch.manual_seed(5)
    thread = threading.Thread(target=draws)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
    drawn.append(draw())
    torch.manual_seed(5)
    assert_same([torch.stack(t) for t in zip(*drawn, strict=True)], _again(draw, len(drawn)))


def _again(draw: Callable[[], list[Tensor]], count: int) -> list[Tensor]:
    drawn = [draw() for _ in range(count)]
    return [torch.stack(t) for t in zip(*drawn, strict=True)]


def layers(device: torch.device, count: int = 5) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(count)]).to(device)


@pytest.mark.parametrize("where", ["host", "device"])
def test_random_numbers_that_another_thread_draws(
    device: torch.device, rand: Rand, where: str
) -> None:
    """They are no seeding by the call, and the call gives none of them back."""
    net = layers(device, 20)
    with torch.no_grad(), drawing(torch.device("cpu") if where == "host" else device):
        for _ in range(4):
            fast = ol.graph(net, warmup=1)
            for i in range(3):
                assert_same(fast(rand(i, 2, 4)), net(rand(i, 2, 4)))
            assert replays(fast) == 2


def step_of(
    net: torch.nn.Module, call: Callable[[Any, Tensor], Any] = lambda net, x: net(x)
) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = call(net, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_random_numbers_drawn_beside_training(device: torch.device, rand: Rand) -> None:
    """While a whole step is captured, and a forward with its backward."""
    nets = [layers(device) for _ in range(4)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())

    eager, whole = step_of(nets[0]), step_of(nets[1])
    with drawing(device):
        fast = ol.graph(whole, warmup=1)
        for i in range(6):
            assert_same(fast(rand(i, 2, 4)), eager(rand(i, 2, 4)))
        assert replays(fast) > 0
        forward = ol.graph(nets[2], warmup=1)
        for i in range(6):
            for call, net in ((forward, nets[2]), (nets[3], nets[3])):
                net.zero_grad()
                call(rand(i, 2, 4)).square().mean().backward()
            grads = [[p.grad for p in net.parameters()] for net in nets[2:]]
            assert_same(*grads)
        assert replays(forward) > 0
    assert_same(list(nets[0].parameters()), list(nets[1].parameters()))


@on_cuda
def test_random_numbers_drawn_beside_a_checkpoint(device: torch.device, rand: Rand) -> None:
    """Without dropout it saves and sets random states between which nothing is drawn. In eager, as
    in a warm-up, it sets them for all threads."""
    nets = [layers(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    eager, whole = (
        step_of(net, lambda f, x: checkpoint(f, x, use_reentrant=False)) for net in nets
    )
    fast = ol.graph(whole, warmup=1)
    expected = [eager(rand(i, 2, 4)) for i in range(6)]
    assert_same(fast(rand(0, 2, 4)), expected[0])
    with drawing(device):
        for i in range(1, 6):
            assert_same(fast(rand(i, 2, 4)), expected[i])
    assert replays(fast) == 5
    assert_same(list(nets[0].parameters()), list(nets[1].parameters()))


def test_a_refused_call_leaves_another_threads_numbers(device: torch.device, rand: Rand) -> None:
    """Its capture is given up in the middle, and ended."""
    eager = ol.graph(lambda x: x * x.sum().item(), warmup=1, on_refusal="eager")
    with torch.no_grad(), drawing(device):
        eager(rand(0, 3))
        with pytest.warns(ol.GraphWarning, match="OL101"):
            assert_same(eager(rand(1, 3)), rand(1, 3) * rand(1, 3).sum().item())
