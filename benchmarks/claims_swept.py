"""The rows of the tables that are whole sweeps: sizes, requests, tokens, models; few of each.

A builder is as in `claims_built`. Of models a sample is drawn with a seed, of those that are
installed here.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

import onelaunch as ol
from benchmarks import doctor, first_replay, first_replay_models, shapes, shapes_serving
from benchmarks import shapes_recordings as recordings
from benchmarks.call_overhead import building, judge
from benchmarks.claims_built import Counts, Finish, Found, count
from benchmarks.claims_listed import is_ours, served, shape_of
from benchmarks.coverage_models import catalogue
from benchmarks.coverage_models.diagnosed import DOCTOR
from benchmarks.coverage_models.pool import Case, run
from benchmarks.coverage_models.summary import RIGHT, SPLIT, tried
from benchmarks.processes import RESULTS, ready_by
from examples import train_rl
from examples.placement import device
from onelaunch.error_catalogue import CATALOGUE
from onelaunch.tools.bench.precision import relative_error
from onelaunch.tools.bench.reference import outputs

REQUESTS = 2500
CHURNED = 20_000
TIMED = 3
"""Requests to a decoder, or iterations of learning, that are timed."""
WARM = 6
"""Iterations of learning before: the function that runs once in each is recorded in the fourth."""
SAMPLE = 3
"""Models of each row."""
WORKERS = 3
DIAGNOSED_SECONDS = 10.0
"""The most that a model of the sample took the doctor."""
TOLERANCE = 1e-4
BACKEND = "onelaunch backend"
Result = dict[str, Any]
Ask = Callable[[], tuple[torch.Tensor, float]]
"""A request: its tokens and its seconds."""


def results(table: str) -> Result:
    """Read a file of results."""
    return json.loads((RESULTS / f"{table}.json").read_text())


# Sizes that vary.


def sized(part: str, variants: Sequence[str]) -> Finish:
    """Judge the targets of a part of `benchmarks.shapes`, in its turn if it takes times."""

    def finish() -> list[Found]:
        tiny = device().type == "cpu"
        scale = recordings.SMALL if tiny else recordings.Scale(samples=100, requests=CHURNED)
        with torch.no_grad():
            if part == "churn":
                found = recordings.churn(scale, device(), 30.0)
            else:
                found = getattr(recordings, part)(scale, device())
        return judged(shapes.targets({part: found}), variants)

    if part != "memory":
        return finish
    rows = finish()
    return lambda: rows


def judged(targets: Sequence[shapes.Target], variants: Sequence[str]) -> list[Found]:
    """Return a row for each target; one that the table has as missed only has to run."""
    met = {shape_of(t["what"]): t["met"] for t in results("shapes")["targets"]}
    rows: list[Found] = []
    for target in targets:
        row = Found(shape_of(target.what))
        if not target.met and met.get(row.variant, True):
            row.fail(f"{target.found}, to reach {target.rule}")
        rows.append(row)
    return [row for row in rows if row.variant in variants]


def requested(name: str, variants: Sequence[str]) -> Finish:
    """Serve requests by an engine of ours and by buckets by hand."""
    tiny = device().type == "cpu"
    load = shapes_serving.SMALL if tiny else shapes_serving.Load(requests=REQUESTS)
    names = [name] if tiny else ["by-hand", name]
    with torch.no_grad():
        seconds = ready_by() - time.time()
        sessions = [shapes_serving.build(one, load, device(), seconds) for one in names]

    def finish() -> list[Found]:
        engines: dict[str, Any] = {}
        rows: list[Found] = []
        for one, session in zip(names, sessions, strict=True):
            with torch.no_grad():
                row = engines[one] = shapes_serving.measure(session, device(), 5.0)
                found = Found(one, status=row["status"], figures=served(row))
                if row["status"] != "ok":
                    found.reason = f"error {row['error']:.1e}"
                if is_ours(one):
                    count(found, partial(session.engine, *session.work[0]), Counts.now())
            rows.append(found)
        return [*rows, *judged(shapes.judge_requests({"engines": engines}), variants)]

    return finish


# The first replay.


def replayed(name: str, variants: Sequence[str]) -> Finish:
    """Replay a model for the first time, or an MLP in processes of their own."""
    if name == "fresh":
        return _fresh(variants)
    model, make = first_replay_models.MODELS[name]()
    model = model.to(device()).eval()
    batches = [make(size) for size in first_replay_models.BUCKETS]
    ways: dict[str, tuple[Any, list[Any]]] = {
        "onelaunch": (ol.graph(model), batches[:1]),
        "onelaunch bucket": (
            ol.graph(model, buckets=ol.Buckets(dim=0, sizes=first_replay_models.BUCKETS)),
            batches[::-1],
        ),
    }
    rows: list[Found] = []
    with torch.no_grad():
        for variant in variants:
            fast, inputs = ways[variant]
            row, before = Found(variant), Counts.now()
            with building(row, ready_by()):
                for x in inputs:
                    first_replay_models.first_replay(fast, x)
                    error = relative_error(outputs(fast(x)), outputs(model(x)))
                    judge(row, max(error, row.error or 0.0), TOLERANCE)
                count(row, partial(fast, inputs[-1]), before)
            rows.append(row)
    return lambda: rows


def _fresh(variants: Sequence[str]) -> Finish:
    """Run the fresh processes, which fills caches; in its turn again what met its limit."""
    table = results("first_replay")
    met = {target["what"]: target["met"] for target in table["targets"]}
    rows = {variant: Found(variant) for variant in variants}
    again: list[tuple[Found, str]] = []
    for there in table["fresh"]:
        kind = there["kind"]
        row = rows.get(f"{there['engine']}, {kind}")
        if row is not None:
            with building(row, ready_by()):
                made = set(first_replay.fresh("onelaunch", kind)["compilers"])
                if more := made - set(there["compilers"]):
                    row.fail(f"imports {', '.join(sorted(more))}")
            if met[f"{kind}, fresh process, s"]:
                again.append((row, kind))

    def finish() -> list[Found]:
        most = first_replay.MOST_SECONDS[device().type]
        for row, kind in again:
            seconds = first_replay.fresh("onelaunch", kind)["seconds"]
            if seconds > most:
                row.fail(f"{seconds:.2f} s, to reach {most} s")
        return list(rows.values())

    return finish


# Learning and decoding.


def learned(_: str, variants: Sequence[str]) -> Finish:
    """Learn by each engine: the returns are eager's, then some more iterations are timed."""
    expected = list(islice(train_rl.learning(train_rl.eager), WARM))
    rows: list[Found] = []
    runs: list[Any] = []
    for variant in variants:
        row, before = Found(variant), Counts.now()
        run = train_rl.learning(train_rl.ENGINES[variant])
        with building(row, ready_by()):
            returns = list(islice(run, WARM))
            if is_ours(variant):
                count(row, partial(next, run), before)
                if returns != expected:
                    row.fail(f"returns {returns}, eager's are {expected}")
        rows.append(row)
        runs.append(run)
    steps = train_rl.ENVIRONMENTS * train_rl.HORIZON

    def finish() -> list[Found]:
        for row, run in zip(rows, runs, strict=True):
            started = time.perf_counter()
            if row.status == "ok" and list(islice(run, TIMED)):
                row.figures["wall"] = 1e6 * (time.perf_counter() - started) / (TIMED * steps)
        return rows

    return finish


