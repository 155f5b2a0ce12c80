"""The claims that the tables of README and docs make, read from the files of their results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import backend, claims_table, training
from benchmarks.first_replay_models import BUCKETS
from benchmarks.optimize_workloads import CYCLES, LENGTHS
from benchmarks.processes import RESULTS
from benchmarks.render import INCUMBENTS
from examples import train_rl

AHEAD = 1.05
"""A lead that counts as one: timings of one run differ by less."""
PLAIN = ("eager", "no_grad", "eager-fused", "by-hand", "make_graphed_callables", "cudagraphs")
"""Others that are soon built, for they generate no code."""
SOON, LONG = 30.0, 50.0
"""Seconds to build. Another that takes longer than the first is not built again; a group that takes
longer than the second has a process for each row."""
Results = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A figure of a row of ours in a table.

    Attributes:
        table: the file of results that the table is made from.
        group: the process that measures it.
        figure: what is timed; empty where the row is not compared.
        theirs: the fastest of the others, if the row is ahead of it; else the fastest of `PLAIN`
            that it is ahead of; else None.
        lead: how many times as long theirs takes there.
        recordings: their number, as far as the row says it.
        launches: those of a later call; None: not of one call.
        eager: calls of ours within it that are no launches.
        seconds: about how long its process builds.
    """

    table: str
    group: str
    ours: str
    figure: str = ""
    theirs: str | None = None
    lead: float | None = None
    recordings: int | None = None
    launches: int | None = None
    eager: int = 0
    seconds: float = 5.0

    @property
    def name(self) -> str:
        return f"{self.table}: {claims_table.named(vars(self))}"


@dataclass(frozen=True)
class Told:
    """A row of a table.

    Attributes:
        figures: the less, the better.
        plain: it generates no code.
    """

    name: str
    ours: bool
    figures: dict[str, float] = field(default_factory=dict[str, float])
    recordings: int | None = None
    launches: int | None = None
    eager: int = 0
    plain: bool = False
    seconds: float = 5.0


Group = tuple[str, list[Told]]


def claims(tables: Sequence[str]) -> list[Claim]:
    """List the rows of ours that are right in the files of results."""
    return [claim for table in tables for claim in claims_of(table)]


def claims_of(table: str) -> Iterator[Claim]:
    """List the claims of a table: one for each row of ours, and for each further lead of it."""
    results = json.loads((RESULTS / f"{table}.json").read_text())
    for group, rows in TABLES[table](results):
        found = [claim for row in rows if row.ours for claim in _of_row(table, group, row, rows)]
        parts = {group: found}
        if _seconds(found, rows) > LONG:
            parts = {f"{group}#{c.ours}": [o for o in found if o.ours == c.ours] for c in found}
        for name, part in parts.items():
            seconds = _seconds(part, rows)
            yield from (replace(claim, group=name, seconds=seconds) for claim in part)


def _seconds(found: Iterable[Claim], rows: Iterable[Told]) -> float:
    """Return how long the rows of the claims take to build, and the others beside them."""
    built = {name for claim in found for name in (claim.ours, claim.theirs)}
    return sum(row.seconds for row in rows if row.name in built)


def _of_row(table: str, group: str, row: Told, rows: Iterable[Told]) -> Iterator[Claim]:
    others = [other for other in rows if not other.ours and other.seconds <= SOON]
    for i, (figure, mine) in enumerate((row.figures or {"": 0.0}).items()):
        theirs = _behind(figure, mine, others)
        lead = theirs.figures[figure] / mine if theirs else None
        if theirs or i == 0:
            yield Claim(
                *(table, group, row.name, figure, theirs.name if theirs else None, lead),
                *(row.recordings, row.launches, row.eager),
            )


def _behind(figure: str, mine: float, others: Iterable[Told]) -> Told | None:
    """Return the fastest of the others if it is behind, else the fastest plain one that is."""
    timed = sorted((o for o in others if figure in o.figures), key=lambda o: o.figures[figure])
    for i, other in enumerate(timed):
        if (i == 0 or other.plain) and other.figures[figure] >= AHEAD * mine:
            return other
    return None


# One row for each way to run a workload.


