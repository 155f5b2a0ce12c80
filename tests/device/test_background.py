"""`capture="background"`: calls run eagerly while a thread captures them."""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.beside import is_beside
from onelaunch.runtime.background import CapturesBeside
from onelaunch.runtime.worker import Worker

from .drop_in import Rand, assert_same, in_threads, replays
from .test_concurrency_threads import drawing


def captured(fast: Any, count: int, call: Callable[[], object]) -> None:
    """Call until there are so many recordings, and none is being made."""
    captures = getattr(fast, "__graphed__", fast)._captures
    end = time.monotonic() + 60
    while (len(fast.recordings) < count or captures.worker.busy) and time.monotonic() < end:
        call()
        time.sleep(0.002)
    assert len(fast.recordings) >= count


def idle(fast: Any) -> None:
    """Wait until nothing is captured beside calls, and the code of the first call is read."""
    captures = getattr(fast, "__graphed__", fast)._captures
    end = time.monotonic() + 60
    while (captures.worker.busy or captures._code) and time.monotonic() < end:
        time.sleep(0.002)
    assert not captures.worker.busy
    assert not captures._code


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device).eval()


def test_calls_are_right_until_and_after_it_is_captured(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, capture="background")
    with torch.inference_mode():

        def call() -> None:
            for rows in (1, 2, 3):
                x = rand(rows, rows, 4)
                assert_same(fast(x), net(x))

        captured(fast, 3, call)
        before = replays(fast)
        call()
        assert replays(fast) == before + 3
    assert fast.stats().warmup_calls == 1  # the others run the same code
    assert set(fast.stats().eager_reasons) <= {"background"}


def test_no_call_waits_for_a_capture(device: torch.device, rand: Rand) -> None:
    """The capture is held up until the calls are made."""
    inside, go = threading.Lock(), threading.Lock()  # free is given; a lock is no state
    assert inside.acquire()
    assert go.acquire()

    def f(x: Tensor) -> Tensor:
        if is_beside() and inside.locked():
            inside.release()
            if go.acquire(timeout=20):
                go.release()
        return x * 2

    fast = ol.graph(f, capture="background")
    fast(rand(0, 3))
    idle(fast)
    fast(rand(0, 3))
    fast(rand(0, 3))
    assert inside.acquire(timeout=20)
    for rows in (3, 4, 5):
        assert_same(fast(rand(1, rows)), f(rand(1, rows)))
    go.release()
    assert fast.stats().warmup_calls == 1
    fast.reset()


@contextmanager
def held_up(fast: Any, x: Tensor, inside: threading.Lock, go: threading.Lock) -> Generator[None]:
    """Hold up the capture of a size meanwhile, in its run. The callable asks for the locks."""
    while not inside.acquire(blocking=False):
        fast(x)
        time.sleep(0.002)
    try:
        yield
    finally:
        go.release()


