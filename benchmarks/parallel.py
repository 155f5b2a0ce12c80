"""What `parallel` gains over the chain of the same kernels: `results/parallel.json`.

    python -m benchmarks.parallel                            # ten minutes on an H200
    python -m benchmarks.parallel --models critics,bert --out /tmp/some.json

Beside ours stand a graph captured by hand and, for compiled rows, ``mode="reduce-overhead"``. All
are timed in turn, as whole calls. Ours have to agree bit for bit. Networks of images, BERT and
decoders run in bfloat16, the small ones in float32. Decoders run with PDL, too.
Models that a results file has already stay in it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import onelaunch as ol
from benchmarks.decoders import SIZES, Decoder
from benchmarks.processes import chosen, parsed, write
from examples.placement import device
from onelaunch.call.tree import flatten
from onelaunch.driver import edges
from onelaunch.driver.cuda import branches, trial
from onelaunch.tools.bench.environment import environment

ROUNDS = 9
ROUND_SECONDS = 0.04
CALLS = 12  # of a whole step, before its parameters are compared


@dataclass
class Job:
    """A callable to graph, and its inputs.

    Attributes:
        fn: of one input.
        inputs: makes an input; each is another.
        model: what a step trains; None for inference.
        compiled: whether Inductor's kernels are recorded.
        dependent: whether ours are to be measured with dependent launches, too.
    """

    fn: Callable[[Tensor], Any]
    inputs: Callable[[], Tensor]
    model: nn.Module | None = None
    compiled: bool = False
    dependent: bool = False


class Critics(nn.Module):
    """An ensemble of small networks over one input, as of reinforcement learning."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.critics = nn.ModuleList(_mlp() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([critic(x) for critic in self.critics])


class Hidden(nn.Module):
    """BERT-base, from tokens to its last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        library: Any = importlib.import_module("transformers")
        self.bert = library.BertModel(library.BertConfig())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(tokens).last_hidden_state


def _mlp() -> nn.Module:
    layers = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    return nn.Sequential(*layers)


def _rows() -> Tensor:
    return torch.randn(256, 64, device=device())


def _tokens() -> Tensor:
    return torch.randint(30000, (1, 16), device=device())


def _token() -> Tensor:
    return torch.randint(30000, (1, 1), device=device())


def _images(size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(1, 3, size, size, device=device(), dtype=torch.bfloat16)


def _forward(make: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Callable[[], Job]:
    def job() -> Job:
        torch.manual_seed(0)
        model = make().to(device()).eval()
        if inputs is not _rows:
            model = model.to(torch.bfloat16)
        return Job(model, inputs)

    return job


def _timm(name: str, size: int = 224) -> Callable[[], Job]:
    def make() -> nn.Module:
        timm: Any = importlib.import_module("timm")
        return timm.create_model(name)

    return _forward(make, _images(size))


def _googlenet() -> nn.Module:
    models: Any = importlib.import_module("torchvision.models")
    return models.googlenet(weights=None, aux_logits=False, init_weights=False)


def _step(make: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Callable[[], Job]:
    def job() -> Job:
        torch.manual_seed(0)
        model = make().to(device()).eval()
        optimizer = torch.optim.Adam(model.parameters(), 1e-4, capturable=True, fused=True)

        def step(x: Tensor) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return Job(step, inputs, model)

    return job


def _compiled(make: Callable[[], Job], dependent: bool = False) -> Callable[[], Job]:
    return lambda: replace(make(), compiled=True, dependent=dependent)


def _decoder(size: str) -> Callable[[], Job]:
    return _compiled(_forward(lambda: Decoder(size), _token), dependent=True)


_EAGER: dict[str, tuple[str, Callable[[], Job]]] = {
    "critics": ("8 critics (256, 64)", _forward(lambda: Critics(8), _rows)),
    "hrnet": ("HRNet-W18", _timm("hrnet_w18")),
    "nasnet": ("NASNet-A large", _timm("nasnetalarge", 331)),
    "pnasnet": ("PNASNet-5 large", _timm("pnasnet5large", 331)),
    "googlenet": ("GoogLeNet", _forward(_googlenet, _images(224))),
    "inception": ("Inception-v3", _timm("inception_v3", 299)),
    "bert": ("BERT-base (1, 16)", _forward(Hidden, _tokens)),
    "resnet50": ("ResNet-50", _timm("resnet50")),
    "vit": ("ViT-S/16", _timm("vit_small_patch16_224")),
    "critics-step": ("8 critics, a step", _step(lambda: Critics(8), _rows)),
    "twin-step": ("2 critics, a step", _step(lambda: Critics(2), _rows)),
    "mlp-step": ("MLP (256, 64), a step", _step(_mlp, _rows)),
    "bert-step": ("BERT-base (1, 16) float32, a step", _step(Hidden, _tokens)),
}
JOBS = _EAGER | {
    f"{name}-compiled": (f"{_EAGER[name][0]}, compiled", _compiled(_EAGER[name][1]))
    for name in ("critics", "hrnet", "googlenet", "inception", "bert", "resnet50")
}
JOBS |= {
    f"decoder-{size}": (f"decoder {size}, a token, compiled", _decoder(size)) for size in SIZES
}
"""Name -> title and job. Convolutions and attention run as they are chosen for the shapes."""

TARGETS = {
    "critics": 4.0,
    "hrnet": 2.4,
    "nasnet": 1.9,
    "pnasnet": 1.9,
    "googlenet": 1.9,
    "inception": 1.7,
    "bert": 1.15,
    "critics-step": 3.3,
    "twin-step": 1.9,
    "bert-step": 1.15,
    "mlp-step": 1.1,
    "critics-compiled": 2.5,
    "hrnet-compiled": 1.5,
    "googlenet-compiled": 1.5,
    "inception-compiled": 1.4,
    "bert-compiled": 1.24,
}
"""Name -> the gain to reach over the chain."""
LEAST = 0.99
"""The gain to reach by all others."""


ENGINES: dict[str, bool | str] = {"onelaunch": False, "onelaunch-auto": "auto"}
"""Name -> `parallel`."""
PDL = "triton.enable_pdl"
"""The option of Inductor's that turns dependent launches on."""