OURS_OF_BACKEND = ("backend", "backend-eager", "graph", "graph-compile")
OTHERS = (*INCUMBENTS, *PLAIN)
FIGURES = ("wall", "host", "gpu")


def _ways(
    rows: Iterable[Results], others: Sequence[str] = OTHERS, figures: Sequence[str] = FIGURES
) -> list[Told]:
    """Read the rows that are right, of ours and of the others that a table shows."""
    told: list[Told] = []
    for row in rows:
        name = row.get("variant") or row["engine"]
        ours = is_ours(name) or name in OURS_OF_BACKEND
        if row["status"] != "ok" or not (ours or name in others):
            continue
        times = {figure: row[figure]["median_us"] for figure in figures if row.get(figure)}
        recordings = recordings_of(row["notes"]) if ours else None
        found = Told(name, ours, times, recordings, recordings, plain=name in PLAIN)
        told.append(replace(found, seconds=row.get("build_seconds") or found.seconds))
    return told


def recordings_of(notes: Iterable[str]) -> int:
    """Read from a row's notes how many recordings it took: 1 where they do not say."""
    lines = 0
    for note in notes:
        if found := re.match(r"(\d+) recordings?$", note):
            return int(found[1])
        if note.startswith("recordings of "):
            return note.count(",") + 1
        lines += re.search(r"\d+ nodes; inputs", note) is not None
    return lines or 1


def _by_workload(results: Results) -> Iterator[Group]:
    for name, data in results["workloads"].items():
        yield f"calls:{name}", _ways(data["rows"])


def _of_training(results: Results) -> Iterator[Group]:
    for part in training.PARTS:
        for name, data in results[part].items():
            each = 3.0 if name in training.SMALL else 8.0
            rows = [
                replace(told, seconds=3 * each if "compile" in told.name else each)
                for told in _ways(data["rows"], figures=("wall",))
            ]
            yield f"training:{part}:{name}", rows


def _of_backend(results: Results) -> Iterator[Group]:
    for dtype in backend.TYPES:
        for name, data in results.get(dtype, {}).items():
            yield f"backend:{dtype}:{name}", _ways(data["rows"], ("reduce-overhead", "cudagraphs"))


def _of_optimize(results: Results) -> Iterator[Group]:
    """Read plans as ours. Those of sizes that change have a call for each in a round."""
    for workload, data in results["workloads"].items():
        rows: list[Told] = []
        for name in ("eager", "incumbent", "exact incumbent", "exact", "1e-2"):
            found = data["rows"].get(name, {})
            if "timing" not in found:
                continue
            figures = {"wall": found["timing"]["median_us"]}
            if "plan" in found:
                cycle = workload in CYCLES
                graphed = int("graph" in found["steps"])
                launches = graphed * (len(LENGTHS) if cycle else 1)
                recordings = None if cycle else graphed
                seconds = 10.0 if any("inductor" in step for step in found["steps"]) else 3.0
                told = Told(f"onelaunch {name}", True, figures, recordings, launches)
                rows.append(replace(told, seconds=seconds))
            else:
                plain = found["engine"] in PLAIN
                rows.append(Told(f"{name} ({found['engine']})", False, figures, plain=plain))
        yield f"plans:{workload}", rows


# Rows of other kinds.


def _of_shapes(results: Results) -> Iterator[Group]:
    """Read the targets of each part, and our engines that serve requests beside buckets by hand."""
    engines = results["parts"]["requests"]["engines"]
    parts = ("memory", "capture", "overhead", "churn")
    wheres = {f"shapes:{part}": what for part, what in zip(parts, SHAPES, strict=True)}
    wheres |= {
        f"requests:{name}": f"{row['title']}:" for name, row in engines.items() if is_ours(name)
    }
    for group, what in wheres.items():
        rows = [
            Told(shape_of(target["what"]), True, seconds=1.0)
            for target in results["targets"]
            if shape_of(target["what"]).startswith(what)
        ]
        engine = group.partition(":")[2]
        if group.startswith("requests:"):
            rows += [_served(name, engines[name]) for name in ("by-hand", engine)]
        yield group, rows


SHAPES = ("memory of", "sizes of a", "host time of", "requests under")
"""How the targets of a part begin."""


