"""Whether the rows of the tables in README and docs still hold: `results/claims.json`.

    python -m benchmarks.claims                              # under five minutes on an H100
    python -m benchmarks.claims --tables training,backend    # the others stay as they are
    python -m benchmarks.claims --match "bert|rnn"           # the same

Each row of ours in a table is a claim: it runs as the table says, right against eager, without a
warning, in as many recordings, and each later call is that many launches and nothing else. Where
the table has it ahead of the others by 5%, it is ahead, in each figure that the table has. Each is
built once and timed a little, beside the one other that it is ahead of.

Rows that are whole sweeps are run in part: few requests and iterations, and of the models of
coverage and doctor a sample of at most three a row, drawn with a seed. The counts of tests on each
release of torch are no claims: `scripts/test` makes them.

The exit code is 1 if one does not hold; its line says why. Run it after each change to how calls
are watched, captured or replayed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import onelaunch as ol
from benchmarks import claims_built as built
from benchmarks import claims_swept as swept
from benchmarks.claims_listed import TABLES, Claim, claims
from benchmarks.processes import (
    ROOT,
    no_silent_eager,
    parsed,
    run_together,
    wait_for_turn,
    write,
)
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.reference import first_line

AT_ONCE = os.cpu_count() or 2
"""Processes that build at once. Half as many more may be built: all of them hold memory."""
MEASURE_SECONDS = 60.0
TOGETHER = ("training", "plans", "replay")
"""The groups of which a process builds several, if they take less than so many seconds."""
TOGETHER_SECONDS = 30.0
BUILDERS: dict[str, Callable[[str, Sequence[str]], built.Finish]] = {
    "calls": built.calls,
    "training": built.trained,
    "backend": built.compiled,
    "plans": built.planned,
    "shapes": swept.sized,
    "requests": swept.requested,
    "replay": swept.replayed,
    "learning": swept.learned,
    "generate": swept.decoded,
    "coverage": swept.covered,
    "doctor": swept.diagnosed,
}


# A process for each group, or for some that are soon built.


def one(groups: dict[str, list[str]]) -> dict[str, Any]:
    """Build, say so, wait to be told, measure."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the processes share the cores
    no_silent_eager()
    found: dict[str, Any] = {"environment": environment()}
    finish = {group: built_of(group, variants) for group, variants in groups.items()}
    wait_for_turn()
    rows = {group: named(groups[group], finish[group]) for group in groups}
    return found | {"groups": {group: [asdict(row) for row in rows[group]] for group in groups}}


def built_of(group: str, variants: Sequence[str]) -> built.Finish:
    """Build a group; what goes wrong with all of it is in each row."""
    kind, _, name = group.partition("#")[0].partition(":")
    finish: list[built.Finish] = []

    def build() -> list[built.Found]:
        finish.append(BUILDERS[kind](name, variants))
        return []

    wrong = named(variants, build)
    return finish[0] if finish else lambda: wrong