def others(job: Job) -> dict[str, Callable[[Tensor], Any]]:
    """The engines beside ours."""
    if not job.compiled:
        return {"by-hand": by_hand(job)}
    compiled: Any = torch.compile(job.fn, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(job.inputs())
    return {"reduce-overhead": compiled}


def by_hand(job: Job) -> Callable[[Tensor], Any]:
    """Three warm-ups and a capture, and an input that is copied in at each call."""
    x, stream = job.inputs(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            job.fn(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = job.fn(x)

    def call(given: Tensor) -> Any:
        x.copy_(given)
        graph.replay()
        return result

    return call


def ours(job: Job, parallel: Any) -> tuple[Any, float]:
    """Our graph of a job, and the seconds to the end of its first replay."""
    torch.manual_seed(5)
    fast, x = ol.graph(job.fn, parallel=parallel, compile=job.compiled), job.inputs()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        fast(x)
    torch.cuda.synchronize()
    return fast, time.perf_counter() - began


def timed(calls: dict[str, Callable[[Tensor], Any]], x: Tensor) -> dict[str, dict[str, float]]:
    """Microseconds of a call of each, in turn: the median of the rounds, and its spread."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    counts: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            count = counts.get(name, 10)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                call(x)
            torch.cuda.synchronize()
            each = (time.perf_counter() - began) / count
            if name in counts:
                found[name].append(1e6 * each)
            counts[name] = max(10, int(ROUND_SECONDS / each))
    return {name: _summary(us) for name, us in found.items()}


def _summary(samples: Sequence[float]) -> dict[str, float]:
    first, median, last = statistics.quantiles(samples, n=4)
    return {"median": median, "spread": last - first}


def agree(jobs: Sequence[Job], calls: Sequence[Any]) -> bool:
    """Whether ours give the same bits, and train the same parameters."""
    found: list[list[Tensor]] = []
    for job, call in zip(jobs, calls, strict=True):
        torch.manual_seed(7)
        results: list[Tensor] = []
        for _ in range(CALLS):
            results += flatten(call(job.inputs())).tensors
        found.append([*results, *(job.model.parameters() if job.model is not None else ())])
    return all(all(map(torch.equal, one, found[0])) for one in found)


def _noted(times: Callable[..., list[float]], found: list[list[float]], *args: Any) -> list[float]:
    """The milliseconds of a trial: of the chain, all lanes, and fewer."""
    found.append(times(*args))
    return found[-1]


def measured(name: str) -> dict[str, Any]:
    """One job with all engines."""
    title, make = JOBS[name]
    jobs = {engine: make() for engine in ENGINES}
    beside = make()
    trials: list[list[float]] = []
    with torch.set_grad_enabled(beside.model is not None):
        with patch.object(trial, "times", partial(_noted, trial.times, trials)):
            made = {engine: ours(jobs[engine], parallel) for engine, parallel in ENGINES.items()}
        fast = {engine: call for engine, (call, _) in made.items()}
        own = dict(fast)
        if beside.compiled:  # other buffers may mean other kernels: the chain of the same ones
            jobs["onelaunch"] = make()
            with patch.object(branches, "LEAST_GAIN", float("inf")):
                own["onelaunch"], _ = ours(jobs["onelaunch"], "auto")
            assert own["onelaunch"].recordings[0].parallel is None
        same = agree([*jobs.values()], [*own.values()])
        calls = {**others(beside), **fast}
        dependent: dict[str, float] = {}
        if beside.dependent:
            with importlib.import_module("torch._inductor.config").patch({PDL: True}):
                for engine, parallel in ENGINES.items():
                    other = f"{engine}, PDL"
                    calls[other], dependent[other] = ours(make(), parallel)
        wall = timed(calls, beside.inputs())
    recordings = {engine: call.recordings[0] for engine, call in fast.items()}
    taken = wall["onelaunch"]["median"]
    auto = recordings["onelaunch-auto"].parallel
    return {
        "title": title,
        "wall us": wall,
        "gain": taken / wall["onelaunch-auto"]["median"],
        "gain in the trial": None if auto is None else auto.gain,
        "trials ms": trials,
        "target": TARGETS.get(name, LEAST),
        "same bits": same,
        "nodes": recordings["onelaunch"].nodes,
        "longest chain": recordings["onelaunch"].nodes if auto is None else auto.longest,
        "width": 1 if auto is None else auto.width,
        "picture": str(auto),
        "first replay s": {engine: seconds for engine, (_, seconds) in made.items()},
        "first replay with PDL s": dependent,
        "pool bytes": {engine: r.pool_bytes for engine, r in recordings.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(JOBS), help="names, with commas")
    parser.add_argument("--lanes", type=int, help="of convolutions and the like")
    parser.add_argument("--spare", type=int, help="MiB that are kept for width in compiled code")
    options = parsed(parser, "parallel", argv)
    names = chosen(parser, options.models, list(JOBS))
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    if options.lanes is not None:
        edges.LANES = options.lanes
    if options.spare is not None:
        edges.SPARE_BYTES = options.spare << 20
    torch.cuda.set_stream(torch.cuda.Stream())
    rows: dict[str, Any] = {}
    if options.out.exists():
        rows = json.loads(options.out.read_text())["rows"]
    for name in names:
        try:
            rows[name] = row = measured(name)
        except Exception as error:  # noqa: BLE001 - it is in the results
            rows[name] = {"title": JOBS[name][0], "failed": f"{type(error).__name__}: {error}"}
            print(f"{name}: {rows[name]['failed']}", flush=True)
        else:
            us = ", ".join(f"{k} {v['median']:.0f}" for k, v in row["wall us"].items())
            chain, wide = row["first replay s"].values()
            pool, more = row["pool bytes"].values()
            said = "same bits" if row["same bits"] else "OTHER BITS"
            costs = f"first replay {wide / chain:.2f}x, memory {more / max(pool, 1):.2f}x"
            print(f"{name}: {us} us; {row['gain']:.2f}x, {said}; {costs}", flush=True)
            times = ["/".join(f"{1e3 * ms:.0f}" for ms in times) for times in row["trials ms"]]
            print(f"  trials {', '.join(times)} us, {row['width']} lanes", flush=True)
            if row["first replay with PDL s"]:
                other, _ = row["first replay with PDL s"].values()
                print(f"  first replay {chain:.1f} s, with PDL {other:.1f} s", flush=True)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
        results = {"benchmark": "parallel", "environment": environment(), "rows": rows}
        write(options.out, results)
    right = all(row.get("same bits") for row in rows.values())
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
