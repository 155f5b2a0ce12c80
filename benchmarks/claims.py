"""Whether the rows of the tables in README and docs still hold: `results/claims.json`.

    python -m benchmarks.claims                              # under five minutes on an H100
    python -m benchmarks.claims --tables training,backend    # the others stay as they are
    python -m benchmarks.claims --match "bert|rnn"           # the same

Each row of ours in a table is a claim: it runs as the table says, in as many recordings, right
against eager, without a warning; and where the table has it ahead of the others, it is ahead. Each
is built once and timed a little, beside the one other that it is ahead of. The exit code is 1 if
one does not hold; its line says why. Run it after each change to how calls are watched, captured
or replayed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import onelaunch as ol
from benchmarks import backend, call_overhead, optimize, training
from benchmarks.call_overhead import Contestant, Row, judge, measure, result_of
from benchmarks.processes import (
    RESULTS,
    ROOT,
    no_silent_eager,
    parsed,
    ready_by,
    run_together,
    wait_for_turn,
    write,
)
from benchmarks.render import INCUMBENTS
from examples.placement import device
from examples.workloads import WORKLOADS
from onelaunch.tools.bench import ENGINES
from onelaunch.tools.bench.engines.engine import grad_mode
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.precision import relative_error
from onelaunch.tools.bench.reference import outputs
from onelaunch.tools.bench.workload import Workload

AHEAD = 1.05
"""A lead that counts as one: timings of one run differ by less."""
AT_ONCE = 14
"""Processes that build at once, on 16 cores."""
SAMPLES, SECONDS = 60, 1.5
OURS_OF_BACKEND = ("backend", "backend-eager", "graph", "graph-compile")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A row of ours in a table.

    Attributes:
        table: the file of results that the table is made from.
        group: the process that measures it.
        theirs: the fastest of the others, if the row is ahead of it; else None.
        lead: how many times as long theirs takes there.
        recordings: their number, as far as the row says it.
    """

    table: str
    group: str
    ours: str
    theirs: str | None
    lead: float | None
    recordings: int | None

    @property
    def name(self) -> str:
        return f"{self.table}: {self.group.partition(':')[2]}, {self.ours}"


# The claims, by what is in the files.


def claims(tables: Sequence[str]) -> list[Claim]:
    """List the rows of ours that are right in the files of results."""
    return [claim for table in tables for claim in _claims_of(table)]


def _claims_of(table: str) -> Iterator[Claim]:
    results = json.loads((RESULTS / f"{table}.json").read_text())
    for group, rows in TABLES[table](results):
        timed = {_name(row): row["wall"]["median_us"] for row in rows if row.get("wall")}
        others = {name: us for name, us in timed.items() if name in INCUMBENTS}
        best = min(others, key=others.__getitem__, default=None)
        for row in rows:
            name = _name(row)
            if row["status"] != "ok" or not _is_ours(name):
                continue
            lead = others[best] / timed[name] if best and name in timed else 0.0
            ahead = lead >= AHEAD
            yield Claim(
                table,
                group,
                name,
                best if ahead else None,
                lead if ahead else None,
                _recordings(row["notes"]),
            )


def _name(row: dict[str, Any]) -> str:
    return row["variant"] if "variant" in row else row["engine"]


def _is_ours(name: str) -> bool:
    return name.startswith("onelaunch") or name in OURS_OF_BACKEND


def _recordings(notes: Iterable[str]) -> int | None:
    """Read from a row's notes how many recordings it took."""
    for note in notes:
        if found := re.match(r"(\d+) recordings?$", note):
            return int(found[1])
        if note.startswith("recordings of "):
            return note.count(",") + 1
    return None


