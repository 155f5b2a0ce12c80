"""Training, every way: forward and backward, and whole steps: `results/training.json`.

    python -m benchmarks.training                    # about seven minutes on an H200
    python -m benchmarks.training --runs step:mlp,pair:mlp    # these anew, the others as they are

float32 with TF32 off. Each part of each workload has a process of its own. All of them build at
once, for compilers take a while; once the last is ready they measure one after the other. A long
run with changing batch sizes goes on while the others build.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.call_overhead import Contestant, Row, Target, measure, spread
from benchmarks.long_training import CHECKS, run_long
from benchmarks.processes import earlier, ends_by, parsed, ready_by, run_together
from benchmarks.render import NAMES
from benchmarks.training_check import Reference
from benchmarks.training_engines import PARTS, Batch, Engine, network
from examples.placement import device
from onelaunch.bench.environment import environment
from onelaunch.bench.reference import first_line

ORDER = ("mlp", "cnn", "resnet50", "bert")
SMALL = ORDER[:2]
RUNS = (*(f"{part}:{name}" for part in PARTS for name in ORDER), "long")
ENGINE_SECONDS = 240.0  # to build one engine


# Building.


def build(
    engine: Engine,
    model: nn.Module,
    batches: Sequence[Batch],
    reference: Reference,
    deadline: float,
) -> Contestant:
    """Build an engine on a copy of the network and check it; what goes wrong is in its row."""
    contestant = Contestant(Row(engine.name, engine.title))
    row = contestant.row
    if (why := engine.missing()) is not None:
        row.status, row.reason = "missing", why
        return contestant
    try:
        with ends_by(deadline):
            training = engine.build(copy.deepcopy(model), batches)
            row.error, row.reason = reference.judge(training)
            row.notes = training.notes()
        row.status = "wrong" if row.reason else "ok"
        contestant.kept = training
        contestant.call = training.bare or partial(training.call, *batches[0])
    except KeyboardInterrupt:
        row.status, row.reason = "failed", "not built in time"
    except Exception as error:  # noqa: BLE001  an engine may raise anything, and that is its row
        row.status, row.reason = "failed", f"{type(error).__name__}: {first_line(error)}"
    return contestant


def build_all(part: str, workload: str, deadline: float) -> list[Contestant]:
    model, batches = network(workload)
    reference = Reference(part, model, batches)
    return [
        build(engine, model, batches, reference, min(deadline, time.time() + ENGINE_SECONDS))
        for engine in PARTS[part]
    ]


# Judging.


def targets(part: str, workload: str, rows: Iterable[Row]) -> list[Target]:
    """What the figures are to reach, of those that both sides of it were measured for."""
    kinds = {engine.name: engine.kind for engine in PARTS[part]}
    walls = {row.variant: row.wall.median_us for row in rows if row.wall}
    incumbents = {name: us for name, us in walls.items() if kinds[name] == "incumbent"}
    found: list[Target] = []

    def judge(ours: str, rule: str, limit: float | None, times: float) -> None:
        if ours in walls and limit is not None:
            found.append(Target(ours, "wall", rule, times * limit, walls[ours]))

    best = min(incumbents.values(), default=None)
    if part == "step":
        judge("onelaunch", "1.05x a bare replay", walls.get("bare"), 1.05)
        once = 1.0 if workload in SMALL else 1.01
        judge("onelaunch-compile", f"{once:.2f}x the best incumbent", best, once)
    elif workload in SMALL:
        theirs = walls.get("make_graphed_callables")
        for ours in ("onelaunch", "onelaunch-direct"):
            judge(ours, "0.7x make_graphed_callables", theirs, 0.7)
            judge(ours, "0.7x the best incumbent", best, 0.7)
    else:
        same = [
            us for name, us in incumbents.items() if name in ("eager", "make_graphed_callables")
        ]
        judge("onelaunch", "1.01x the best of eager's kernels", min(same, default=None), 1.01)
        ours = [name for name in walls if kinds[name] == "ours"]
        fastest = min(ours, key=walls.__getitem__, default="onelaunch")
        judge(fastest, "1.01x the best incumbent", best, 1.01)
    return found


# One process for each part of each workload.


def one(run: str, seconds: float, steps: int) -> dict[str, Any]:
    """Build, say so, wait to be told, measure."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the processes share the cores
    if run == "long":
        checks = [run_long(check, steps) for check in CHECKS]  # while the others build
        print("ready", flush=True)
        sys.stdin.readline()
        return {"environment": environment(), "checks": checks}
    # All engines compile the same code; one that dynamo gave up would run eagerly, and not say so.
    dynamo: Any = importlib.import_module("torch._dynamo").config
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 64, True
    part, _, workload = run.partition(":")
    contestants = build_all(part, workload, ready_by())
    print("ready", flush=True)
    sys.stdin.readline()
    measure(contestants, device(), samples=500, seconds=seconds)
    rows = [c.row for c in contestants]
    return {
        "environment": environment(),
        "rows": [asdict(row) for row in rows],
        "targets": [asdict(t) | {"met": t.met} for t in targets(part, workload, rows)],
    }


