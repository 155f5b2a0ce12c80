"""The engines of an embedding service. Each takes tokens and a mask of any size up to a largest."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import onelaunch as ol
from benchmarks.shapes_recordings import VLLM_SIZES
from examples.bert import minilm
from examples.embeddings import Embedder

Engine = Callable[[Tensor, Tensor], Tensor]
VOCABULARY = 30522


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        rows, lengths: the buckets.
        most_rows: of a request.
        known: the number of different requests.
        limit_ms: of the p99.
        first_rate, halvings, run_seconds, clients: of the search for the highest rate.
        sizes, beside_seconds: of the captures in the background.
        layers, width: of MiniLM; `deep_*` those of the encoder that is captured in many sizes.
        later_seconds: the most until compiled code takes over.
        threads, features, thread_sizes: of the long run of threads.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    lengths: tuple[int, ...] = (16, 32, 64)
    most_rows: int = 8
    known: int = 256
    limit_ms: float = 20.0
    first_rate: float = 2000.0
    halvings: int = 4
    run_seconds: float = 1.0
    clients: int = 4
    sizes: int = 64
    beside_seconds: float = 20.0
    layers: int = 6
    width: int = 384
    deep_sizes: tuple[int, ...] = VLLM_SIZES
    deep_layers: int = 12
    deep_width: int = 768
    later_seconds: float = 60.0
    calls: int = 2000
    arrivals: int = 40_000
    threads: int = 32
    features: int = 4096
    thread_sizes: int = 64


SMALL = Scale(
    rows=(1, 2, 4),
    lengths=(8, 16),
    most_rows=2,
    known=6,
    limit_ms=500.0,
    first_rate=20.0,
    halvings=0,
    run_seconds=0.3,
    clients=1,
    sizes=3,
    beside_seconds=2.0,
    layers=1,
    width=24,
    deep_sizes=(1, 2, 4),
    deep_layers=1,
    deep_width=24,
    later_seconds=1.0,
    calls=30,
    arrivals=2000,
    threads=4,
    features=64,
    thread_sizes=6,
)
"""For a machine without a GPU."""


def service_model(scale: Scale, device: torch.device) -> nn.Module:
    """An embedder of MiniLM's shape, from tokens and mask to unit vectors; weights of a seed."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Embedder(minilm(scale.layers, scale.width).bert)
    return model.to(device, dtype).eval().requires_grad_(False)


