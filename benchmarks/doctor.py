"""Whether the doctor, without a GPU, names what a GPU refuses: `results/doctor.json`.

    python -m benchmarks.doctor --seconds 1200 --out /tmp/doctor.json
    python -m benchmarks.doctor --models 'transformers/*vl*' --out /tmp/some.json
    python -m benchmarks.doctor --resume /tmp/doctor.json

Each model of `results/coverage.json`, which was run on a GPU, is diagnosed on this machine's CPU.
A model that was refused there is to be named here, with the refusal's code at its line; one that
was one launch is to be clean. The exit code is 1 if a model is named wrongly, or not.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.coverage import LIBRARIES
from benchmarks.coverage_models import catalogue
from benchmarks.coverage_models.diagnosed import DOCTOR
from benchmarks.coverage_models.pool import TIME_IS_UP, Case, run
from benchmarks.processes import RESULTS, write
from onelaunch.tools.bench.environment import environment, version

GOOD = ("clean", "named")


def expected(models: str) -> dict[str, dict[str, Any]]:
    """What became of each model on the GPU, of those that can be built here."""
    found: dict[str, Any] = json.loads((RESULTS / "coverage.json").read_text())["cases"]
    known = set(catalogue.names())
    return {
        case: row["engines"]["onelaunch"]
        for case, row in found.items()
        if "onelaunch" in row.get("engines", ())
        and case.partition(" ")[0] in known
        and any(fnmatch.fnmatch(case.partition(" ")[0], pattern) for pattern in models.split(","))
        and row["engines"]["onelaunch"]["verdict"] in ("one launch", "refused")
    }


def compared(row: dict[str, Any], on_gpu: dict[str, Any]) -> str:
    """What a diagnosis is worth, by what the GPU did."""
    if "found" not in row:
        return "not run" if row.get("text") == TIME_IS_UP else row.get("verdict", "not run")
    places = {(code, _place(line)) for code, line in row["found"]}
    if on_gpu["verdict"] == "one launch":
        return "clean" if not places else "false alarm"
    if (on_gpu["code"], _place(on_gpu.get("line", ""))) in places:
        return "named"
    if on_gpu.get("line", "").startswith("benchmarks/") and on_gpu["code"] in dict(row["found"]):
        return "named"  # no line of the model is to blame, but the call as a whole
    if _place(on_gpu.get("line", "")) in {place for _, place in places}:
        return "named by another code"
    return "another line" if places else "not named"


def finished(path: Path, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What an earlier run had diagnosed, compared with what the GPU does now."""
    rows: dict[str, Any] = json.loads(path.read_text())["cases"]
    return {
        name: row
        | {"verdict": compared(row["here"], wanted[name]), "on the GPU": of_gpu(wanted[name])}
        for name, row in rows.items()
        if name in wanted and "found" in row["here"]
    }


def of_gpu(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says of the GPU."""
    return {k: v for k, v in row.items() if k in ("verdict", "code", "line")}


def _place(line: str) -> tuple[str, str]:
    """The file of a line, and its text: releases of a library number them differently."""
    file, _, rest = line.partition(":")
    return file, rest.partition(": ")[2].strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="*", help="patterns, with commas: transformers/ll*")
    parser.add_argument("--device", default="tape", help="tape or cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="then it ends")
    parser.add_argument("--resume", type=Path, help="keep what this run had finished")
    parser.add_argument("--out", type=Path, default=RESULTS / "doctor.json")
    options = parser.parse_args(argv)
    wanted = expected(options.models)
    kept = finished(options.resume, wanted) if options.resume else {}
    cases = [Case(*name.split(" "), [DOCTOR]) for name in wanted if name not in kept]
    verdicts: dict[str, str] = {}

    def done(case: Case) -> None:
        name = f"{case.name} {case.mode}"
        verdicts[name] = compared(case.rows.get(DOCTOR, {}), wanted[name])
        print(f"{len(verdicts)}/{len(cases)}  {name}: {verdicts[name]} {case.why}", flush=True)

    run(cases, options.device, options.workers, options.seconds, done)
    rows = kept | {
        f"{c.name} {c.mode}": {
            "verdict": verdicts.get(f"{c.name} {c.mode}", "not run"),
            "on the GPU": of_gpu(wanted[f"{c.name} {c.mode}"]),
            "here": c.rows.get(DOCTOR, {"why": c.why}),
        }
        for c in cases
    }
    counts = dict(Counter(row["verdict"] for row in rows.values()))
    write(
        options.out,
        {
            "benchmark": "doctor",
            "environment": environment(),
            "libraries": {name: version(name) for name in LIBRARIES},
            "counts": counts,
            "cases": rows,
        },
    )
    print(f"doctor: {json.dumps(counts)}; {options.out}")
    return int(any(kind not in (*GOOD, "not run") for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
