"""What recordings of many sizes cost: memory, the time to capture them, a padded call, and a long
run under a budget that is too small for all of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.tools.bench.timers import HostTimer, Timing, timers_for

VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""The sizes that vLLM captures by default up to 512: 51 of them."""


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    conv_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    channels: int = 64
    image: int = 96
    encoder_sizes: tuple[int, ...] = VLLM_SIZES
    layers: int = 12
    width: int = 768
    length: int = 16
    samples: int = 400
    requests: int = 1_000_000
    sizes: int = 64
    features: int = 4096


SMALL = Scale(
    conv_sizes=(1, 2, 4),
    channels=4,
    image=8,
    encoder_sizes=(1, 2, 4),
    layers=1,
    width=24,
    length=4,
    samples=20,
    requests=300,
    sizes=6,
    features=64,
)
"""For a machine without a GPU."""


def conv_stack(scale: Scale) -> nn.Module:
    """Six 3x3 convolutions with ReLU: its intermediates are most of what it needs."""
    widths = (3, *(scale.channels,) * 6)
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(widths[i], widths[i + 1], 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def encoder(scale: Scale) -> nn.Module:
    """A transformer encoder as BERT-base's."""
    layer = nn.TransformerEncoderLayer(scale.width, 12, 4 * scale.width, batch_first=True)
    return nn.TransformerEncoder(layer, scale.layers, enable_nested_tensor=False)


# Memory and time to capture.


def memory(scale: Scale, device: torch.device) -> dict[str, Any]:
    """The conv stack: all sizes in one pool, against the largest alone, and a pool for each."""
    model = conv_stack(scale).to(device).eval()
    example = torch.randn(max(scale.conv_sizes), 3, scale.image, scale.image, device=device)
    return {
        "sizes": list(scale.conv_sizes),
        "alone": held(lambda: [captured(model, scale.conv_sizes[-1:], example)]),
        "one pool": held(lambda: [captured(model, scale.conv_sizes, example)]),
        "separate pools": held(
            lambda: [captured(model, (size,), example) for size in reversed(scale.conv_sizes)]
        ),
    }


def capture(scale: Scale, device: torch.device) -> dict[str, Any]:
    """The encoder: all sizes captured ahead, against the largest alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = encoder(scale).to(device, dtype).eval()
    shape = max(scale.encoder_sizes), scale.length, scale.width
    example = torch.randn(shape, device=device, dtype=dtype)
    alone = held(lambda: [captured(model, scale.encoder_sizes[-1:], example)])
    every = held(lambda: [captured(model, scale.encoder_sizes, example)])
    return {"sizes": len(scale.encoder_sizes), "alone": alone, "all": every}


def captured(model: nn.Module, sizes: Sequence[int], example: Tensor) -> Any:
    """Every size ahead of time, the largest first."""
    buckets = ol.Buckets(dim=0, sizes=tuple(sizes))
    fast: Any = ol.graph(model, buckets=buckets, warmup=1, max_recordings=len(sizes))
    fast.warm_up([example[: max(sizes)]])
    return fast


def held(make: Callable[[], list[Any]]) -> dict[str, float]:
    """What the recordings that `make` returns hold: everything that the allocator reserves for
    them, wherever it is, and what the driver took besides."""
    before = reserved()
    started = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - started
    found = [fast.stats() for fast in made]
    return {
        "seconds": seconds,
        "recordings": sum(len(one.recordings) for one in found),
        "reserved bytes": reserved() - before,
        "driver bytes": sum(one.driver_bytes for one in found),
        "nodes": sum(r.nodes for fast in made for r in fast.recordings),
    }


def reserved() -> int:
    """Bytes that the allocator holds for good reason; 0 without a GPU."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# A padded call.


def overhead(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Host time of a call that is padded, beside one whose size is recorded as it is."""
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)).to(device).eval()
    calls = dict(one_input(model, device)) | dict(three_inputs(device))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    host = timers_for(device)[1]
    assert isinstance(host, HostTimer)
    for call in calls.values():
        for _ in range(10):
            call()
    gc.collect()
    gc.disable()
    try:
        while min(map(len, samples.values())) < scale.samples:
            for name, call in calls.items():
                samples[name] += host.sample(call, 100.0)
    finally:
        gc.enable()
    found = {name: Timing.of(taken) for name, taken in samples.items()}
    return {
        name: {"median_us": t.median_us, "spread_us": t.spread_us, "samples": t.samples}
        for name, t in found.items()
    }


def one_input(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    exact: Any = ol.graph(model, warmup=1)
    padded: Any = ol.graph(model, buckets=ol.Buckets(dim=0, sizes=(8, 16, 32)), warmup=1)
    full, short = torch.randn(32, 1024, device=device), torch.randn(27, 1024, device=device)
    yield "exact, one input", lambda: exact(full)
    yield "a bucket's size, one input", lambda: padded(full)
    yield "padded, one input", lambda: padded(short)


def three_inputs(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a + b) * c

    buckets = ol.Buckets(dim=(0, 1), sizes=((8, 16), (64, 128)))
    exact: Any = ol.graph(f, warmup=1)
    padded: Any = ol.graph(f, buckets=buckets, warmup=1)
    full = [torch.randn(16, 128, device=device) for _ in range(3)]
    short = [torch.randn(13, 101, device=device) for _ in range(3)]
    yield "exact, three inputs", lambda: exact(*full)
    yield "padded, three inputs", lambda: padded(*short)


# A long run under a budget.


def churn(scale: Scale, device: torch.device, seconds: float) -> dict[str, Any]:
    """Random sizes, small ones more often, results kept in the pool, and room for two thirds.

    Weights and inputs are small integers, so that every product is exact and a result is right in
    every bit or wrong. Verdicts are gathered on the device and read once.
    """
    torch.manual_seed(0)
    model = nn.Linear(64, scale.features, bias=False).to(device).eval()
    model.weight.copy_(torch.randint(-2, 3, model.weight.shape))
    inputs = torch.randint(-3, 4, (3, scale.sizes, 64), device=device).float()
    expected = [model(x).clone() for x in inputs]
    need = budget(model, inputs[0], scale.sizes)
    pool = ol.Pool(max_bytes=need["budget bytes"])
    fast: Any = ol.graph(
        model, pool=pool, warmup=1, outputs="static", max_recordings=scale.sizes, on_refusal="raise"
    )
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    dice = random.Random(0)
    first = measured = None
    started, served, largest = time.perf_counter(), 0, 0
    totals = {"captures": 0, "evictions": 0, "replays": 0, "eager calls": 0}
    for i in range(scale.requests):
        size, which = min(dice.randint(1, scale.sizes), dice.randint(1, scale.sizes)), i % 3
        wrong += (fast(inputs[which, :size]) != expected[which][:size]).any()
        served += 1
        if i == scale.requests // 20 or i == scale.requests - 1:
            add(totals, fast)
            largest = max(largest, pool.memory_bytes)
            fast.reset()
            first, measured = measured, device_bytes()
        elif i % 20_000 == 0:
            largest = max(largest, pool.memory_bytes)
            if time.perf_counter() - started > seconds and first is None and measured is not None:
                break
    if first is None:
        add(totals, fast)
        fast.reset()
        first, measured = measured, device_bytes()
    assert first is not None
    assert measured is not None
    return {
        **need,
        "requests": served,
        "seconds": time.perf_counter() - started,
        "wrong": int(wrong),
        **totals,
        "largest pool bytes": largest,
        "reserved growth bytes": measured[0] - first[0],
        "device growth bytes": measured[1] - first[1],
    }


def budget(model: nn.Module, x: Tensor, sizes: int) -> dict[str, int]:
    """What all sizes need together, and a budget between that and the need of one."""
    pool = ol.Pool()
    fast: Any = ol.graph(
        model, pool=pool, warmup=1, outputs="static", max_recordings=sizes, on_refusal="raise"
    )
    fast.capture(x)
    one = pool.memory_bytes
    for size in range(sizes - 1, 0, -1):
        fast.capture(x[:size])
    need = pool.memory_bytes
    return {"need bytes": need, "budget bytes": one + (need - one) * 2 // 3}


def add(totals: dict[str, int], fast: Any) -> None:
    found = fast.stats()
    totals["captures"] += found.captures
    totals["evictions"] += found.evictions
    totals["replays"] += found.replays
    totals["eager calls"] += found.eager_calls


def device_bytes() -> tuple[int, int]:
    """What the allocator holds, and what is taken of the device in all."""
    held = reserved()
    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return held, total - free
