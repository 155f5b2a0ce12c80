"""Many sizes made ready by `warm_up` against captures by hand, and the padding of batches by the
measured times of recordings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from benchmarks.batching import BUCKETS, LOAD, RULES, WAITS, simulate
from benchmarks.first_replay_models import by_hand
from benchmarks.serving_engines import Scale, service_model, settle
from benchmarks.shapes_recordings import Scale as EncoderScale
from benchmarks.shapes_recordings import captured, encoder


def sizes_ready(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Seconds until an encoder as BERT-base's has a recording of each size, the largest first, each
    after one warm-up. The smallest is captured before, so that libraries are loaded."""
    of_encoder = EncoderScale(layers=scale.deep_layers, width=scale.deep_width)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = encoder(of_encoder).to(device, dtype).eval()
    shape = scale.deep_sizes[-1], of_encoder.length, scale.deep_width
    example = torch.randn(shape, device=device, dtype=dtype)
    found: dict[str, Any] = {"sizes": len(scale.deep_sizes)}
    for sizes in (scale.deep_sizes[:1], scale.deep_sizes):
        if device.type == "cuda":
            found["by hand"] = timed(lambda s=sizes: captured_by_hand(model, s, example), device)
        found["warm_up"] = timed(lambda s=sizes: captured(model, s, example), device)
    return found


def captured_by_hand(model: nn.Module, sizes: Sequence[int], example: Tensor) -> list[Any]:
    """Capture each size after one warm-up, in one pool, and replay it once."""
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in sizes]
    for graph, size in zip(graphs, reversed(sizes), strict=True):
        by_hand(graph, model, example[:size], pool, 1)
    return graphs


def timed(make: Callable[[], object], device: torch.device) -> float:
    settle(device)
    started = time.perf_counter()
    made = make()
    settle(device)
    seconds = time.perf_counter() - started
    del made
    return seconds


def padded_share(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Simulate arrivals at 70% of what the largest size sustains, each batch taking the time that a
    batcher measured of its size."""
    model = service_model(scale, device)
    length = scale.lengths[-1]
    tokens = torch.ones(1, length, dtype=torch.int64, device=device)
    rows: list[dict[str, Any]] = []
    for title, buckets in BUCKETS.items():
        fast: Any = ol.graph(model, buckets=buckets, warmup=1)
        fast.warm_up([(tokens, tokens.clone())])
        with fast.batcher(max_wait_ms=0.0) as batcher:
            batcher.measure(tokens, tokens.clone())
            times: dict[int, float] = dict(sorted(batcher.times.items()))
        for wait in WAITS:
            most = wait * times[buckets.largest[0]]
            rules = {
                name: simulate(rule, buckets, times, most, scale.arrivals)
                for name, rule in RULES.items()
            }
            rows.append({"sizes": title, "max_wait_ms": most, "times": times, "rules": rules})
    return {"load": LOAD, "requests": scale.arrivals, "length": length, "rows": rows}
