"""Many calls: the bodies of the stress tests, at any size, on any device.

Each compares every result with the callable itself, on the device, and asks for the verdict
seldom, so that launches overlap as they do in use.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import allocated, random_tensor


class Verdict:
    """Counts wrong bits on the device; reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.checked = 0

    def check(self, got: Tensor, expected: Tensor) -> None:
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        self.wrong.add_((got.view(bits) != expected.view(bits)).sum())
        self.checked += 1

    def settle(self) -> None:
        wrong = int(self.wrong)
        assert wrong == 0, f"{wrong} wrong elements in {self.checked} results"


def reserved(device: torch.device) -> int:
    """Bytes that the allocator holds, in use or not."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is cached serves the next request, and is no growth
        return torch.cuda.memory_reserved(device)
    return allocated(device)


class Step(nn.Module):
    """A linear layer and a running total: reads state by address, and writes some."""

    total: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, device=device)
        self.register_buffer("total", torch.zeros(16, device=device))

    def forward(self, x: Tensor, cache: Tensor, scale: float) -> Tensor:
        y = self.linear(x) * scale
        self.total.add_(y[0])
        cache.mul_(0.5).add_(y[0])
        return y + self.total


def peeks(x: Tensor) -> Tensor:
    """Refused by any capture, half-way."""
    y = torch.zeros(1024, device=x.device) + x.sum()
    return x * y[0].item()


class MixedCalls:
    """Two worlds with equal state; every call goes to both."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.eager, self.model = Step(device), Step(device)
        self.model.load_state_dict(self.eager.state_dict())
        self.fast: Any = ol.graph(self.model, warmup=1)
        self.inputs = [random_tensor(n, n, 16, device=device) for n in (1, 2, 4, 8)]
        self.caches = torch.zeros(2, 16, device=device)
        self.verdict = Verdict(device)
        self.counts: collections.Counter[str] = collections.Counter()
        self.kept: collections.deque[tuple[Tensor, Tensor]] = collections.deque(maxlen=16)

    def move(self) -> None:
        for m in (self.eager, self.model):
            m.linear.weight.data = m.linear.weight.data * 0.75 + 0.01
        self.counts["moved parameters"] += 1

    def update(self) -> None:
        for m in (self.eager, self.model):
            m.linear.bias.add_(0.125)
            m.total.zero_()
        self.counts["updates in place"] += 1

    def fail(self) -> None:
        refused: Any = ol.graph(peeks, warmup=1)
        refused(self.inputs[0])
        try:
            refused(self.inputs[0])
        except ol.CaptureError:
            self.counts["failed captures"] += 1

    def reset(self) -> None:
        self.counts["recordings"] += len(self.fast.recordings)
        self.counts["replays"] += sum(r.replays for r in self.fast.recordings)
        self.fast.reset()
        self.counts["resets"] += 1

    def call(self, i: int) -> None:
        x = self.inputs[i % 4] + i % 7
        scale = 2.0 if i % 3 else 0.5
        expected = self.eager(x, self.caches[0], scale)
        got = self.fast(x, self.caches[1], scale)
        self.verdict.check(got, expected)
        self.kept.append((got, expected))

    def check_kept(self) -> None:
        for got, expected in self.kept:
            self.verdict.check(got, expected)
        self.verdict.check(self.caches[1].clone(), self.caches[0].clone())
        self.verdict.check(self.model.total, self.eager.total)
        self.kept.clear()
        self.verdict.settle()