def named(variants: Sequence[str], run: built.Finish) -> list[built.Found]:
    """Run, a warning of ours an error; what it raises is in each row."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ol.GraphWarning)
            return run()
    except Exception as error:  # noqa: BLE001  an engine may raise anything
        rows = [built.Found(variant) for variant in variants]
        for row in rows:
            row.fail(f"{type(error).__name__}: {first_line(error)}")
        return rows


# Judging.


def verdict(claim: Claim, rows: dict[str, dict[str, Any]]) -> tuple[bool, str, float | None]:
    """Judge a claim by the rows that its process wrote.

    Returns:
        whether it holds, what was found in words, and the lead, if both were timed.
    """
    ours = rows.get(claim.ours)
    if ours is None:
        return False, "no result", None
    if ours["status"] != "ok":
        return False, f"{ours['status']}: {ours['reason']}", None
    for what in ("recordings", "launches", "eager"):
        there, found = getattr(claim, what), ours[what]
        if there is not None and found != there:
            return False, f"{found} {WORDS[what]}, {there} in the table", None
    if claim.theirs is None:
        return True, "runs", None
    theirs = rows.get(claim.theirs, {"status": "no result", "reason": "none"})
    times = [row["figures"].get(claim.figure) for row in (theirs, ours) if row["status"] == "ok"]
    if len(times) < 2 or None in times:
        reason = "no such timer" if len(times) == 2 else f"{theirs['status']}: {theirs['reason']}"
        return True, f"runs; not compared with {claim.theirs} ({reason})", None
    lead = times[0] / times[1]
    said = f"{lead:.2f}x {claim.theirs}, {claim.lead:.2f}x in the table"
    return lead >= 1.0, said, lead


WORDS = {"recordings": "recordings", "launches": "launches a call", "eager": "calls eagerly"}


def source() -> dict[str, str]:
    """Name the code that runs: the commit, if it is known, and a hash of the package's files."""
    folder = Path(ol.__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": os.environ.get("ONELAUNCH_COMMIT") or found, "source": digest[:16]}


def place(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what tells one claim from the others."""
    return row["table"], row["group"], row["ours"], row.get("figure", "wall")


def variants_of(group: Sequence[Claim]) -> list[str]:
    """List the rows of a group that are built: ours first."""
    names = [claim.ours for claim in group] + [claim.theirs for claim in group if claim.theirs]
    return list(dict.fromkeys(names))


def shared_out(groups: Mapping[str, Sequence[Claim]]) -> list[list[str]]:
    """Share the groups out over processes, those that take long first: a wave of processes lasts
    as long as its slowest. CUDA graphs of `torch.compile` share state, so that they are alone."""
    seconds = {name: max(claim.seconds for claim in group) for name, group in groups.items()}
    shared: list[list[str]] = []
    alone: list[list[str]] = []
    for name in sorted(groups, key=lambda name: -seconds[name]):
        graphs = [
            v for v in variants_of(groups[name]) if "reduce-overhead" in v or v == "cudagraphs"
        ]
        if name.partition(":")[0] not in TOGETHER or graphs:
            alone.append([name])
            continue
        room = (s for s in shared if sum(map(seconds.__getitem__, [*s, name])) <= TOGETHER_SECONDS)
        if (process := next(room, None)) is not None:
            process.append(name)
        else:
            shared.append([name])
    return sorted(alone + shared, key=lambda names: -sum(map(seconds.__getitem__, names)))


def run_all(wanted: Sequence[Claim], out: Path, build_seconds: float) -> int:
    """Measure and write; returns how many claims do not hold."""
    groups: dict[str, list[Claim]] = {}
    for claim in wanted:
        groups.setdefault(claim.group, []).append(claim)
    before = json.loads(out.read_text())["rows"] if out.exists() else []
    others = {place(asdict(claim)) for claim in claims(list(TABLES))}
    others -= {place(asdict(claim)) for claim in wanted}
    kept = [row for row in before if place(row) in others]
    results: dict[str, Any] = {"benchmark": "claims", "environment": {}, **source(), "rows": kept}
    broken = 0
    started = time.monotonic()

    def done(process: str, data: dict[str, Any] | None) -> None:
        nonlocal broken
        if data:
            results["environment"] = data["environment"]
        for claim in (c for group in processes[process] for c in groups[group]):
            found_there = data["groups"][claim.group] if data else []
            rows = {row["variant"]: row for row in found_there}
            holds, said, lead = verdict(claim, rows)
            broken += not holds
            found = {"holds": holds, "said": said, "found_lead": lead}
            results["rows"].append(asdict(claim) | found)
            print(f"{'holds ' if holds else 'BROKEN'} {claim.name}: {said}", flush=True)
        write(out, results)

    processes = {str(i): names for i, names in enumerate(shared_out(groups))}
    variants = {
        process: {name: variants_of(groups[name]) for name in names}
        for process, names in processes.items()
    }
    wave = AT_ONCE + AT_ONCE // 2
    for at in range(0, len(processes), wave):
        begun = time.monotonic()
        names = list(processes)[at : at + wave]
        run_together(
            "benchmarks.claims",
            names,
            ["--groups", json.dumps({name: variants[name] for name in names})],
            build_seconds=build_seconds,
            measure_seconds=MEASURE_SECONDS,
            done=done,
            at_once=AT_ONCE,
        )
        which = ", ".join("+".join(processes[name]) for name in names)
        print(f"in {time.monotonic() - begun:.0f} s: {which}", flush=True)
    held = sum(row["holds"] for row in results["rows"])
    print(f"{held} of {len(results['rows'])} hold; {time.monotonic() - started:.0f} s; {out}")
    return broken


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", default=",".join(TABLES), help="names, with commas")
    parser.add_argument("--build-seconds", type=float, default=120.0, help="for each process")
    parser.add_argument("--match", default="", help="only claims whose names match")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--groups", default="{}", help=argparse.SUPPRESS)
    options = parsed(parser, "claims", argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        found = one(json.loads(options.groups)[options.one])
        options.out.write_text(json.dumps(found))
        os._exit(0)  # the next waits for it, and the driver frees its memory at once
    tables = options.tables.split(",")
    if unknown := [name for name in tables if name not in TABLES]:
        parser.error(f"{', '.join(unknown)}: is none of {', '.join(TABLES)}")
    wanted = [claim for claim in claims(tables) if re.search(options.match, claim.name)]
    here = environment()
    print(f"{here['gpu'] or here['cpu']}, torch {here['torch']}: {len(wanted)} claims", flush=True)
    return 1 if run_all(wanted, options.out, options.build_seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
