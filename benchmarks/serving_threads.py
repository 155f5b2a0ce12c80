"""Many threads that call one callable in mixed sizes, in a pool that is too small for all sizes."""

from __future__ import annotations

import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onelaunch as ol
from benchmarks.serving_engines import Scale

READ_EVERY = 100
"""The calls of a thread between reads of its verdict, which wait for the device."""
PATIENCE = 60.0


def long_run(scale: Scale, device: torch.device, seconds: float) -> dict[str, Any]:
    """Call for so long, and count what is wrong, and the threads that raised or did not end.

    Weights and inputs are small integers: each product is exact, and a result is right in every bit
    or wrong.
    """
    torch.manual_seed(0)
    model = nn.Linear(64, scale.features, bias=False).to(device).eval().requires_grad_(False)
    model.weight.copy_(torch.randint(-2, 3, model.weight.shape))
    inputs = torch.randint(-3, 4, (3, scale.thread_sizes, 64), device=device).float()
    expected = [model(x).clone() for x in inputs]
    options: dict[str, Any] = {"warmup": 1, "max_recordings": scale.thread_sizes}
    pool = ol.Pool(max_bytes=budget(model, inputs[0], options))
    fast: Any = ol.graph(model, pool=pool, **options)
    deadline = time.perf_counter() + seconds
    served: list[int] = []
    wrong: list[int] = []
    errors: list[str] = []

    def run(seed: int) -> None:
        dice, count = random.Random(seed), 0
        verdict = torch.zeros((), dtype=torch.int64, device=device)
        try:
            with torch.inference_mode():
                while time.perf_counter() < deadline:
                    size = min(dice.randint(1, scale.thread_sizes) for _ in range(2))
                    which = count % 3
                    found = fast(inputs[which, :size])
                    verdict = verdict + (found != expected[which][:size]).any()
                    count += 1
                    if count % READ_EVERY == 0:
                        verdict.item()
                wrong.append(int(verdict))
                served.append(count)
        except Exception as error:  # noqa: BLE001  it is told, and its requests are lost
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(scale.threads)]
    for thread in threads:
        thread.start()
    samples: list[tuple[int, int, int]] = []
    while time.perf_counter() < deadline:
        time.sleep(seconds / 40)
        samples.append((reserved(device), host_bytes(), pool.memory_bytes))
    for thread in threads:
        thread.join(max(0.0, deadline + PATIENCE - time.perf_counter()))
    stats = fast.stats()
    half = len(samples) // 2
    early = samples[half // 4 : half]  # at first everything is made
    growth = [max(s[i] for s in samples[half:]) - max(s[i] for s in early) for i in range(2)]
    return {
        "threads": scale.threads,
        "seconds": seconds,
        "requests": sum(served),
        "wrong": sum(wrong),
        "lost": scale.threads - len(served),
        "errors": sorted(set(errors)),
        "captures": stats.captures,
        "evictions": stats.evictions,
        "replays": stats.replays,
        "eager calls": stats.eager_calls,
        "budget bytes": pool.max_bytes,
        "largest pool bytes": max(s[2] for s in samples),
        "reserved growth bytes": growth[0],
        "host growth bytes": growth[1],
        "host bytes": samples[-1][1],
    }


def budget(model: nn.Module, x: torch.Tensor, options: dict[str, Any]) -> int:
    """Return a budget between the need of the largest size and that of all: two thirds."""
    pool = ol.Pool()
    fast: Any = ol.graph(model, pool=pool, **options)
    fast.capture(x)
    one = pool.memory_bytes
    for size in range(len(x) - 1, 0, -1):
        fast.capture(x[:size])
    return one + (pool.memory_bytes - one) * 2 // 3


def reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def host_bytes() -> int:
    """Return the memory of this process on the host."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
