"""The backend of `torch.compile`, beside Inductor's own CUDA graphs: `results/backend.json`.

    python -m benchmarks.backend                               # all, about five minutes
    python -m benchmarks.backend --workloads sine,breaks,host  # these anew, the others as they are
    python -m benchmarks.backend --dtype bf16

TF32 off. Each workload has a process of its own. All of them build at once, each engine without
anybody's cache; once the last is ready they measure one after the other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import onelaunch as ol
from benchmarks.backend_workloads import WORKLOADS, Compile, Work, made
from benchmarks.call_overhead import Contestant, Row, Target, measure, spread
from benchmarks.processes import earlier, ends_by, parsed, ready_by, run_together
from examples.placement import device
from onelaunch.bench.environment import environment
from onelaunch.bench.reference import first_line, outputs, relative_error
from onelaunch.dynamo import onelaunch

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
    "graph": Engine("ol.graph", ol.graph),
    "graph-compile": Engine("ol.graph(compile=True)", lambda fn: ol.graph(fn, compile=True)),
    "backend-eager": Engine(
        'torch.compile(backend="onelaunch"), codegen="eager"',
        lambda fn: torch.compile(fn, backend=onelaunch, options={"codegen": "eager"}),
    ),
}
OURS = ("backend", "backend-eager", "graph", "graph-compile")


def build(name: str, work: Work, expected: Sequence[Any], deadline: float, most: float) -> Any:
    """Build an engine and check it against eager's results; what goes wrong is in its row."""
    engine = ENGINES[name]
    row = Built(name, engine.title)
    contestant = Contestant(row, kept=work)
    try:
        with ends_by(deadline), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ol.GraphWarning)
            started = time.monotonic()
            contestant.call = step = work.step(engine.compile, engine.begin)
            for _ in range(WARM_STEPS):
                found = [t.clone() for t in outputs(step())]
            if device().type == "cuda":
                torch.cuda.synchronize()
            row.build_seconds = time.monotonic() - started
        row.notes = [str(w.message) for w in caught if w.category is ol.GraphWarning]
        row.error = relative_error(found, expected)
        if not row.error <= most:  # a NaN too
            row.status, row.reason = "wrong", f"relative error {row.error:.1e} to eager"
    except KeyboardInterrupt:
        row.status, row.reason = "failed", "not built in time"
    except Exception as error:  # noqa: BLE001  an engine may raise anything, and that is its row
        row.status, row.reason = "failed", f"{type(error).__name__}: {first_line(error)}"
    return contestant


def one(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Build, say so, wait to be told, measure."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the processes share the cores
    # No engine is to find what another compiled, and none is to run eagerly in silence.
    importlib.import_module("torch._inductor.config").force_disable_caches = True
    dynamo: Any = importlib.import_module("torch._dynamo").config
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 64, True
    eager = made(name, TYPES[dtype])
    reference = eager.step(lambda fn: fn, None)
    for _ in range(WARM_STEPS):
        expected = [t.clone() for t in outputs(reference())]
    most = TOLERANCE[dtype, eager.train]
    last = ready_by()
    contestants = [
        build(
            engine,
            made(name, TYPES[dtype]),
            expected,
            min(last, time.time() + ENGINE_SECONDS),
            most,
        )
        for engine in ENGINES
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    measure(contestants, device(), samples=300, seconds=seconds)
    rows = [c.row for c in contestants]
    found = [asdict(t) | {"met": t.met} for t in targets(name, rows)]
    return {"environment": environment(), "rows": [asdict(r) for r in rows], "targets": found}


def targets(name: str, rows: Iterable[Any]) -> list[Target]:
    """What the figures are to reach, of those that both sides of it were measured for."""
    known = {row.variant: row for row in rows if row.wall and row.host}
    found: list[Target] = []

    def judge(rule: str, figure: str, other: str, times: float) -> None:
        if "backend" in known and other in known:
            ours, theirs = _figure(known["backend"], figure), _figure(known[other], figure)
            found.append(Target("backend", figure, rule, times * theirs, ours))

    judge("0.6x reduce-overhead", "host", "reduce-overhead", 0.6)
    judge("the cudagraphs backend", "host", "cudagraphs", 1.0)
    judge("reduce-overhead", "wall", "reduce-overhead", 1.0)
    judge("1.1x reduce-overhead", "build", "reduce-overhead", 1.1)
    if name == "host":
        judge("0.5x the cudagraphs backend", "wall", "cudagraphs", 0.5)
    if name.startswith("train-"):
        times = 1 / 1.15 if name in ("train-resnet50", "train-bert") else 1.0
        judge(f"{times:.2f}x our own without compile", "wall", "graph", times)
    return found


def _figure(row: Any, which: str) -> float:
    return 1e6 * row.build_seconds if which == "build" else getattr(row, which).median_us


def run_all(names: list[str], out: Path, options: argparse.Namespace) -> int:
    """Run and write; returns how many of the workloads gave no result."""
    here: dict[str, Any] = {"benchmark": "backend", "environment": environment()}
    results = earlier(out, here) or here
    started = time.monotonic()
    found = 0

    def done(name: str, data: dict[str, Any] | None) -> None:
        nonlocal found
        if data is None:
            print(f"{name}: no result", flush=True)
            return
        found += 1
        results["environment"] = data.pop("environment")
        rows = results.get(options.dtype, {}) | {name: data}
        results[options.dtype] = {known: rows[known] for known in WORKLOADS if known in rows}
        print(summary(name, data), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")

    run_together(
        "benchmarks.backend",
        names,
        ["--seconds", str(options.seconds), "--dtype", options.dtype],
        build_seconds=options.build_seconds,
        measure_seconds=max(3 * options.seconds, 60.0),
        done=done,
    )
    print(f"{time.monotonic() - started:.0f} s in all; {out}")
    return len(names) - found


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
    for target in data["targets"]:
        lines.append(f"  {Target(**{k: v for k, v in target.items() if k != 'met'})}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, with commas")
    parser.add_argument("--dtype", default="fp32", choices=sorted(TYPES))
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing, each workload")
    parser.add_argument("--build-seconds", type=float, default=220.0, help="for all engines")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "backend", argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        found = one(options.one, options.dtype, options.seconds)
        options.out.write_text(json.dumps(found))
        return 0
    names = options.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"no workload is called {', '.join(unknown)}: {', '.join(WORKLOADS)}")
    here = environment()
    print(f"{here['gpu'] or here['cpu']}, torch {here['torch']}", flush=True)
    return 1 if run_all(names, options.out, options) else 0


if __name__ == "__main__":
    sys.exit(main())