def is_ours(name: str) -> bool:
    """Return whether an engine is ours."""
    return name.startswith("onelaunch")


def shape_of(what: str) -> str:
    """Return a target's text without the count at its beginning."""
    return re.sub(r"^[\d,]+ ", "", what)


def _served(name: str, row: Results) -> Told:
    seconds = row["build seconds"] / 2  # fewer requests go through it
    return Told(name, is_ours(name), served(row), None, 1, plain=True, seconds=seconds)


def served(row: Results) -> dict[str, float]:
    """Return the figures of an engine that serves requests, in microseconds."""
    latency, rate = row["latency"], row["throughput"]["per second"]
    return {"wall": 1e6 / rate, "p50": latency["p50 us"], "p99": latency["p99 us"]}


def _of_first_replay(results: Results) -> Iterator[Group]:
    """Read our rows, which are nowhere ahead of by hand; the targets that are met stay so."""
    rows = [r for r in results["fresh"] if r["engine"] == "onelaunch"]
    yield "replay:fresh", [Told(f"onelaunch, {row['kind']}", True) for row in rows]
    for row in results["warm"]:
        if row["status"] == "ok":
            yield (
                f"replay:{row['model']}",
                [
                    Told("onelaunch", True, recordings=1, launches=1),
                    Told("onelaunch bucket", True, recordings=len(BUCKETS), launches=1),
                ],
            )


def _of_learning(results: Results) -> Iterator[Group]:
    """Read the engines; a call is an iteration."""
    updates = train_rl.EPOCHS * train_rl.BATCHES
    launches = train_rl.HORIZON + 1 + updates
    rows: list[Told] = []
    for name, row in results["engines"].items():
        figures = {"wall": 1e6 / row["steps per second"]}
        rows.append(Told(name, is_ours(name), figures, None, launches, seconds=15.0))
    yield "learning:ppo", rows


def _of_generate(results: Results) -> Iterator[Group]:
    """Read the engines of each way; a call is a request. The prompt is no launch, and is a call of
    ours in `generate` alone. Ranges that overlap are no lead: our slowest, and their fastest."""
    groups: dict[str, list[Told]] = {}
    for row in results["rows"]:
        engine, pick, way = row["engine"], row["pick"], row["way"]
        if row["us"]:
            ours, eager = is_ours(engine), int(way == "generate")
            figures = {pick: row["max_us"] if ours else row["min_us"]}
            told = Told(
                *(f"{engine}, {pick}", ours, figures, None, results["tokens"] - 1, eager),
                plain=engine in PLAIN,
            )
            groups.setdefault(f"generate:{row['size']}:{way}", []).append(told)
    yield from groups.items()


def _of_coverage(results: Results) -> Iterator[Group]:
    """Make a row for each engine of ours and mode, and for each code of a refusal."""
    engines = [
        f"{name}, {mode}"
        for mode, found in results["counts"].items()
        for name in found["engines"]
        if is_ours(name)
    ]
    ran = [case["engines"] for case in results["cases"].values() if "engines" in case]
    ours = [row for rows in ran if (row := rows.get("onelaunch"))]
    codes = sorted({row["code"] for row in ours if row["verdict"] == "refused"})
    names = [*engines, *codes]
    yield "coverage:models", [Told(name, True, seconds=LONG / len(names)) for name in names]


def _of_doctor(results: Results) -> Iterator[Group]:
    kinds = sorted({case["on the GPU"]["verdict"] for case in results["cases"].values()})
    yield "doctor:models", [Told(kind, True, seconds=LONG / len(kinds)) for kind in kinds]


TABLES: dict[str, Callable[[Results], Iterator[Group]]] = {
    "engines": _by_workload,
    "call_overhead": _by_workload,
    "call_overhead_slow_host": _by_workload,
    "training": _of_training,
    "backend": _of_backend,
    "optimize": _of_optimize,
    "shapes": _of_shapes,
    "first_replay": _of_first_replay,
    "learning": _of_learning,
    "generate": _of_generate,
    "coverage": _of_coverage,
    "doctor": _of_doctor,
}
"""All tables but that of the claims, and that of the tests on each release of torch."""