def decoded(name: str, variants: Sequence[str]) -> Finish:
    """Decode by each engine: as many tokens are eager's as in the table."""
    from examples import generate

    size, _, way = name.partition(":")
    table = results("generate")
    tokens = table["tokens"]
    agree = {
        f"{row['engine']}, {row['pick']}": row["agree"]
        for row in table["rows"]
        if (row["size"], row["way"]) == (size, way)
    }
    model = generate.decoder(size, device())
    prompt = torch.randint(
        1, 32000, (1, generate.PROMPT), generator=torch.Generator().manual_seed(1)
    ).to(device())
    graphed = functools.cache(partial(generate.graphed, model=model))

    def made(engine: str, pick: str) -> Ask:
        if way == "loop":
            choose = generate.PICKS[pick]
            serve = generate.by_loop(engine, model, choose, generate.PROMPT + tokens)
        else:
            serve = generate.by_generate(engine, graphed(engine), pick)
        return partial(generate.timed, serve, prompt, tokens)

    rows: list[Found] = []
    asked: list[tuple[Found, str, Ask]] = []
    with torch.no_grad():
        expected = {pick: made("eager", pick)()[0] for pick in generate.PICKS}
        for variant in variants:
            engine, _, pick = variant.partition(", ")
            row, before = Found(variant), Counts.now()
            with building(row, ready_by()):
                ask = made(engine, pick)
                for _ in range(generate.WARMUP):
                    result, _ = ask()
                if is_ours(variant):
                    count(row, ask, before)
                    same = int((result == expected[pick])[0].int().cumprod(0).sum())
                    if same < agree[variant]:
                        row.fail(f"{same} tokens are eager's, {agree[variant]} in the table")
                asked.append((row, pick, ask))
            rows.append(row)

    def finish() -> list[Found]:
        with torch.no_grad():
            for _ in range(TIMED):
                for row, pick, ask in asked:
                    us = 1e6 * ask()[1] / tokens
                    row.figures[pick] = min(us, row.figures.get(pick, us))
        return rows

    return finish


