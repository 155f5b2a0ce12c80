"""What share of models each engine runs right: `results/coverage.json`.

    python -m benchmarks.coverage --seconds 540               # on a GPU with 16 cores
    python -m benchmarks.coverage --engines reduce-overhead,'onelaunch backend' --shard 1/3 \
        --out /tmp/compiled-1.json
    python -m benchmarks.coverage --merge /tmp/a.json /tmp/b.json --out /tmp/all.json
    python -m benchmarks.coverage --models 'transformers/ll*' --out /tmp/some.json

Every architecture of transformers that can be made small from a configuration, every family of timm
and the models of torchvision, in inference, and each fifth in training too: eager twice, then each
engine by the same calls. The exit code is 1 if onelaunch was wrong or crashed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage_models import catalogue
from benchmarks.coverage_models.engines import COMPILED, ENGINES, ON_CUDA
from benchmarks.coverage_models.pool import Case, run
from benchmarks.coverage_models.summary import BAD, counts, merged
from benchmarks.processes import parsed, write
from onelaunch.tools.bench.environment import environment, version

LIBRARIES = ("transformers", "timm", "torchvision")
MODES = ("inference", "training")
WRITE_SECONDS = 20.0


def chosen(models: str, modes: list[str], shard: str, engines: list[str]) -> list[Case]:
    """The cases of the models that a pattern names, or the part of them that a shard is."""
    names = catalogue.names()
    cases = [Case(name, "inference", engines) for name in names]
    cases += [Case(name, "training", engines) for name in names[:: catalogue.TRAINED_EVERY]]
    patterns = models.split(",")
    wanted = [
        c
        for c in cases
        if c.mode in modes and any(fnmatch.fnmatch(c.name, pattern) for pattern in patterns)
    ]
    first, _, every = shard.partition("/")
    return wanted[int(first) - 1 :: int(every)]


def measure(
    cases: list[Case], engines: list[str], device: str, workers: int, seconds: float, out: Path
) -> dict[str, Any]:
    """Run the cases, and say what became of each; `out` holds what is known by then as well."""
    start = written = time.monotonic()
    here = environment()
    lock = threading.Lock()
    finished: list[Case] = []

    def found() -> dict[str, Any]:
        known = {f"{c.name} {c.mode}": _recorded(c) for c in sorted(cases, key=_order)}
        return {
            "benchmark": "coverage",
            "environment": here,
            "libraries": {name: version(name) for name in LIBRARIES},
            "device": device,
            "seconds": {", ".join(engines): round(time.monotonic() - start)},
            "counts": counts(known),
            "cases": known,
        }

    def done(case: Case) -> None:
        nonlocal written
        with lock:
            finished.append(case)
            rows = ", ".join(f"{k} {_shown(v)}" for k, v in case.rows.items() if k != "eager")
            told = f"not built: {case.why[:90]}" if case.why else rows or "not run"
            at = f"{len(finished)}/{len(cases)} {time.monotonic() - start:.0f} s"
            print(f"coverage: {at} {case.name} {case.mode}: {told}", flush=True)

            if time.monotonic() - written > WRITE_SECONDS:
                written = time.monotonic()
                write(out, found())

    run(cases, device, workers, seconds, done)
    return found()


def _order(case: Case) -> tuple[str, str]:
    return case.mode, case.name


def _shown(row: dict[str, Any]) -> str:
    return f"{row['verdict']} {row['code']}" if "code" in row else row["verdict"]


def _recorded(case: Case) -> dict[str, Any]:
    rows = {name: case.rows.get(name, {"verdict": "not run"}) for name in case.engines}
    if case.why:
        return {"not built": case.why}
    if "eager" not in case.rows:
        return {"not run": True}
    return {"about": case.about, "eager": case.rows["eager"], "engines": rows}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    usual = [e for e in ENGINES if e != "eager" and e not in COMPILED]
    usual = [e for e in usual if gpu or e not in ON_CUDA]
    parser.add_argument("--device", default="cuda" if gpu else "tape", help="cpu, tape or cuda")
    parser.add_argument(
        "--engines", default=",".join(usual), help="names with commas, of: " + ", ".join(ENGINES)
    )
    parser.add_argument("--models", default="*", help="patterns, with commas: transformers/ll*")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--shard", default="1/1", help="the i-th of n parts: i/n")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="then it ends")
    parser.add_argument("--merge", type=Path, nargs="+", help="files of results to join, no run")
    options = parsed(parser, "coverage", argv)
    out: Path = options.out
    if options.merge:
        found = merged([json.loads(file.read_text()) for file in options.merge])
    else:
        engines = [name for name in options.engines.split(",") if name != "eager"]
        if unknown := [name for name in engines if name not in ENGINES]:
            parser.error(f"no engine is called {', '.join(unknown)}")
        if options.device != "cuda" and (there := [e for e in engines if e in ON_CUDA]):
            parser.error(f"{', '.join(there)} needs a GPU")
        for library in catalogue.missing():
            print(f"coverage: {library} is not installed, and is left out", flush=True)
        cases = chosen(options.models, options.modes.split(","), options.shard, engines)
        found = measure(cases, engines, options.device, options.workers, options.seconds, out)
        found["part"] = options.shard
    write(out, found)
    for mode, of_mode in found["counts"].items():
        print(f"coverage: {mode}: {json.dumps(of_mode)}", flush=True)
    return int(any(row[kind] for row in _ours(found) for kind in BAD if kind in row))


def _ours(found: dict[str, Any]) -> list[dict[str, int]]:
    modes = found["counts"].values()
    engines = [engine for mode in modes for engine in mode["engines"].items()]
    return [row for name, row in engines if name.startswith("onelaunch")]


if __name__ == "__main__":
    sys.exit(main())