def run_all(runs: list[str], out: Path, options: argparse.Namespace) -> int:
    """Run and write; returns how many of the runs gave no result."""
    here: dict[str, Any] = {"benchmark": "training", "environment": environment()}
    results = earlier(out, here) or here
    started = time.monotonic()
    found = 0

    def done(run: str, data: dict[str, Any] | None) -> None:
        nonlocal found
        if data is None:
            print(f"{run}: no result", flush=True)
            return
        found += 1
        results["environment"] = data.pop("environment")
        part, _, workload = run.partition(":")
        if workload:
            rows = results.get(part, {}) | {workload: data}
            results[part] = {known: rows[known] for known in ORDER if known in rows}
        else:
            results[part] = data
        print(summary(run, data), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")

    run_together(
        "benchmarks.training",
        runs,
        ["--seconds", str(options.seconds), "--steps", str(options.steps)],
        build_seconds=options.build_seconds,
        measure_seconds=max(2 * options.seconds, 90.0),
        done=done,
    )
    print(f"{time.monotonic() - started:.0f} s in all; {out}")
    return len(runs) - found


def summary(run: str, data: dict[str, Any]) -> str:
    """A run in a few lines of text."""
    part, _, workload = run.partition(":")
    if not workload:
        return "\n".join([f"{part}:", *(f"  {check}" for check in data["checks"])])
    lines = [f"{NAMES[workload]}, {part}", f"  {'':46}{'wall us':>18}{'host us':>18}{'error':>9}"]
    for row in data["rows"]:
        if row["status"] == "ok":
            wall, host = (spread(row[which]) for which in ("wall", "host"))
            lines.append(f"  {row['title']:46}{wall:>18}{host:>18}{row['error']:9.0e}")
        else:
            lines.append(f"  {row['title']:46}{row['status']}: {row['reason']}")
    for target in data["targets"]:
        lines.append(f"  {Target(**{k: v for k, v in target.items() if k != 'met'})}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default=",".join(RUNS), help="part:workload, with commas")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing, each run")
    parser.add_argument(
        "--build-seconds", type=float, default=240.0, help="for all engines of all runs"
    )
    parser.add_argument("--steps", type=int, default=10_000, help="of the long run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "training", argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        found = one(options.one, options.seconds, options.steps)
        options.out.write_text(json.dumps(found))
        return 0
    runs = options.runs.split(",")
    if unknown := [run for run in runs if run not in RUNS]:
        parser.error(f"no run is called {', '.join(unknown)}: {', '.join(RUNS)}")
    here = environment()
    print(f"{here['gpu'] or here['cpu']}, torch {here['torch']}", flush=True)
    return 1 if run_all(runs, options.out, options) else 0


if __name__ == "__main__":
    sys.exit(main())
