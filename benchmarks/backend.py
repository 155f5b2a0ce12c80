"""The backend of `torch.compile`, beside Inductor's own CUDA graphs: `results/backend.json`.

    python -m benchmarks.backend                               # all, some fifteen minutes
    python -m benchmarks.backend --workloads sine,breaks,host  # these anew, the others as they are
    python -m benchmarks.backend --dtype bf16

TF32 off. Each workload has a process of its own, one after the other, so that a time to build is
what one program sees. Each engine builds with empty caches, after plain `torch.compile` has built
the same once: what a process does at its first compilation is in no engine's time. What
`--workload-seconds` leaves undone is in the rows, and each workload is in the file as soon as it
is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

import onelaunch as ol
from benchmarks.backend_workloads import WORKLOADS, Compile, Work, made
from benchmarks.call_overhead import (
    Contestant,
    Row,
    Target,
    building,
    judge,
    measure,
    result_of,
    spread,
    target_lines,
)
from benchmarks.processes import (
    chosen,
    no_silent_eager,
    parsed,
    ready_by,
    run_and_write,
    wait_for_turn,
)
from examples.placement import device
from onelaunch.dynamo import onelaunch
from onelaunch.dynamo.backend import regions
from onelaunch.tools.bench.precision import relative_error
from onelaunch.tools.bench.reference import outputs

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ENGINE_SECONDS = 120.0  # to build one engine
WARM_STEPS = 6
TOLERANCE = {("fp32", False): 1e-3, ("fp32", True): 2e-2, ("bf16", False): 0.1, ("bf16", True): 0.3}
"""The most relative error, by type and whether it trains."""


@dataclass
class Built(Row):
    """A row with the seconds until the engine was warm."""

    build_seconds: float | None = None


@dataclass(frozen=True)
class Engine:
    """A way to run a step.

    Attributes:
        begin: called before each step.
    """

    title: str
    compile: Compile
    begin: Callable[[], object] | None = None


def _answered(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph to the results of its first call: what is left of a call is Dynamo's."""
    results: list[Any] = []

    def answer(*args: Any) -> Any:
        if not results:
            results.append(graph(*args))
        return results[0]

    return answer


ENGINES: dict[str, Engine] = {
    "eager": Engine("eager", lambda fn: fn),
    "backend": Engine(
        'torch.compile(backend="onelaunch")', lambda fn: torch.compile(fn, backend=onelaunch)
    ),
    "reduce-overhead": Engine(
        'torch.compile(mode="reduce-overhead")',
        lambda fn: torch.compile(fn, mode="reduce-overhead"),
        torch.compiler.cudagraph_mark_step_begin,
    ),
    "cudagraphs": Engine(
        'torch.compile(backend="cudagraphs")',
        lambda fn: torch.compile(fn, backend="cudagraphs"),
        torch.compiler.cudagraph_mark_step_begin,
    ),
    "dynamo": Engine("Dynamo's checks alone", lambda fn: torch.compile(fn, backend=_answered)),
    "graph": Engine("ol.graph", ol.graph),
    "graph-compile": Engine("ol.graph(compile=True)", lambda fn: ol.graph(fn, compile=True)),
    "backend-eager": Engine(
        'torch.compile(backend="onelaunch"), codegen="eager"',
        lambda fn: torch.compile(fn, backend=onelaunch, options={"codegen": "eager"}),
    ),
}


