"""Requests of random batch and length on a small BERT: the engines, and how they are measured.

Every engine sees the same requests in the same order: once untimed, so that it compiles and
captures what it likes, then each by itself (latency), then all in a row (throughput). Each has a
process of its own. All build at once; the timed passes come one after the other.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from examples.bert import minilm, sentences
from onelaunch.tools.bench.precision import relative_error

BATCHES = (1, 2, 4, 6, 8, 10, 12, 14, 16)
LENGTHS = tuple(range(8, 65, 8))
TOLERANCE = 5e-2  # relative, in bfloat16
Request = tuple[Tensor, Tensor]
Engine = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Load:
    """What is asked of an engine."""

    requests: int = 5000
    max_batch: int = 16
    max_length: int = 64
    layers: int = 6
    width: int = 384

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of the buckets."""
        return tuple(size for size in BATCHES if size <= self.max_batch)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the buckets."""
        return tuple(size for size in LENGTHS if size <= self.max_length)


SMALL = Load(requests=12, max_batch=2, max_length=16, layers=1, width=24)
"""For a machine without a GPU."""


def requests(load: Load, device: torch.device) -> list[Request]:
    """Batches of 1 and more and lengths of 8 and more, uniform; on the device."""
    dice, generator = random.Random(0), torch.Generator().manual_seed(0)
    made: list[Request] = []
    for _ in range(load.requests):
        size = dice.randint(1, load.max_batch), dice.randint(8, load.max_length)
        tokens, mask = sentences(*size, generator)
        made.append((tokens.to(device), mask.to(device)))
    return made


# Engines.


def eager(model: nn.Module, load: Load) -> Engine:
    return model


def compile_dynamic(model: nn.Module, load: Load) -> Engine:
    return torch.compile(model, dynamic=True)


def reduce_overhead(model: nn.Module, load: Load) -> Engine:
    """Its results are overwritten by the next call, so they are copied, as a server must."""
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=True)

    def call(tokens: Tensor, mask: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(tokens, mask).clone()

    return call


def by_hand(model: nn.Module, load: Load) -> Engine:
    """A graph for each bucket, the largest first, in one pool: what people write."""
    tokens = torch.zeros(load.max_batch, load.max_length, dtype=torch.int64, device="cuda")
    mask = torch.ones_like(tokens)
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
    stream = torch.cuda.Stream()
    for batch in reversed(load.batches):
        for length in reversed(load.lengths):
            mine = tokens[:batch, :length].clone(), mask[:batch, :length].clone()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                model(*mine)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = model(*mine)
            graphs[batch, length] = graph, *mine, result

    def call(tokens: Tensor, mask: Tensor) -> Tensor:
        batch, length = tokens.shape
        bucket = (
            next(size for size in load.batches if size >= batch),
            next(size for size in load.lengths if size >= length),
        )
        graph, static_tokens, static_mask, result = graphs[bucket]
        static_tokens[:batch, :length].copy_(tokens)
        static_mask.zero_()
        static_mask[:batch, :length].copy_(mask)
        graph.replay()
        return result[:batch, :length].clone()

    return call


def onelaunch(model: nn.Module, load: Load, compile: bool = False) -> Engine:
    buckets = ol.Buckets(dim=(0, 1), sizes=(load.batches, load.lengths), pad={"mask": (None, 0)})
    fast: Any = ol.graph(model, buckets=buckets, warmup=1, compile=compile)
    device = next(model.parameters()).device
    example = sentences(load.max_batch, load.max_length, torch.Generator().manual_seed(1))
    fast.warm_up([tuple(t.to(device) for t in example)])
    return fast


ENGINES: dict[str, Callable[[nn.Module, Load], Engine]] = {
    "eager": eager,
    "compile-dynamic": compile_dynamic,
    "reduce-overhead": reduce_overhead,
    "by-hand": by_hand,
    "onelaunch": onelaunch,
    "onelaunch-compile": functools.partial(onelaunch, compile=True),
}
TITLES = {
    "eager": "eager",
    "compile-dynamic": "torch.compile(dynamic=True)",
    "reduce-overhead": "torch.compile reduce-overhead",
    "by-hand": "buckets by hand",
    "onelaunch": "onelaunch",
    "onelaunch-compile": "onelaunch compile=True",
}
ON_GPUS_ONLY = ("compile-dynamic", "reduce-overhead", "by-hand", "onelaunch-compile")


# Measuring.


@dataclass
class Session:
    """One engine, built and checked."""

    name: str
    engine: Engine
    work: list[Request]
    row: dict[str, Any]

    @property
    def stats(self) -> ol.GraphStats | None:
        return self.engine.stats() if self.name.startswith("onelaunch") else None  # type: ignore[attr-defined]


def build(name: str, load: Load, device: torch.device, seconds: float) -> Session:
    """Build, check on some requests, and go through all of them once, for so long at most."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = minilm(load.layers, load.width).to(device, dtype).eval()
    work = requests(load, device)
    started = time.perf_counter()
    engine = ENGINES[name](model, load)
    error = 0.0
    for tokens, mask in work[: min(8, len(work))]:
        found, expected = engine(tokens, mask), model(tokens, mask)
        assert found.shape == expected.shape
        error = max(error, relative_error([found], [expected]))
    served = 0
    for request in work:
        engine(*request)
        served += 1
        if time.perf_counter() - started > seconds:
            break
    settle(device)
    row: dict[str, Any] = {
        "title": TITLES[name],
        "status": "ok" if error <= TOLERANCE else "wrong",
        "error": error,
        "first pass": served,
        "build seconds": time.perf_counter() - started,
    }
    return Session(name, engine, work, row)


def measure(session: Session, device: torch.device, seconds: float) -> dict[str, Any]:
    """Two passes over the requests, each for so long at most."""
    before = session.stats
    row = session.row
    latencies = in_turn(session.engine, session.work, device, seconds)
    row["latency"] = percentiles(latencies)
    row["throughput"] = in_a_row(session.engine, session.work, device, seconds)
    if device.type == "cuda":
        row["reserved bytes"] = torch.cuda.memory_reserved()
    if before is not None:
        after = session.stats
        assert after is not None
        row["captures"] = after.captures
        row["captures after the first pass"] = after.captures - before.captures
        row["eager calls"] = after.eager_calls + after.warmup_calls
        row["padding"] = after.padding
    return row


def in_turn(
    engine: Engine, work: Sequence[Request], device: torch.device, seconds: float
) -> list[float]:
    """Microseconds from a request to its finished result, nothing else being under way."""
    found: list[float] = []
    settle(device)
    deadline = time.perf_counter() + seconds
    for request in work:
        started = time.perf_counter()
        engine(*request)
        settle(device)
        now = time.perf_counter()
        found.append((now - started) * 1e6)
        if now > deadline:
            break
    return found


def in_a_row(
    engine: Engine, work: Sequence[Request], device: torch.device, seconds: float
) -> dict[str, float]:
    """Requests one upon the other, with one wait at the end."""
    settle(device)
    started, served = time.perf_counter(), 0
    for request in work:
        engine(*request)
        served += 1
        if served % 100 == 0 and time.perf_counter() - started > seconds:
            break
    settle(device)
    took = time.perf_counter() - started
    return {"requests": served, "seconds": took, "per second": served / took}


def percentiles(latencies: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"requests": len(latencies), "p50 us": cuts[49], "p99 us": cuts[98]}


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
