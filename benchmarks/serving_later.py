"""`compile="later"`: the longest call until compiled code takes over, and the speed afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import onelaunch as ol
from benchmarks.serving_engines import Engine, Scale, bucket_inputs, service_model, settle

LOOKS = 32
"""The calls between looks at whether compiled code has taken over."""


def taken_over(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Call one signature, each call followed by a wait for the device, as a service does.

    First without a `warm_up`, when Inductor's cache may be cold, then with it. Eager is called for
    as long as the first took.
    """
    model = service_model(scale, device)
    inputs = next(bucket_inputs(scale, device))
    model(*inputs)  # libraries are loaded
    settle(device)
    found: dict[str, Any] = {"shape": list(inputs[0].shape)}
    for name in ("from the first call", "after warm_up"):
        fast: Any = ol.graph(model, compile="later")
        if name == "after warm_up":
            fast.warm_up([inputs])
        started, over = time.perf_counter(), False
        times: list[float] = []
        while not over and time.perf_counter() - started < scale.later_seconds:
            times += calls(fast, inputs, device, LOOKS)
            over = fast.stats().captures > 1 and len(fast.recordings) == 1
        seconds = time.perf_counter() - started
        found[name] = {
            "taken over": over,
            "seconds": seconds,
            "calls": len(times),
            "longest ms": max(times),
            "longest at": times.index(max(times)),
            "median ms": statistics.median(times),
            "afterwards ms": statistics.median(calls(fast, inputs, device, scale.calls)),
        }
        if name == "from the first call":
            found["eager"] = eager(model, inputs, device, min(seconds, 10.0))
        fast.reset()
    compiled: Any = ol.graph(model, compile=True)
    compiled.warm_up([inputs])
    found["compile=True ms"] = statistics.median(calls(compiled, inputs, device, scale.calls))
    return found


def eager(
    model: Engine, inputs: tuple[Tensor, Tensor], device: torch.device, seconds: float
) -> dict[str, float]:
    started, times = time.perf_counter(), list[float]()
    while time.perf_counter() - started < seconds:
        times += calls(model, inputs, device, LOOKS)
    return {"longest ms": max(times), "median ms": statistics.median(times)}


def calls(
    call: Callable[..., Any], inputs: tuple[Tensor, Tensor], device: torch.device, count: int
) -> list[float]:
    """Milliseconds of each call, until its result is there."""
    found: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        call(*inputs)
        settle(device)
        found.append((time.perf_counter() - started) * 1e3)
    return found
