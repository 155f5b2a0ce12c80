"""Decoding one text, token by token: `generate` of transformers, and a loop of one's own.

    python -m examples.generate                           # every engine, three sizes: on a GPU
    python -m examples.generate --sizes 15m --tokens 32   # a small one, on a CPU too

Decoders of random weights, in bfloat16 on a GPU. At batch 1 a step takes a GPU a fraction of a
millisecond, and launching it takes eager several. The loop keeps one cache for all requests, as a
graph by hand and reduce-overhead need it; `generate` makes one for each.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import onelaunch as ol
from examples.placement import device
from onelaunch.tools.bench.environment import environment, version

SIZES: dict[str, dict[str, int]] = {
    "15m": {"hidden_size": 288, "intermediate_size": 768, "num_attention_heads": 6},
    "100m": {"hidden_size": 1024, "intermediate_size": 2304, "num_attention_heads": 16},
    "1.2b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
PROMPT = 16
SEED = 7
WARMUP = 2  # requests: the second of `generate` with a cache that is new to the recordings

# The argument of a decoder that takes the cache: transformers 5.24 renamed it.
PARAMETERS = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"

Serve = Callable[[Tensor, int], Tensor]
"""A function from a prompt (1, n) and a number of tokens to the new tokens (1, tokens)."""


def decoder(size: str, where: torch.device) -> LlamaForCausalLM:
    """A Llama of 6 layers, its input and output embeddings tied."""
    config = LlamaConfig(
        **SIZES[size],
        num_hidden_layers=6,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    with where:
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval().requires_grad_(False)


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def sampled(logits: Tensor) -> Tensor:
    return torch.multinomial(logits[:, -1].float().softmax(-1), 1)


PICKS: dict[str, Callable[[Tensor], Tensor]] = {"greedy": greedy, "sampled": sampled}


def by_loop(engine: str, model: Any, pick: Callable[[Tensor], Tensor], length: int) -> Serve:
    """A loop of one's own: a step is the model and the choice of the next token."""

    def step(token: Tensor, cache: StaticCache) -> Tensor:
        return pick(model(token, use_cache=True, **{CACHE: cache}).logits[:, -1:])

    if engine == "by-hand":
        return by_hand(model, step, length)
    run: Callable[[Tensor, StaticCache], Tensor] = step
    if engine == "onelaunch":
        run = ol.graph(step)
    elif engine == "onelaunch-compile":
        run = ol.graph(step, compile=True)
    elif engine == "reduce-overhead":
        compiled = torch.compile(step, mode="reduce-overhead")

        def marked(token: Tensor, cache: StaticCache) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(token, cache).clone()  # the next call overwrites it

        run = marked

    cache = StaticCache(config=model.config, max_cache_len=length)

    def serve(prompt: Tensor, tokens: int) -> Tensor:
        cache.reset()
        made = [step(prompt, cache)]
        for _ in range(tokens - 1):
            made.append(run(made[-1], cache))
        return torch.cat(made, 1)

    return serve


