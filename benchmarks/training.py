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
import json
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.call_overhead import (
    Contestant,
    Row,
    Target,
    building,
    measure,
    result_of,
    spread,
    target_lines,
)
from benchmarks.long_training import CHECKS, run_long
from benchmarks.processes import (
    chosen,
    no_silent_eager,
    parsed,
    ready_by,
    run_and_write,
    wait_for_turn,
)
from benchmarks.render import NAMES
from benchmarks.training_check import Reference
from benchmarks.training_engines import PARTS, Batch, Engine, network
from examples.placement import device
from onelaunch.tools.bench.environment import environment

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
    with building(row, deadline):
        training = engine.build(copy.deepcopy(model), batches)
        row.error, row.reason = reference.judge(training)
        row.notes = training.notes()
        row.status = "wrong" if row.reason else "ok"
        contestant.kept = training
        contestant.call = training.bare or partial(training.call, *batches[0])
    return contestant


def build_all(part: str, workload: str, deadline: float) -> list[Contestant]:
    """Build the engines of a part, each by the deadline."""
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
        wait_for_turn()
        return {"environment": environment(), "checks": checks}
    no_silent_eager()
    part, _, workload = run.partition(":")
    contestants = build_all(part, workload, ready_by())
    wait_for_turn()
    measure(contestants, device(), samples=500, seconds=seconds)
    rows = [c.row for c in contestants]
    return result_of(rows, targets(part, workload, rows))


def put(results: dict[str, Any], run: str, data: dict[str, Any]) -> None:
    part, _, workload = run.partition(":")
    if not workload:
        results[part] = data
        return
    rows = results.get(part, {}) | {workload: data}
    results[part] = {known: rows[known] for known in ORDER if known in rows}


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
    return "\n".join([*lines, *target_lines(data)])


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
    missing = run_and_write(
        "benchmarks.training",
        chosen(parser, options.runs, RUNS),
        ["--seconds", str(options.seconds), "--steps", str(options.steps)],
        options.out,
        build_seconds=options.build_seconds,
        measure_seconds=max(2 * options.seconds, 90.0),
        put=put,
        summary=summary,
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