def mixed_calls(device: torch.device, calls: int, seed: int = 0) -> dict[str, Any]:
    """Signatures mixed with moved parameters, failed captures and resets; memory must not grow."""
    start = time.perf_counter()
    dice = random.Random(seed)
    world = MixedCalls(device)
    memory: tuple[int, int] | None = None
    with torch.no_grad():
        for i in range(calls):
            world.call(i if i % 5 else dice.randrange(1 << 20))
            if i % 31 == 30:
                world.update()
            if i % 211 == 210:
                world.move()
            if i % 307 == 306:
                world.fail()
            if i % 1000 == 999:
                world.reset()
                world.check_kept()
            if i + 1 == max(1000, calls // 5 // 1000 * 1000):
                memory = allocated(device), reserved(device)
        world.reset()
        world.check_kept()
    assert memory is not None
    growth = allocated(device) - memory[0], reserved(device) - memory[1]
    assert max(growth) <= 0, f"allocated and reserved bytes grew by {growth}"
    assert world.counts["replays"] > calls * 0.8
    return {
        "calls": calls,
        **world.counts,
        "results checked": world.verdict.checked,
        "allocated growth bytes": growth[0],
        "reserved growth bytes": growth[1],
        "seconds": round(time.perf_counter() - start, 2),
    }


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
    else:
        yield


def threads_on_streams(
    device: torch.device, threads: int, calls: int, slow_size: int
) -> dict[str, Any]:
    """Threads share a callable and a pool, and capture and reset callables of their own meanwhile.

    Every 50th call is a product of two square matrices of `slow_size`.
    """
    start = time.perf_counter()
    pool = ol.Pool()
    weight = random_tensor(0, 64, 64, device=device)
    wide = random_tensor(1, slow_size, slow_size, device=device) / slow_size

    def f(x: Tensor) -> Tensor:
        if x.shape[0] == slow_size:
            return (x @ wide)[:64] + 1
        return torch.relu(x @ weight) @ weight + x

    def plain(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight) + x

    shared: Any = ol.graph(f, warmup=2, pool=pool)
    counts: collections.Counter[str] = collections.Counter()
    errors: list[BaseException] = []
    lock = threading.Lock()

    def work(k: int) -> None:
        verdict = Verdict(device)
        kept: list[tuple[Tensor, Tensor]] = []
        mine: Any = ol.graph(plain, warmup=1, pool=pool)
        for i in range(calls):
            slow = i % 50 == 49
            x = wide * (i % 3 + k) if slow else random_input(weight, k, i)
            got, expected = shared(x), f(x)
            verdict.check(got, expected)
            kept.append((got, expected))
            if i % 5 == 4:
                small = random_input(weight, k, i)
                verdict.check(mine(small), plain(small))
            if i % 100 == 99:
                with lock:
                    counts["captures of threads"] += len(mine.recordings)
                    counts["resets"] += 1
                mine.reset()
                for a, b in kept:
                    verdict.check(a, b)
                kept.clear()
                verdict.settle()
        verdict.settle()
        with lock:
            counts["results checked"] += verdict.checked

    def guarded(k: int) -> None:
        try:
            with torch.no_grad(), own_stream(device):
                work(k)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            errors.append(error)

    if device.type == "cuda":
        torch.cuda.synchronize()
    running = [threading.Thread(target=guarded, args=(k,)) for k in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    if errors:
        raise errors[0]
    replays = sum(r.replays for r in shared.recordings)
    assert len(shared.recordings) == 4
    assert replays > threads * calls * 0.8
    return {
        "threads": threads,
        "calls per thread": calls,
        "replays": replays,
        **counts,
        "seconds": round(time.perf_counter() - start, 2),
    }


def random_input(like: Tensor, thread: int, call: int) -> Tensor:
    """One of three batch sizes, with values of its own."""
    rows = (8, 16, 32)[call % 3]
    return like[:rows] * (1 + thread) + call % 11


def queued(
    device: torch.device,
    launches: int,
    inputs: str,
    dtype: torch.dtype,
    rows: int,
    width: int,
) -> dict[str, Any]:
    """Launches queued without a sync, each with its own input and output, checked at the end."""
    start = time.perf_counter()
    weight = (random_tensor(0, width, width, device=device) / width**0.5).to(dtype)

    def f(x: Tensor) -> Tensor:
        return torch.relu(x @ weight) + x

    fast: Any = ol.graph(f, warmup=1, inputs=inputs)  # type: ignore[arg-type]
    base = random_tensor(1, rows, width, device=device).to(dtype)
    with torch.no_grad():
        for _ in range(4):
            fast(base)
        given = [base * (1 + i % 64 / 64) + i % 5 for i in range(launches)]
        before = fast.recordings[0].replays
        if device.type == "cuda":
            torch.cuda.synchronize()
            # Nothing runs for a tenth of a second, so that the queue fills.
            torch.cuda._sleep(200_000_000)
        results = [fast(x) for x in given]
        host_seconds = time.perf_counter() - start
        replays = fast.recordings[0].replays - before
        verdict = Verdict(device)
        for x, y in zip(given, results, strict=True):
            verdict.check(y, f(x))
        verdict.settle()
    assert replays == launches
    travel = sorted(set(fast.recordings[0].inputs.values()))
    gc.collect()
    return {
        "launches": launches,
        "dtype": str(dtype),
        "shape": [rows, width],
        "inputs": inputs,
        "travel": travel,
        "results checked": verdict.checked,
        "queued seconds": round(host_seconds, 2),
        "seconds": round(time.perf_counter() - start, 2),
    }