# Models of libraries.


def drawn(names: Sequence[str], count: int = SAMPLE) -> list[str]:
    """Draw from the models that are installed here, by a seed."""
    known = set(catalogue.names())
    there = sorted(name for name in names if name.partition(" ")[0] in known)
    return random.Random(0).sample(there, min(count, len(there)))


def covered(_: str, variants: Sequence[str]) -> Finish:
    """Run a sample of models by our engines; what becomes of each is what the table counts."""
    table = results("coverage")["cases"]
    cases = {name: case["engines"] for name, case in table.items() if "engines" in case}
    samples: dict[str, list[str]] = {}
    engines: dict[str, dict[str, None]] = {}
    for variant in variants:
        runs, among = _sampled(variant, cases)
        samples[variant] = drawn(among, 1 if len(runs) > 1 or runs == [BACKEND] else SAMPLE)
        for name in samples[variant]:
            engines.setdefault(name, {}).update(dict.fromkeys(runs))
    todo = {name: Case(*name.split(" "), list(runs)) for name, runs in engines.items()}
    where = "cuda" if device().type == "cuda" else "tape"
    run(list(todo.values()), where, WORKERS, ready_by() - time.time(), lambda case: None)

    def differs(variant: str, name: str) -> str | None:
        case = todo[name]
        for engine in _sampled(variant, cases)[0]:
            found = case.rows.get(engine, {"verdict": case.why or "not run"})
            if (is_so := _become(found)) != (was := _become(cases[name][engine])):
                return f"{is_so} by {engine}, {was} in the table"
        return "no way to do without" if variant in CATALOGUE and not tried(case.rows) else None

    return _of_models(samples, differs)


def _sampled(variant: str, cases: dict[str, Result]) -> tuple[list[str], list[str]]:
    """Return the engines that a row is of, and the models that are right there."""
    if variant in CATALOGUE:  # a code that models are refused with
        codes = {name: _of(rows, "onelaunch").get("code") for name, rows in cases.items()}
        return ["onelaunch", SPLIT], [name for name, code in codes.items() if code == variant]
    engine, _, mode = variant.partition(", ")
    known = (*RIGHT, "refused")
    ran = {name: rows for name, rows in cases.items() if name.endswith(f" {mode}")}
    # The same models for each engine, so that they are built once.
    ours = {name: [row["verdict"] for e, row in ran[name].items() if is_ours(e)] for name in ran}
    return [engine], [name for name in ran if all(verdict in known for verdict in ours[name])]


def _become(row: Result) -> str:
    """Return what became of a model. Pieces warn, each of the part that it leaves out."""
    verdict = row["verdict"]
    return f"{verdict} {row['code']}" if "code" in row and verdict != "pieces" else verdict


def _of(rows: Result, engine: str) -> Result:
    return rows.get(engine, {})


def diagnosed(_: str, variants: Sequence[str]) -> Finish:
    """Diagnose a sample of models of each kind without the GPU, of those that are soon done."""
    wanted = doctor.expected("*")
    took = {name: case["here"].get("seconds") for name, case in results("doctor")["cases"].items()}
    soon = {name for name, seconds in took.items() if seconds and seconds < DIAGNOSED_SECONDS}
    samples = {
        kind: drawn([n for n, row in wanted.items() if row["verdict"] == kind and n in soon])
        for kind in variants
    }
    names = [name for sample in samples.values() for name in sample]
    todo = {name: Case(*name.split(" "), [DOCTOR]) for name in names}
    run(list(todo.values()), "tape", WORKERS, ready_by() - time.time(), lambda case: None)

    def differs(_: str, name: str) -> str | None:
        found = doctor.compared(todo[name].rows.get(DOCTOR, {}), wanted[name])
        return None if found in doctor.GOOD else f"{found} {todo[name].why}"

    return _of_models(samples, differs)


def _of_models(samples: dict[str, list[str]], differs: Callable[[str, str], str | None]) -> Finish:
    """Return a row for each sample: right if no model of it differs from what the table counts."""
    rows: list[Found] = []
    for variant, names in samples.items():
        row = Found(variant)
        if not names:
            row.fail("none of its models is installed")
        for name in names:
            if why := differs(variant, name):
                row.fail(f"{name}: {why}")
        rows.append(row)
    return lambda: rows