def collated(requests: list[Any], device: torch.device, length: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and mask of several requests in one batch. Token 0 pads."""
    longest = max(length, *(tokens.shape[1] for tokens in requests))
    made = np.zeros((sum(map(len, requests)), longest), np.int64)
    row = 0
    for tokens in requests:
        made[row : row + len(tokens), : tokens.shape[1]] = tokens
        row += len(tokens)
    mask = (made != 0).astype(np.int64)
    return torch.from_numpy(made).to(device), torch.from_numpy(mask).to(device)


def mixed_requests(scale: Scale) -> list[Any]:
    """Sentences of 2 to the largest length, 1 to `most_rows` in a request."""
    dice = np.random.default_rng(0)
    made: list[Any] = []
    for _ in range(scale.known):
        lengths = dice.integers(2, scale.lengths[-1] + 1, dice.integers(1, scale.most_rows + 1))
        tokens = dice.integers(1, VOCABULARY, (len(lengths), lengths.max()))
        made.append(tokens * (np.arange(lengths.max()) < lengths[:, None]))
    return made


def answers(model: Engine, requests: list[Any], device: torch.device) -> list[Any]:
    """Eager's answers, each request by itself."""
    return [model(*collated([tokens], device)).float().cpu().numpy() for tokens in requests]


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bucket_of(scale: Scale, rows: int, length: int) -> tuple[int, int]:
    return (
        next(size for size in scale.rows if size >= rows),
        next(size for size in scale.lengths if size >= length),
    )


def bucket_inputs(scale: Scale, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """A call of each bucket, the largest first."""
    for rows in reversed(scale.rows):
        for length in reversed(scale.lengths):
            ones = torch.ones(rows, length, dtype=torch.int64, device=device)
            yield ones, ones.clone()


# Engines: each is made with the callable that has its recordings, None for those of others.

Made = tuple[Engine, Any]


def padded(call: Engine, scale: Scale) -> Engine:
    """Pad to a bucket before the call, and cut its result: what people write."""

    def run(tokens: Tensor, mask: Tensor) -> Tensor:
        rows, length = tokens.shape
        bucket = bucket_of(scale, rows, length)
        more = (0, bucket[1] - length, 0, bucket[0] - rows)
        pad = nn.functional.pad
        return call(pad(tokens, more), pad(mask, more))[:rows]

    return run


def compile_dynamic(model: nn.Module, scale: Scale) -> Made:
    return torch.compile(model, dynamic=True), None


def reduce_overhead(model: nn.Module, scale: Scale) -> Made:
    """It records each size, so sizes are padded to the buckets of the others."""
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=True)

    def call(tokens: Tensor, mask: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(tokens, mask).clone()

    return padded(call, scale), None


def by_hand(model: nn.Module, scale: Scale) -> Made:
    """A graph for each bucket, the largest first, in one pool."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
    for tokens, mask in bucket_inputs(scale, torch.device("cuda")):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(tokens, mask)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = model(tokens, mask)
        graphs[tuple(tokens.shape)] = graph, tokens, mask, result

    def call(tokens: Tensor, mask: Tensor, weights: nn.Module = model) -> Tensor:
        # The graphs read the weights, which nobody else keeps.
        rows, length = tokens.shape
        graph, mine, my_mask, result = graphs[bucket_of(scale, rows, length)]
        mine[:rows, :length].copy_(tokens)
        my_mask.zero_()
        my_mask[:rows, :length].copy_(mask)
        graph.replay()
        return result[:rows].clone()

    return call, None


def onelaunch(model: nn.Module, scale: Scale, **options: Any) -> Made:
    buckets = ol.Buckets(dim=(0, 1), sizes=(scale.rows, scale.lengths), pad={"mask": (None, 0)})
    if options.get("compile"):  # no check of cuDNN's masks fits into compiled code
        torch.backends.cuda.enable_cudnn_sdp(False)
    fast: Any = ol.graph(model, buckets=buckets, warmup=1, **options)
    if options.get("capture") != "background":  # there calls ask for the sizes
        fast.warm_up([next(bucket_inputs(scale, next(model.parameters()).device))])
    return fast, fast


def later(model: nn.Module, scale: Scale) -> Made:
    fast: Any = ol.graph(model, compile="later", warmup=1)
    return padded(fast, scale), fast


ENGINES: dict[str, Callable[[nn.Module, Scale], Made]] = {
    "eager": lambda model, scale: (model, None),
    "compile-dynamic": compile_dynamic,
    "reduce-overhead": reduce_overhead,
    "by-hand": by_hand,
    "onelaunch": onelaunch,
    "onelaunch-batcher": onelaunch,
    "onelaunch-background": functools.partial(onelaunch, capture="background"),
    "onelaunch-later": later,
    "onelaunch-compile": functools.partial(onelaunch, compile=True),
    "onelaunch-compile-batcher": functools.partial(onelaunch, compile=True),
}
COMPILED = {name for name in ENGINES if "compile" in name} | {"reduce-overhead", "onelaunch-later"}
ON_GPUS_ONLY = COMPILED | {"by-hand"}


def visit(name: str, made: Made, scale: Scale, device: torch.device, seconds: float) -> None:
    """Call every bucket three times, then batches of all sizes. Where captures or a compiler are
    under way in the background, go on until all is done, for so long at most."""
    deadline, inputs = time.perf_counter() + seconds, list(bucket_inputs(scale, device))
    requests = mixed_requests(scale)
    engine, fast = made
    times = 0
    while times < 3 or not settled(name, fast, len(inputs)):
        for tokens, mask in inputs:
            engine(tokens, mask)
        settle(device)
        times += 1
        if time.perf_counter() > deadline:
            break
        if times >= 3:
            time.sleep(0.05)  # for the threads in the background
    for i in range(len(requests)):
        engine(*collated(requests[i : i + 1 + i % (scale.rows[-1] // scale.most_rows)], device))
    settle(device)


def settled(name: str, fast: Any, buckets: int) -> bool:
    """Return whether nothing is captured or compiled in the background any more."""
    captures = {"onelaunch-background": buckets, "onelaunch-later": 2 * buckets}.get(name)
    return captures is None or fast.stats().captures >= captures