def by_hand(model: Any, step: Callable[[Tensor, StaticCache], Tensor], length: int) -> Serve:
    """A CUDA graph over one cache and one token, which the host copies in and out."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    step(token.repeat(1, PROMPT), cache)  # makes the cache's memory
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(token, cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = step(token, cache)

    def serve(prompt: Tensor, tokens: int) -> Tensor:
        cache.reset()
        made = [step(prompt, cache)]
        for _ in range(tokens - 1):
            token.copy_(made[-1])
            graph.replay()
            made.append(chosen.clone())
        return torch.cat(made, 1)

    return serve


def graphed(engine: str, model: Any) -> Any:
    """The one line that a user of `generate` adds."""
    if engine == "onelaunch":
        return ol.graph(model)
    return ol.graph(model, compile=True) if engine == "onelaunch-compile" else model


def by_generate(engine: str, served: Any, pick: str) -> Serve:
    """`generate` of transformers, which on a GPU compiles the model by itself unless told not to:
    that is reduce-overhead here."""
    options: dict[str, Any] = {"do_sample": False}
    if pick == "sampled":
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}

    def serve(prompt: Tensor, tokens: int) -> Tensor:
        whole = served.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            cache_implementation="static",
            disable_compile=engine != "reduce-overhead",
            **options,
        )
        return whole[:, prompt.shape[1] :]

    return serve


class Row(NamedTuple):
    """An engine's way through one kind of request.

    Attributes:
        us: microseconds for each token of a request, its prompt included: one figure per request.
        agree: the tokens before the first that differs from eager's.
        first_s: seconds that the first requests took, compilation and capture included.
    """

    size: str
    way: str
    pick: str
    engine: str
    us: list[float]
    agree: int
    first_s: float
    status: str = "ok"


ENGINES = ("eager", "reduce-overhead", "by-hand", "onelaunch", "onelaunch-compile")
ON_CPU = ("eager", "onelaunch")
WAYS = ("loop", "generate")


def timed(serve: Serve, prompt: Tensor, tokens: int) -> tuple[Tensor, float]:
    """Serve one request from the seed; return its tokens and seconds."""
    torch.manual_seed(SEED)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    made = serve(prompt, tokens)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return made.cpu(), time.perf_counter() - started


class Kind(NamedTuple):
    """One kind of request, by one engine: the first fields of a `Row`."""

    size: str
    way: str
    pick: str
    engine: str


def measured(
    size: str, engines: list[str], ways: list[str], tokens: int, repeats: int
) -> Iterator[Row]:
    """Measure each engine on a decoder of one size."""
    where = device()
    model = decoder(size, where)
    prompt = torch.randint(1, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    prompt = prompt.to(where)
    for way in ways:
        torch._dynamo.reset()
        able = [e for e in engines if (e, way) != ("by-hand", "generate")]
        served = {e: graphed(e, model) if way == "generate" else model for e in able}
        for pick, choose in PICKS.items():
            makes: dict[Kind, Callable[[], Serve]] = {}
            for engine in able:
                if way == "loop":
                    make = functools.partial(by_loop, engine, model, choose, PROMPT + tokens)
                else:
                    make = functools.partial(by_generate, engine, served[engine], pick)
                makes[Kind(size, way, pick, engine)] = make
            yield from in_turn(makes, prompt, tokens, repeats)
        del makes, served
        model.__dict__.pop("_compiled_call", None)  # of `generate`
        gc.collect()


def in_turn(
    makes: dict[Kind, Callable[[], Serve]], prompt: Tensor, tokens: int, repeats: int
) -> Iterator[Row]:
    """Measure requests of one kind by each engine in turn, so that a host that is slow for a while
    is slow for all of them.

    Args:
        makes: the engines, each made at its first request.
    """
    serves: dict[Kind, Serve] = {}
    firsts: dict[Kind, float] = {}
    made: dict[Kind, Tensor] = {}
    seconds: dict[Kind, list[float]] = {kind: [] for kind in makes}
    failed: dict[Kind, str] = {}
    for turn in range(WARMUP + repeats):
        for kind, make in makes.items():
            if kind in failed:
                continue
            started = time.perf_counter()
            try:
                if kind not in serves:
                    serves[kind] = make()
                made[kind], taken = timed(serves[kind], prompt, tokens)
            except Exception as error:  # noqa: BLE001  a row of its own, and the others go on
                failed[kind] = f"{type(error).__name__}: {error}"[:200]
                continue
            if turn < WARMUP:
                firsts[kind] = firsts.get(kind, 0.0) + time.perf_counter() - started
            else:
                seconds[kind].append(taken)
    expected = next((made[kind] for kind in makes if kind not in failed), None)
    for kind in makes:
        if kind in failed:
            yield Row(*kind, [], 0, 0.0, failed[kind])
            continue
        same = (made[kind] == expected)[0].int().cumprod(0).sum().item()
        us = [taken / tokens * 1e6 for taken in seconds[kind]]
        yield Row(*kind, us, int(same), firsts[kind])


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    engines = ENGINES if gpu else ON_CPU
    parser.add_argument("--sizes", default=",".join(SIZES) if gpu else "15m")
    parser.add_argument("--engines", default=",".join(engines), help="the first is the reference")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, help="a file for the results, as JSON; others of this machine stay"
    )
    options = parser.parse_args(argv)
    chosen: dict[str, list[str]] = {}
    for name, known in (("sizes", SIZES), ("engines", ENGINES), ("ways", WAYS)):
        chosen[name] = getattr(options, name).split(",")
        if unknown := set(chosen[name]) - set(known):
            parser.error(f"--{name}: no {' or '.join(unknown)} among {', '.join(known)}")
    kept = earlier(options.out, options.tokens)
    rows: list[Row] = []
    with torch.no_grad():
        for size in chosen["sizes"]:
            limits = options.tokens, options.repeats
            for row in measured(size, chosen["engines"], chosen["ways"], *limits):
                rows.append(row)
                figure = f"{statistics.median(row.us):9,.0f} us" if row.us else row.status
                text = (
                    f"{figure} a token, {row.agree} tokens as eager's, {row.first_s:.1f} s before"
                )
                print(f"{size:5} {row.way:9} {row.pick:8} {row.engine:18}{text}", flush=True)
                if options.out is not None:  # what is known by now, should it be cut off
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    now = {row[:4] for row in rows}
                    whole = [*(row for row in kept if row[:4] not in now), *rows]
                    found = json.dumps(results(sorted(whole, key=place), options.tokens), indent=1)
                    options.out.write_text(found + "\n")
    return rows


def earlier(out: Path | None, tokens: int) -> list[Row]:
    """Return the rows of a results file, if it is of this machine and of such requests."""
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text())
    if (found["environment"], found["tokens"]) != (versions(), tokens):
        return []
    return [Row(**{name: row[name] for name in Row._fields}) for row in found["rows"]]


def place(row: Row) -> tuple[int, int, int, int]:
    """Order the rows as they are measured."""
    return (
        list(SIZES).index(row.size),
        WAYS.index(row.way),
        list(PICKS).index(row.pick),
        ENGINES.index(row.engine),
    )


def versions() -> dict[str, Any]:
    return environment() | {"transformers": version("transformers")}


def results(rows: list[Row], tokens: int) -> dict[str, Any]:
    """The rows as data, with the medians and the spread."""
    made = [
        {
            **row._asdict(),
            "median_us": statistics.median(row.us) if row.us else None,
            "min_us": min(row.us, default=None),
            "max_us": max(row.us, default=None),
        }
        for row in rows
    ]
    return {"benchmark": "generate", "environment": versions(), "tokens": tokens, "rows": made}


if __name__ == "__main__":
    main()