def build(
    name: str, work: Work, expected: Sequence[Any], deadline: float, most: float, caches: str
) -> Contestant:
    """Build an engine and check it against eager's results; what goes wrong is in its row."""
    engine = ENGINES[name]
    row = Built(name, engine.title)
    contestant = Contestant(row, kept=work)
    with (
        building(row, deadline),
        fresh_cache(dir=caches, delete=False),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", ol.GraphWarning)
        before, started = captures(), time.monotonic()
        contestant.call = step = work.step(engine.compile, engine.begin)
        found = warm(step)
        if device().type == "cuda":
            torch.cuda.synchronize()
        row.build_seconds = time.monotonic() - started
        row.notes = [str(w.message) for w in caught if w.category is ol.GraphWarning]
        if name.startswith("backend"):
            row.notes.append(f"{captures() - before} recordings")
        judge(row, relative_error(found, expected), most)
    return contestant


def captures() -> int:
    """The recordings that the backend has made."""
    return sum(graphed.stats().captures for graphed in regions.graphs())


def warm(step: Callable[[], Any]) -> list[Any]:
    """Run the first steps, and return the results of the last."""
    found: list[Any] = []
    for _ in range(WARM_STEPS):
        found = [t.clone() for t in outputs(step())]
    return found


def start_compilers(work: Work, caches: str) -> None:
    """Do what the first compilation in a process does, so that it is in no engine's time."""
    with fresh_cache(dir=caches, delete=False):
        warm(work.step(torch.compile, None))
        with torch.no_grad():
            for name in ("reduce-overhead", "backend"):
                run = ENGINES[name].compile(lambda x: x + 1)
                warm(partial(run, torch.ones(8, device=device())))
    torch._dynamo.reset()


def build_all(name: str, dtype: str, last: float) -> list[Contestant]:
    """Build engines on a workload, each with caches that plain `torch.compile` has filled."""
    eager = made(name, TYPES[dtype])
    expected = warm(eager.step(lambda fn: fn, None))
    most = TOLERANCE[dtype, eager.train]
    contestants: list[Contestant] = []
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    start_compilers(made(name, TYPES[dtype]), folder.name)
    for engine in ENGINES:
        if engine == "dynamo" and eager.train:
            continue
        work, deadline = made(name, TYPES[dtype]), min(last, time.time() + ENGINE_SECONDS)
        contestant = build(engine, work, expected, deadline, most, folder.name)
        contestant.kept = (contestant.kept, folder)  # its kernels are in that folder
        contestants.append(contestant)
    return contestants


def one(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Build, say so, wait to be told, measure."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the processes share the cores
    no_silent_eager()
    contestants = build_all(name, dtype, ready_by())
    wait_for_turn()
    measure(contestants, device(), samples=300, seconds=seconds)
    rows = [c.row for c in contestants]
    return result_of(rows, targets(name, rows))


def targets(name: str, rows: Iterable[Any]) -> list[Target]:
    """What the figures are to reach, of those that both sides of it were measured for."""
    known = {row.variant: row for row in rows if row.wall and row.host}
    found: list[Target] = []

    def to_reach(rule: str, figure: str, other: str, times: float) -> None:
        if "backend" in known and other in known:
            ours, theirs = _figure(known["backend"], figure), _figure(known[other], figure)
            found.append(Target("backend", figure, rule, times * theirs, ours))

    to_reach("0.6x reduce-overhead", "host", "reduce-overhead", 0.6)
    to_reach("the cudagraphs backend", "host", "cudagraphs", 1.0)
    to_reach("reduce-overhead", "wall", "reduce-overhead", 1.0)
    to_reach("1.1x reduce-overhead", "build", "reduce-overhead", 1.1)
    if name == "host":
        to_reach("0.5x the cudagraphs backend", "wall", "cudagraphs", 0.5)
    if name.startswith("train-"):
        times = 1 / 1.15 if name in ("train-resnet50", "train-bert") else 1.0
        to_reach(f"{times:.2f}x our own without compile", "wall", "graph", times)
    return found


def _figure(row: Any, which: str) -> float:
    return 1e6 * row.build_seconds if which == "build" else getattr(row, which).median_us


def summary(name: str, data: dict[str, Any]) -> str:
    """A workload in a few lines of text."""
    lines = [f"{name:30}{'wall us':>18}{'host us':>18}{'build s':>9}{'error':>9}"]
    for row in data["rows"]:
        if row["status"] == "ok" and row["wall"]:
            wall, host = (spread(row[which]) for which in ("wall", "host"))
            end = f"{row['build_seconds']:9.1f}{row['error']:9.0e}"
            lines.append(f"  {row['variant']:28}{wall:>18}{host:>18}{end}")
        else:
            lines.append(f"  {row['variant']:28}{row['status']}: {row['reason']}")
    return "\n".join([*lines, *target_lines(data)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, with commas")
    parser.add_argument("--dtype", default="fp32", choices=sorted(TYPES))
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing, each workload")
    parser.add_argument(
        "--workload-seconds", type=float, default=200.0, help="of building, each workload"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "backend", argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        found = one(options.one, options.dtype, options.seconds)
        options.out.write_text(json.dumps(found))
        return 0
    names = chosen(parser, options.workloads, list(WORKLOADS))

    def put(results: dict[str, Any], name: str, data: dict[str, Any]) -> None:
        rows = results.get(options.dtype, {}) | {name: data}
        results[options.dtype] = {known: rows[known] for known in WORKLOADS if known in rows}

    missing = [
        run_and_write(
            "benchmarks.backend",
            [name],
            ["--seconds", str(options.seconds), "--dtype", options.dtype],
            options.out,
            build_seconds=options.workload_seconds,
            measure_seconds=max(3 * options.seconds, 60.0),
            put=put,
            summary=summary,
        )
        for name in names
    ]
    return 1 if any(missing) else 0


if __name__ == "__main__":
    sys.exit(main())
