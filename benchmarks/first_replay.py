"""The time to the first replay, in a fresh process and in a warm one: `results/first_replay.json`.

    python -m benchmarks.first_replay                        # about six minutes on an H100
    python -m benchmarks.first_replay --quick --models bert --out /tmp/some.json

In a fresh process an MLP (32, 1024) is called eagerly once. Then the clock runs from before the
import of the engine to the end of its first replay. The processes take turns: one of each engine,
then the next of each. A warm process has captured the same model before. Without a GPU the models
are small, and only onelaunch has a replay. float32 with TF32 off, medians and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_replay_models import MODELS, measured, ratio
from benchmarks.processes import ROOT, chosen, earlier, parsed, write
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.timers import Timing

KINDS = ("inference", "pair", "step")
ENGINES = {
    "onelaunch": "onelaunch",
    "by-hand": "torch.cuda.graph by hand",
    "make_graphed_callables": "make_graphed_callables",
}
FRESH = Path(__file__).with_name("first_replay_fresh.py")
MOST_SECONDS = {"cpu": 0.15, "cuda": 0.3}
"""Of the first replay of an MLP in a fresh process."""
MOST_OF_BY_HAND = 3.0


def fresh(engine: str, kind: str) -> dict[str, Any]:
    """Run one engine in a process of its own, with Python's caches as a user has them."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, str(FRESH), engine, kind]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine}, {kind}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def fresh_rows(repeats: int) -> list[dict[str, Any]]:
    """Measure the MLP in fresh processes; the first process of each engine only fills caches."""
    gpu = torch.cuda.is_available()
    pairs = [
        (engine, kind)
        for kind in KINDS
        for engine in ENGINES
        if (gpu or engine == "onelaunch") and (engine != "make_graphed_callables" or kind == "pair")
    ]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    for round_ in range(1 + repeats):
        for pair in pairs:
            run = fresh(*pair)
            if round_:
                found[pair].append(run)
    return [row_of(engine, kind, runs) for (engine, kind), runs in found.items()]


def row_of(engine: str, kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of an engine: what its processes took, and which compilers they imported."""
    return {
        "engine": engine,
        "kind": kind,
        "seconds": timing([run["seconds"] for run in runs]),
        "cpu seconds": timing([run["cpu_seconds"] for run in runs]),
        "import torch": timing([run["import_torch_seconds"] for run in runs]),
        "eager": timing([run["eager_seconds"] for run in runs]),
        "compilers": sorted({name for run in runs for name in run["compilers"]}),
    }


def timing(seconds: list[float]) -> dict[str, float]:
    """Median and distance between the quartiles, in seconds."""
    found = Timing.of([1e6 * s for s in seconds])
    return {
        "median": found.median_us / 1e6,
        "spread": found.spread_us / 1e6,
        "samples": found.samples,
    }


def warm_row(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """The row of a model in a warm process, with how it compares to a capture by hand."""
    if data["status"] != "ok":
        return {"model": name, **data}
    seconds = data["seconds"]
    return {
        "model": name,
        **data,
        "seconds": {what: timing(times) for what, times in seconds.items()},
        "of by hand": ratio(seconds, "onelaunch", "by-hand"),
        "buckets of by hand": ratio(seconds, "onelaunch bucket", "by-hand bucket"),
    }


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was."""
    device = "cuda" if results["environment"]["gpu"] else "cpu"
    made = [
        _target(f"{row['kind']}, fresh process, s", row["seconds"]["median"], MOST_SECONDS[device])
        for row in results["fresh"]
        if row["engine"] == "onelaunch"
    ]
    for row in results["warm"]:
        for key in ("of by hand", "buckets of by hand"):
            if row.get(key) is not None:
                made.append(_target(f"{row['model']}, {key}", row[key], MOST_OF_BY_HAND))
    return made


def _target(what: str, found: float, most: float) -> dict[str, Any]:
    return {"what": what, "found": found, "most": most, "met": found <= most}


def warm(name: str, repeats: int) -> dict[str, Any]:
    """Measure a model in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.first_replay", "--one", name]
    command += ["--repeats", str(repeats), "--out", os.devnull]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"status": "failed", "reason": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="of the warm part, with commas")
    parser.add_argument("--repeats", type=int, default=9, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--only", choices=("fresh", "warm"), help="the other part stays as it is")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "first_replay", argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    repeats = 1 if options.quick else options.repeats
    if options.one:
        print(json.dumps(measured(options.one, repeats)))
        return 0
    names = chosen(parser, options.models, list(MODELS))
    started = time.monotonic()
    now = {"benchmark": "first_replay", "environment": environment()}
    before = earlier(options.out, now) if options.only else {}
    results: dict[str, Any] = {**now, "fresh": before.get("fresh", []), "warm": []}
    for name in names if options.only != "fresh" else ():  # written as they come: a run may end
        results["warm"].append(warm_row(name, warm(name, repeats)))
        results["targets"] = targets(results)
        write(options.out, results)
    results["warm"] = results["warm"] or before.get("warm", [])
    if options.only != "warm":
        results["fresh"] = fresh_rows(repeats)
    results["targets"] = targets(results)
    write(options.out, results)
    for target in results["targets"]:
        verdict = "met" if target["met"] else "MISSED"
        print(f"{target['what']}: {target['found']:.3f}, at most {target['most']}: {verdict}")
    print(f"{time.monotonic() - started:.0f} s in all; {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
