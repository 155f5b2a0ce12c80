"""Programs as people write them, with the libraries that they use: `results/ecosystem.json`.

    python -m benchmarks.ecosystem                      # three minutes on a GPU with 16 cores
    python -m benchmarks.ecosystem --device cpu --files programs_steps --out /tmp/some.json

Each program of `tests/ecosystem` runs eagerly and graphed, and both must agree; a part of a file
has a process, so that a program that dies costs itself alone. The exit code is 1 if one is not as
it is said to be: wrong, dead, without replays, refused by another code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import torch

from benchmarks.processes import parsed
from onelaunch.tools.bench.environment import environment, version
from tests.ecosystem.processes import Chunk, Report, run_files
from tests.ecosystem.programs import FILES, missing

LIBRARIES = (
    *("transformers", "accelerate", "peft", "pytorch-lightning", "torch-geometric"),
    *("gpytorch", "e3nn", "timm", "torchvision"),
)
PARTS = 3
"""Of each file, so that the longest is not waited for."""


def measure(files: list[str], device: str, workers: int) -> dict[str, Any]:
    """Run the files, and say what became of each program."""
    start = time.monotonic()
    chunks = [Chunk(file, k, PARTS) for file in files for k in range(PARTS)]
    reports = run_files(chunks, device, workers)
    return {
        "benchmark": "ecosystem",
        "environment": environment(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "device": device,
        "seconds": round(time.monotonic() - start),
        "outcomes": {kind: outcomes(reports, kind) for kind in ("training", "inference")},
        "unexpected": sorted(name for name, r in reports.items() if r["unexpected"] is not None),
        "programs": dict(sorted(reports.items())),
    }


def outcomes(reports: dict[str, Report], kind: str) -> dict[str, int]:
    """How many of a kind came out how; `died` is of both, for what died cannot tell its kind."""
    found = Counter(r["verdict"] for r in reports.values() if r.get("kind", kind) == kind)
    return dict(sorted(found.items()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--files", default=",".join(FILES), help="names, with commas")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options = parsed(parser, "ecosystem", argv)
    files = options.files.split(",")
    if unknown := [name for name in files if name not in FILES]:
        parser.error(f"no file is called {', '.join(unknown)}: {', '.join(FILES)}")
    left_out = {file: missing(file) for file in files if missing(file)}
    for file, packages in left_out.items():
        print(f"ecosystem: {file} needs {', '.join(packages)}, and is left out", flush=True)
    found = measure(
        [file for file in files if file not in left_out], options.device, options.workers
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for name in found["unexpected"]:
        print(f"{name}: {found['programs'][name]['unexpected']}\n", flush=True)
    print(f"ecosystem: {found['outcomes']}, {found['seconds']} s", flush=True)
    return int(bool(found["unexpected"] or left_out))


if __name__ == "__main__":
    sys.exit(main())
