"""The first replays of large models in a process that has captured before."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from examples import resnet
from examples.placement import device

WARM_UPS = 3
BUCKETS = (1, 2, 4, 8)
Network = tuple[nn.Module, Callable[[int], Tensor]]
"""A model in eval mode, and its input for a batch of some size."""


def _tokens(length: int, vocabulary: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(vocabulary, (batch, length), device=device())


def _images(size: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size, device=device())


class _Hidden(nn.Module):
    """A model of transformers, from tokens to its last hidden state."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, **self.options).last_hidden_state


def _llama() -> Network:
    library: Any = importlib.import_module("transformers")
    if device().type == "cpu":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = library.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=1000)
        return _Hidden(library.LlamaModel(config), use_cache=False), _tokens(16, 1000)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    config = library.LlamaConfig(**sizes, num_hidden_layers=12, vocab_size=32000)
    return _Hidden(library.LlamaModel(config), use_cache=False), _tokens(128, 32000)


def _bert() -> Network:
    library: Any = importlib.import_module("transformers")
    if device().type == "cpu":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = library.BertConfig(**sizes, num_hidden_layers=2)
    else:
        config = library.BertConfig()
    return _Hidden(library.BertModel(config)), _tokens(16, config.vocab_size)


def _resnet() -> Network:
    if device().type == "cpu":
        return resnet.ResNet((1, 1, 1, 1), classes=10), _images(64)
    return resnet.resnet50(), _images(224)


def _hrnet() -> Network:
    timm: Any = importlib.import_module("timm")
    if device().type == "cpu":
        return timm.create_model("hrnet_w18_small"), _images(64)
    return timm.create_model("hrnet_w18"), _images(224)


MODELS: dict[str, Callable[[], Network]] = {
    "resnet50": _resnet,
    "bert": _bert,
    "llama": _llama,
    "hrnet": _hrnet,
}


def measured(name: str, repeats: int) -> dict[str, Any]:
    """Time the first replays of a model, ours and by hand in turn: the first of each, and that of
    each further bucket. Seconds of every repeat; the first repeat warms up and does not count."""
    try:
        model, make = MODELS[name]()
    except ImportError as error:
        return {"status": "missing", "reason": str(error)}
    model = model.to(device()).eval()
    parameters = sum(p.numel() for p in model.parameters())
    inputs = {size: make(size) for size in BUCKETS}
    found: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        found.setdefault(what, []).append(seconds)

    with torch.no_grad():
        for _ in range(1 + repeats):
            note("eager", _timed(lambda: model(inputs[BUCKETS[-1]])))
            fast = ol.graph(model)
            note("onelaunch", _timed(lambda fast=fast: first_replay(fast, inputs[BUCKETS[0]])))
            fast.reset()
            if device().type == "cuda":
                graph = torch.cuda.CUDAGraph()
                note("by-hand", _timed(lambda g=graph: by_hand(g, model, inputs[BUCKETS[0]])))
                graph.reset()
            _buckets(model, inputs, note)
    return {
        "status": "ok",
        "parameters": parameters,
        "small": device().type == "cpu",
        "input": list(inputs[BUCKETS[0]].shape),
        "seconds": {what: times[_skipped(what) :] for what, times in found.items()},
    }


def _skipped(what: str) -> int:
    """Return the number of times that are no repeat: those of the first round."""
    return len(BUCKETS) - 1 if "bucket" in what else 1


def _buckets(
    model: nn.Module, inputs: dict[int, Tensor], note: Callable[[str, float], None]
) -> None:
    """Time each further bucket, the largest first as both ways have it."""
    sizes = sorted(BUCKETS, reverse=True)
    fast = ol.graph(model, buckets=ol.Buckets(dim=0, sizes=BUCKETS))
    first_replay(fast, inputs[sizes[0]])
    for size in sizes[1:]:
        note("onelaunch bucket", _timed(lambda size=size: first_replay(fast, inputs[size])))
    fast.reset()
    if device().type != "cuda":
        return
    graphs = [torch.cuda.CUDAGraph() for _ in sizes]
    pool = torch.cuda.graph_pool_handle()
    by_hand(graphs[0], model, inputs[sizes[0]], pool)
    for graph, size in zip(graphs[1:], sizes[1:], strict=True):
        capture = lambda g=graph, s=size: by_hand(g, model, inputs[s], pool)  # noqa: E731
        note("by-hand bucket", _timed(capture))
    for graph in graphs:
        graph.reset()


def first_replay(fast: Any, x: Tensor) -> None:
    """Call until a replay is made."""
    before = fast.stats().replays
    while fast.stats().replays == before:
        fast(x)


def by_hand(
    graph: Any, model: nn.Module, x: Tensor, pool: Any = None, warm_ups: int = WARM_UPS
) -> None:
    """Capture as torch's documents do, and replay."""
    static, stream = x.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            model(static)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, pool=pool):
        result = model(static)
    static.copy_(x)
    graph.replay()
    result.clone()


def _timed(run: Callable[[], object]) -> float:
    if device().type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float | None:
    """Return how many times as long ours takes, of medians; None without theirs."""
    if not seconds.get(ours) or not seconds.get(theirs):
        return None
    return statistics.median(seconds[ours]) / statistics.median(seconds[theirs])