def holding(inside: threading.Lock, go: threading.Lock, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a callable whose capture with so many rows is held up."""
    assert inside.acquire()
    assert go.acquire()

    def f(x: Tensor) -> Tensor:
        if len(x) == rows and is_beside() and inside.locked():
            inside.release()
            if go.acquire(timeout=20):
                go.release()
        return x * 2

    return f


def test_what_is_recorded_replays_during_a_capture(device: torch.device, rand: Rand) -> None:
    """The modes of a capture leave a flag of torch's wrong in other threads."""
    inside, go = threading.Lock(), threading.Lock()
    f = holding(inside, go, 4)
    fast = ol.graph(f, capture="background")
    captured(fast, 1, lambda: fast(rand(0, 3)))
    with held_up(fast, rand(0, 4), inside, go):
        before = fast.stats()
        for i in range(10):
            assert_same(fast(rand(i, 3)), f(rand(i, 3)))
        after = fast.stats()
        assert after.replays == before.replays + 10
        assert after.eager_reasons == before.eager_reasons


@pytest.mark.parametrize("how", ["same", "view", "parts"])
def test_arguments_that_share_memory(device: torch.device, rand: Rand, how: str) -> None:
    """The copies for the capture share it alike, or the call is captured by a call."""

    def call() -> Tensor:
        x = rand(1, 4, 3)
        y = {"same": x, "view": x[1:], "parts": x[:2]}[how]
        x = x[2:] if how == "parts" else x[: len(y)] if how == "view" else x
        return fast(x, y)

    fast: Any = ol.graph(lambda x, y: x * 2 + y, capture="background")
    captured(fast, 1, call)
    before = fast.stats()
    for _ in range(5):
        x = rand(1, 4, 3)
        expected = {"same": x * 3, "view": x[:3] * 2 + x[1:], "parts": x[2:] * 2 + x[:2]}[how]
        assert_same(call(), expected)
    assert fast.stats().captures == 1
    assert fast.stats().replays == before.replays + 5


def test_the_first_call_is_not_watched(device: torch.device, rand: Rand) -> None:
    """Its code is read beside calls before one is."""
    net = network(device)
    fast: Any = ol.graph(net, capture="background")
    captures = fast.__graphed__._captures
    with torch.no_grad():
        assert_same(fast(rand(0, 3, 4)), net(rand(0, 3, 4)))
        assert fast.stats().warmup_calls == 0
        idle(fast)
        assert captures._code == []
        fast(rand(0, 3, 4))
        assert fast.stats().warmup_calls == 1


def test_no_copy_of_arguments_is_kept(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast: Any = ol.graph(net, capture="background")
    with torch.no_grad():
        captured(fast, 1, lambda: fast(rand(0, 3, 4)))  # calls during the capture, too
        idle(fast)
    assert all(w.example is None for w in fast.__graphed__._captures._wanted.values())


def test_a_thread_that_is_gone_before_it_has_read_the_code(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the child of a fork."""
    net = network(device)
    fast: Any = ol.graph(net, capture="background")
    worker = fast.__graphed__._captures.worker
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(worker, "wake", lambda: None)
            fast(rand(0, 3, 4))
        assert fast.__graphed__._captures._code
        captured(fast, 1, lambda: assert_same(fast(rand(1, 3, 4)), net(rand(1, 3, 4))))


def test_other_threads_call_meanwhile(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, capture="background")
    sizes = range(1, 9)
    with torch.inference_mode():
        expected = {n: net(rand(n, n, 4)) for n in sizes}

    def body(seed: int) -> None:
        order = random.Random(seed)
        with torch.inference_mode():
            for _ in range(120):
                n = order.choice(sizes)
                assert_same(fast(rand(n, n, 4)), expected[n])

    in_threads(*(functools.partial(body, seed) for seed in range(4)))
    with torch.inference_mode():
        captured(fast, 8, lambda: [fast(rand(n, n, 4)) for n in sizes])
    fast.reset()


class Counting(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.total: Tensor
        self.register_buffer("total", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "number":
            self.calls += 1
        elif self.how == "buffer":
            self.total.add_(x.sum(0))
        elif self.how == "statistics":
            return self.norm(x)
        elif self.how == "dropout":
            return nn.functional.dropout(x, 0.5)
        else:
            self.total = self.total + x.sum(0)
        return x + self.total


@pytest.mark.parametrize("how", ["number", "buffer", "statistics", "dropout", "replaced"])
def test_what_changes_state_is_captured_by_a_call(
    device: torch.device, rand: Rand, how: str
) -> None:
    models = [Counting(how).to(device) for _ in range(2)]
    fast = ol.graph(models[0], capture="background")
    results: list[list[Tensor]] = [[], []]
    for made, call in zip(results, (fast, models[1]), strict=True):
        torch.manual_seed(3)
        for i in range(10):
            with torch.no_grad():
                made.append(call(rand(i, 3, 4)))
            idle(fast)
    assert_same(*results)
    assert models[0].calls == models[1].calls
    assert_same(*[list(model.buffers()) for model in models])
    assert replays(fast) == 5
    assert fast.stats().eager_reasons == {"background": 1}


def test_gradients(device: torch.device, rand: Rand) -> None:
    """A forward with a backward is captured by a call."""
    net = network(device)
    fast = ol.graph(net, capture="background")
    for i in range(8):
        found: list[Any] = []
        for call in (fast, net):
            net.zero_grad()
            call(rand(i, 3, 4)).sum().backward()
            idle(fast)
            found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        assert_same(*found)
    assert replays(fast) >= 3


def test_modes_are_those_of_the_calls(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, capture="background")
    for mode in (torch.no_grad, torch.inference_mode):
        count = len(fast.recordings)
        with mode():
            captured(fast, count + 1, lambda: assert_same(fast(rand(1, 2, 4)), net(rand(1, 2, 4))))
            result = fast(rand(1, 2, 4))
        assert result.is_inference() == (mode is torch.inference_mode)


def test_a_refusal_is_raised_by_the_next_call(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > -1e9 else x

    fast = ol.graph(f, capture="background")

    def call() -> None:
        for _ in range(6000):
            fast(rand(0, 3))
            time.sleep(0.005)

    with pytest.raises(ol.CaptureError, match="OL101") as caught:
        call()
    assert "x.sum().item()" in (caught.value.where or "")
    eager = ol.graph(f, capture="background", on_refusal="eager")
    with warnings.catch_warnings(record=True, action="always") as told:
        end = time.monotonic() + 30
        while not told and time.monotonic() < end:
            assert_same(eager(rand(0, 3)), f(rand(0, 3)))
            time.sleep(0.002)
    assert "OL101" in str(told[0].message)


def test_an_error_of_the_callable_is_the_calls(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise KeyError("three")
        return x * 2

    fast = ol.graph(f, capture="background")
    for _ in range(6):
        with pytest.raises(KeyError, match="three"):
            fast(rand(0, 3))
        assert_same(fast(rand(0, 4)), rand(0, 4) * 2)
    captured(fast, 1, lambda: fast(rand(0, 4)))


def test_weights_that_move_are_recorded_again(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, capture="background")

    def call() -> None:
        assert_same(fast(rand(0, 2, 4)), net(rand(0, 2, 4)))

    with torch.no_grad():
        captured(fast, 1, call)
        net[0].weight.data = net[0].weight.data * 2  # pyright: ignore
        call()
        end, made = time.monotonic() + 60, fast.stats().replays
        while fast.stats().replays == made and time.monotonic() < end:
            call()
            time.sleep(0.002)
    assert fast.stats().replays > made


def test_a_list_of_a_modules_parts_is_no_new_code(device: torch.device, rand: Rand) -> None:
    net = network(device)

    def f(x: Tensor) -> Tensor:
        return net(x) * len([*net.modules(), *net.parameters()])

    fast = ol.graph(f, capture="background")
    with torch.inference_mode():

        def call() -> None:
            for rows in (1, 2, 3):
                assert_same(fast(rand(rows, rows, 4)), f(rand(rows, rows, 4)))

        captured(fast, 3, call)
    assert fast.stats().warmup_calls == 1


def test_a_profiler_stays_on_in_unwatched_calls(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, capture="background")
    seen: list[str] = []

    def profile(frame: Any, event: str, arg: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    with torch.inference_mode():
        captured(fast, 1, lambda: fast(rand(0, 1, 4)))
        sys.setprofile(profile)
        try:
            fast(rand(0, 2, 4))
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(None)
    assert seen.count("forward") >= 4


class Moving(nn.Module):
    """A network that changes something of its own for large inputs only."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.large = 0
        self.seen = dict.fromkeys(range(1000, 1100), 0)
        self.numbers = iter(range(10**6))
        self.register_buffer("total", torch.zeros(()))

    def count(self) -> None:
        self.large += 1

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > 2:
            if self.way == "attribute":
                self.large += 1
            elif self.way == "method":
                self.count()
            elif self.way == "key":
                self.seen[rows] = self.seen.get(rows, 0) + 1
            elif self.way == "tensor":
                self.total.add_(rows)
            elif self.way == "iterator":
                x = x + next(self.numbers)
            elif self.way == "draw":
                x = x + torch.rand((), device=x.device)
            elif self.way == "mode":
                torch.set_float32_matmul_precision("high")
        return x * 2

    def moved(self) -> object:
        return self.large, self.seen, self.total, torch.get_float32_matmul_precision()


@pytest.mark.parametrize(
    "way", ["attribute", "method", "key", "tensor", "iterator", "draw", "mode", "nothing"]
)
def test_what_only_some_sizes_change(device: torch.device, rand: Rand, way: str) -> None:
    """The first calls of further sizes run unwatched; what they change is as eager's."""
    rows = [1, 2, *(i % 5 + 1 for i in range(40))]
    precision = torch.get_float32_matmul_precision()

    def run(graphed: bool) -> tuple[list[Tensor], object]:
        torch.manual_seed(3)
        net = Moving(way).to(device)
        fast: Any = net
        if graphed:
            fast = ol.graph(net, capture="background", on_refusal="eager")
        found: list[Tensor] = []
        try:
            for i, n in enumerate(rows):
                found.append(fast(rand(i, n, 4)).clone())
                time.sleep(0.002)
            if graphed:
                idle(fast.__graphed__)
            return found, net.moved()
        finally:
            torch.set_float32_matmul_precision(precision)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        assert_same(run(True), run(False))


def test_waits_for_the_device_meanwhile(device: torch.device, rand: Rand) -> None:
    """CUDA refuses to wait for a device while a stream of it is captured."""
    wait = getattr(torch.get_device_module(device), "synchronize", lambda: None)
    beside: list[int] = []

    def f(x: Tensor) -> Tensor:
        if is_beside():
            time.sleep(0.05)
        return x * 2

    fast = ol.graph(f, capture="background", warmup=1)

    def call() -> None:
        assert_same(fast(rand(1, 4)), rand(1, 4) * 2)
        wait()
        beside.append(fast._captures.worker.busy)

    captured(fast, 1, call)
    assert sum(beside) > 2
    assert fast.stats().captures == 1


def test_random_numbers_of_other_threads(device: torch.device, rand: Rand) -> None:
    """A capture puts no generator back: other threads have drawn from it meanwhile."""
    net = network(device)
    fast = ol.graph(net, capture="background")
    torch.manual_seed(5)
    random.seed(5)
    expected = [(torch.rand(2), torch.rand(2, device=device), random.random()) for _ in range(300)]
    torch.manual_seed(5)
    random.seed(5)
    drawn: list[Any] = []
    with torch.no_grad():
        for i in range(300):
            fast(rand(i, 1 + i // 50, 4))
            drawn.append((torch.rand(2), torch.rand(2, device=device), random.random()))
            time.sleep(0.001)
        assert_same(drawn, expected)
        captured(fast, 1, lambda: fast(rand(0, 1, 4)))


def test_random_numbers_drawn_all_the_time(device: torch.device, rand: Rand) -> None:
    """What is captured beside calls leaves them to the thread that draws them."""
    net = network(device)
    fast = ol.graph(net, capture="background")
    with torch.no_grad(), drawing(device):
        for rows in (1, 2, 3):
            x = rand(rows, rows, 4)
            captured(fast, rows, lambda x=x: assert_same(fast(x), net(x)))
        for rows in (1, 2, 3):
            assert_same(fast(rand(9, rows, 4)), net(rand(9, rows, 4)))
    assert "background" in fast.stats().eager_reasons
    assert replays(fast) >= 3


def test_dropout_is_as_eagers(device: torch.device, rand: Rand) -> None:
    """It is captured in its calls, and the caller draws between them."""
    found: list[list[Tensor]] = []
    for graphed in (False, True):
        model = nn.Sequential(network(device), nn.Dropout(0.3)).train()
        call: Any = ol.graph(model, capture="background") if graphed else model
        torch.manual_seed(5)
        with torch.no_grad():
            found.append([])
            for i in range(20):
                found[-1] += [call(rand(i, 2, 4)), torch.rand(2, device=device), torch.rand(2)]
                if graphed:
                    idle(call)
        if graphed:
            assert replays(call) == 15
            assert call.stats().eager_reasons == {"background": 1}
    assert_same(found[1], found[0])


def test_buckets(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, buckets=ol.Buckets(dim=0, sizes=(2, 4, 8)), capture="background")
    with torch.inference_mode():

        def call() -> None:
            for rows in (1, 2, 3, 4, 6, 8):
                x = rand(rows, rows, 4)
                torch.testing.assert_close(fast(x), net(x))

        captured(fast, 3, call)
        before = replays(fast)
        call()
        assert replays(fast) == before + 6


def test_nothing_stays_of_a_callable_that_is_gone(device: torch.device, rand: Rand) -> None:
    fast: Any = ol.graph(lambda x: x * 2, capture="background")
    assert isinstance(fast, CapturesBeside)
    with torch.no_grad():
        captured(fast, 1, functools.partial(fast, rand(0, 3)))
    captures = fast._captures
    del fast
    gc.collect()
    assert captures.graphed() is None
    captures.worker.end()
    assert not captures.worker.alive


def held_in_a_capture(fast: Any, x: Tensor, entered: threading.Event) -> None:
    """Call until a capture beside the calls has entered the callable, and waits there."""
    end = time.monotonic() + 60
    while not entered.is_set() and time.monotonic() < end:
        fast(x)
        time.sleep(0.002)
    assert entered.is_set()


def test_normal_tensors_under_inference_mode(device: torch.device, rand: Rand) -> None:
    """The copies that are captured are no inference tensors either."""
    net = network(device)
    fast = ol.graph(net, capture="background")
    x = rand(0, 2, 4)
    with torch.inference_mode():
        captured(fast, 1, lambda: assert_same(fast(x), net(x)))
        before = fast.stats()
        for _ in range(3):
            assert_same(fast(x), net(x))
        assert fast.stats().replays == before.replays + 3
    assert fast.stats().captures == 1
    assert fast.stats().warmup_calls == 1


def test_what_the_caller_changes_meanwhile_stays(device: torch.device, rand: Rand) -> None:
    """A capture puts nothing back: other threads made the changes."""
    entered, go = threading.Event(), threading.Event()
    norm = nn.BatchNorm1d(3).to(device).eval()
    state = SimpleNamespace(scale=2.0)

    def f(x: Tensor) -> Tensor:
        if is_beside():
            entered.set()
            go.wait(60)
        return norm(x) * state.scale

    fast = ol.graph(f, capture="background")
    with torch.no_grad():
        held_in_a_capture(fast, rand(0, 2, 3), entered)
        state.scale = 5.0
        norm.train()
        torch.set_default_dtype(torch.float64)
        go.set()
        idle(fast)
        changed = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        assert changed is torch.float64
        assert (state.scale, norm.training) == (5.0, True)
        other = copy.deepcopy(norm)
        for i in range(6):
            assert_same(fast(rand(i, 2, 3)), other(rand(i, 2, 3)) * 5.0)
            assert_same(norm.running_mean, other.running_mean)


def test_a_flag_that_the_caller_sets_before_the_capture_ends(rand: Rand) -> None:
    """The second run beside the calls is the capture; it fails, and puts no flag back."""
    entered, go, first = threading.Event(), threading.Event(), threading.Lock()
    state = SimpleNamespace(scale=2.0)

    def f(x: Tensor) -> Tensor:
        if is_beside() and not first.acquire(blocking=False):
            entered.set()
            go.wait(60)
        return x * state.scale

    fast = ol.graph(f, capture="background")
    held_in_a_capture(fast, rand(0, 3), entered)
    state.scale = 5.0
    with torch.backends.cudnn.flags(enabled=False):
        go.set()
        idle(fast)
        assert not torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled
    assert_same(fast(rand(1, 3)), f(rand(1, 3)))


@pytest.mark.parametrize("kind", ["count", "buffer", "draw"])
def test_state_that_begins_to_change(device: torch.device, rand: Rand, kind: str) -> None:
    """The first call changes nothing; then the caller turns something on, between two runs."""

    def world() -> tuple[SimpleNamespace, Callable[[Tensor], Tensor]]:
        state = SimpleNamespace(on=False, count=0, buffer=rand(0, 3))

        def f(x: Tensor) -> Tensor:
            y = x * 2
            if state.on and kind == "count":
                state.count += 1
            elif state.on and kind == "buffer":
                state.buffer.add_(1)
            elif state.on:
                y = y + torch.rand_like(y)
            time.sleep(0.002)
            return y

        return state, f

    for late in (1, 2, 3, 12):
        (mine, f), (theirs, g) = world(), world()
        fast = ol.graph(g, capture="background")
        found: list[Any] = []
        for state, call in ((mine, f), (theirs, fast)):
            torch.manual_seed(3)
            values: list[Any] = []
            for i in range(20):
                if i == late and call is fast:
                    idle(fast)
                state.on = i >= late
                values.append((call(rand(i, 3)), state.count, state.buffer.clone()))
            found.append(values)
        assert_same(found[1], found[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_the_child_of_a_fork_has_a_thread_of_its_own() -> None:
    """On the host's tensors alone, as no accelerator outlives a fork."""
    parts = threading.Event()
    jobs = [parts.wait]
    worker = Worker("test", lambda: jobs.pop() if jobs else None)
    with worker.changed:
        worker.wake()
    while not worker.busy:
        time.sleep(0.002)
    child = os.fork()
    if child == 0:  # whatever it raises, it runs no other test
        code = 1
        try:
            ended = not (worker.alive or worker.busy)
            with worker.changed:
                worker.wake()
            code = 0 if ended and worker.alive else 2
        finally:
            os._exit(code)
    parts.set()
    worker.end()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_a_lock_is_held() -> None:
    """By a thread that the child does not have: nobody would ever give it back there."""
    worker, inside, over = Worker("test", lambda: None), threading.Event(), threading.Event()

    def hold() -> None:
        with worker.changed:
            inside.set()
            over.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    inside.wait(60)
    threading.Timer(0.3, over.set).start()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if worker.changed.acquire(timeout=10) else 2
        finally:
            os._exit(code)
    holding.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.changed.acquire(timeout=10)
    worker.changed.release()


def test_an_argument_without_memory_is_not_copied(rand: Rand) -> None:
    """FSDP frees the memory of a parameter between uses."""
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)

    def f(x: Tensor, unused: Tensor) -> Tensor:
        return x * 2

    fast = ol.graph(f, capture="background", on_refusal="eager")
    for seed in range(4):
        x = rand(seed, 2)
        assert_same(fast(x, freed), f(x, freed))