def _by_workload(results: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
    for name, data in results["workloads"].items():
        yield f"calls:{name}", data["rows"]


def _of_training(results: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
    for part in training.PARTS:
        for name, data in results[part].items():
            yield f"training:{part}:{name}", data["rows"]


def _of_backend(results: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
    for dtype in backend.TYPES:
        for name, data in results.get(dtype, {}).items():
            yield f"backend:{dtype}:{name}", data["rows"]


def _of_optimize(results: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
    """Plans are ours; the row of each incumbent bears the name of its engine."""
    for name, data in results["workloads"].items():
        rows: Rows = []
        for row, found in data["rows"].items():
            if found.get("timing") and ("plan" in found or row == "incumbent"):
                variant = f"onelaunch {row}" if "plan" in found else found["engine"]
                timing = found["timing"]
                rows.append({"variant": variant, "status": "ok", "notes": [], "wall": timing})
        yield f"plans:{name}", rows


TABLES: dict[str, Callable[[dict[str, Any]], Iterator[tuple[str, Rows]]]] = {
    "engines": _by_workload,
    "call_overhead": _by_workload,
    "training": _of_training,
    "backend": _of_backend,
    "optimize": _of_optimize,
}
"""The tables with a row for each way to run a workload. The others are measured whole by the
benchmarks that write them, which fail by themselves."""


# One process for each workload of a table.


def build(group: str, variants: Sequence[str]) -> list[Contestant]:
    """Build the variants of a group, and check each against eager."""
    kind, _, name = group.partition(":")
    return BUILDERS[kind](name, variants)


def _build_calls(name: str, variants: Sequence[str]) -> list[Contestant]:
    torch.manual_seed(0)
    fn, args = WORKLOADS[name]()
    workload = Workload(fn, args)
    made: list[Contestant] = []
    for variant in variants:
        mode = ENGINES[variant].mode
        with grad_mode(mode):
            contestant = call_overhead.build(variant, workload, ready_by())
        call = contestant.call

        def run(call: Callable[[], object] = call, mode: Any = mode) -> object:
            with grad_mode(mode):
                return call()

        contestant.call = run
        made.append(contestant)
    return made


def _build_training(name: str, variants: Sequence[str]) -> list[Contestant]:
    part, _, workload = name.partition(":")
    return training.build_all(part, workload, ready_by(), variants)


def _build_backend(name: str, variants: Sequence[str]) -> list[Contestant]:
    dtype, _, workload = name.partition(":")
    return backend.build_all(workload, dtype, ready_by(), variants)


def _build_plans(name: str, variants: Sequence[str]) -> list[Contestant]:
    rows = json.loads((RESULTS / "optimize.json").read_text())["workloads"][name]["rows"]
    fn, args = optimize.given(name)
    with torch.no_grad():
        expected = [t.clone() for t in outputs(copy.deepcopy(fn)(*args))]
    made: list[Contestant] = []
    for variant in variants:
        row = variant.removeprefix("onelaunch ") if _is_ours(variant) else "incumbent"
        contestant = Contestant(Row(variant, variant))
        contest: dict[str, optimize.Contestant] = {}
        with call_overhead.building(contestant.row, ready_by()):
            optimize.built(rows[row], fn, args, name, contest, row)
            mode, cycle = contest[row]
            if _is_ours(variant):
                plan = ol.Plan.from_json(json.dumps(rows[row]["plan"])).apply(fn, args)
                with torch.no_grad():
                    error = relative_error(outputs(plan(*args)), expected)
                # Half as much again as it was: other kernels may be chosen.
                judge(contestant.row, error, max(1.5 * rows[row]["error"], 1e-6))

            def run(mode: Any = mode, cycle: Callable[[], object] = cycle) -> object:
                with mode():
                    return cycle()

            contestant.call = run
        made.append(contestant)
    return made


BUILDERS: dict[str, Callable[[str, Sequence[str]], list[Contestant]]] = {
    "calls": _build_calls,
    "training": _build_training,
    "backend": _build_backend,
    "plans": _build_plans,
}


def one(group: str, variants: Sequence[str]) -> dict[str, Any]:
    """Build, say so, wait to be told, measure."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the processes share the cores
    no_silent_eager()
    # What runs eagerly says so once. The backend's rows have its warnings among their notes.
    strict = nullcontext() if group.startswith("backend:") else warnings.catch_warnings()
    with strict:
        if not group.startswith("backend:"):
            warnings.simplefilter("error", ol.GraphWarning)
        contestants = build(group, variants)
        wait_for_turn()
        measure(contestants, device(), samples=SAMPLES, seconds=SECONDS)
    return result_of([c.row for c in contestants], ())


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
    recordings = _recordings(ours["notes"])
    if claim.recordings is not None and recordings != claim.recordings:
        return False, f"{recordings} recordings, {claim.recordings} in the table", None
    if claim.theirs is None:
        return True, "runs", None
    theirs = rows.get(claim.theirs)
    if theirs is None or theirs["status"] != "ok":
        reason = "no result" if theirs is None else f"{theirs['status']}: {theirs['reason']}"
        return True, f"runs; not compared with {claim.theirs} ({reason})", None
    lead = theirs["wall"]["median_us"] / ours["wall"]["median_us"]
    said = f"{lead:.2f}x {claim.theirs}, {claim.lead:.2f}x in the table"
    return lead >= 1.0, said, lead


def source() -> dict[str, str]:
    """Name the code that runs: the commit, if it is known, and a hash of the package's files."""
    folder = Path(ol.__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": os.environ.get("ONELAUNCH_COMMIT") or found, "source": digest[:16]}


def run_all(wanted: Sequence[Claim], out: Path, build_seconds: float) -> int:
    """Measure and write; returns how many claims do not hold."""
    groups: dict[str, dict[str, None]] = {}
    for claim in wanted:
        needed = groups.setdefault(claim.group, {})
        needed.update(dict.fromkeys([claim.ours] + ([claim.theirs] if claim.theirs else [])))
    before = json.loads(out.read_text())["rows"] if out.exists() else []
    again = {(claim.table, claim.group, claim.ours) for claim in wanted}
    kept = [row for row in before if (row["table"], row["group"], row["ours"]) not in again]
    results: dict[str, Any] = {"benchmark": "claims", "environment": {}, **source(), "rows": kept}
    broken = 0
    started = time.monotonic()

    def done(group: str, data: dict[str, Any] | None) -> None:
        nonlocal broken
        rows = {row["variant"]: row for row in data["rows"]} if data else {}
        if data:
            results["environment"] = data["environment"]
        for claim in (c for c in wanted if c.group == group):
            holds, said, lead = verdict(claim, rows)
            broken += not holds
            found = {"holds": holds, "said": said, "found_lead": lead}
            results["rows"].append(asdict(claim) | found)
            print(f"{'holds ' if holds else 'BROKEN'} {claim.name}: {said}", flush=True)
        write(out, results)

    names = list(groups)
    for at in range(0, len(names), AT_ONCE):
        wave = names[at : at + AT_ONCE]
        variants = json.dumps({name: list(groups[name]) for name in wave})
        run_together(
            "benchmarks.claims",
            wave,
            ["--variants", variants],
            build_seconds=build_seconds,
            measure_seconds=20 * SECONDS,
            done=done,
        )
    held = sum(row["holds"] for row in results["rows"])
    print(f"{held} of {len(results['rows'])} hold; {time.monotonic() - started:.0f} s; {out}")
    return broken


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", default=",".join(TABLES), help="names, with commas")
    parser.add_argument("--build-seconds", type=float, default=100.0, help="for each wave")
    parser.add_argument("--match", default="", help="only claims whose names match")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--variants", default="{}", help=argparse.SUPPRESS)
    options = parsed(parser, "claims", argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        found = one(options.one, json.loads(options.variants)[options.one])
        options.out.write_text(json.dumps(found))
        return 0
    tables = options.tables.split(",")
    if unknown := [name for name in tables if name not in TABLES]:
        parser.error(f"{', '.join(unknown)}: is none of {', '.join(TABLES)}")
    wanted = [claim for claim in claims(tables) if re.search(options.match, claim.name)]
    here = environment()
    print(f"{here['gpu'] or here['cpu']}, torch {here['torch']}: {len(wanted)} claims", flush=True)
    return 1 if run_all(wanted, options.out, options.build_seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
