"""`ol.optimize` beside the best of the other ways: `results/optimize.json`.

    python -m benchmarks.optimize --budget-seconds 1500        # all of them, on an H200
    python -m benchmarks.optimize --workloads mlp,cnn --budget-seconds 200    # these anew

For each workload: eager, the best engine of `compare`, the plans under ``max_error=0`` and under
1e-2; and for the model cast to bfloat16 the best engine and the plan. Once all are found they are
built anew and timed together, in turns. Each workload runs in a process of its own, and results
are written after each, beside those of earlier runs on the same machine.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from benchmarks.optimize_workloads import CYCLES, KINDS, ORDER, SMALL, WORKLOADS
from benchmarks.processes import ROOT, chosen, earlier, no_silent_eager, parsed, write
from onelaunch.bench.engines import ENGINES
from onelaunch.bench.engines.engine import grad_mode
from onelaunch.bench.environment import environment
from onelaunch.bench.reference import outputs
from onelaunch.bench.timers import Timing, timers_for
from onelaunch.bench.workload import Workload

INCUMBENTS = (
    *("eager", "no_grad", "by-hand", "make_graphed_callables"),
    *("compile", "reduce-overhead", "cudagraphs", "torchscript", "openxla"),
)
GRACE_SECONDS = 60
ROUNDS = 30
EXACT, LOOSE = 0.0, 1e-2
PARTS = {"exact": 0.1, "1e-2": 0.4, "bf16": 0.2}
"""Of the time of a workload, for the three searches; the comparisons take what they need."""
Found = dict[str, Any]
Call = Callable[[], object]


def measure(name: str, seconds: float) -> Found:
    """Find the best of each kind for one workload, then time them together."""
    torch.manual_seed(0)
    fn, args = WORKLOADS[name]()
    half = in_bf16(fn, args)
    engines = [*INCUMBENTS, *(["max-autotune"] if name in SMALL else [])]
    rows: dict[str, Found] = {"eager": {"engine": "eager"}}
    contest: dict[str, Call] = {}
    given = {"incumbent": (fn, args), "incumbent bf16": half}
    for row, subject in given.items():
        if subject is not None:
            rows[row] = noted(name, row, functools.partial(compared, *subject, engines))
    if "engines" in rows["incumbent"]:
        find = functools.partial(bit_for_bit, rows["incumbent"]["engines"], fn, args)
        rows["exact incumbent"] = noted(name, "exact incumbent", find)
    given = {"exact": (fn, args), "bf16": half, "1e-2": (fn, args)}
    for row, subject in given.items():
        if subject is not None:
            error = EXACT if row == "exact" else LOOSE
            find = functools.partial(optimized, *subject, error, PARTS[row] * seconds)
            rows[row] = noted(name, row, find)
    for row, found in rows.items():
        subject = half if row.endswith("bf16") else (fn, args)
        if found.get("status") != "failed" and subject is not None:
            noted(
                name, f"{row} again", functools.partial(built, found, *subject, name, contest, row)
            )
    for row, timing in in_turns(contest, fn, args).items():
        rows[row]["timing"] = asdict(timing)
    return {"workload": name, "rows": rows, "targets": targets(name, rows)}


def noted(name: str, row: str, find: Callable[[], Found]) -> Found:
    """What was found, or the exception; the other rows go on."""
    try:
        found = find()
    except Exception as error:  # noqa: BLE001  any engine may raise anything
        found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
    print(f"  {name}, {row}: {shown(found)}", flush=True)
    return found


def shown(found: Found) -> str:
    """A line for the terminal."""
    said = found.get("reason") or found.get("engine") or ", ".join(found.get("steps", ()))
    return f"{said or 'done'}"


def in_bf16(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """The model and its arguments in bfloat16; None for a function, which has no dtype."""
    if not isinstance(fn, nn.Module):
        return None
    cast = [a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    return copy.deepcopy(fn).bfloat16(), tuple(cast)


def compared(fn: Any, args: tuple[Any, ...], engines: list[str]) -> Found:
    """The fastest correct engine whose results are the caller's to keep."""
    result = ol.compare(fn, args, engines=engines, seconds=5)
    best = result.best
    assert best is not None, "no engine was right"
    rows = [
        {"engine": r.engine, "status": r.status, "reason": r.reason, "error": r.error}
        | {"us": r.wall.median_us if r.wall else None}
        for r in result.rows
    ]
    return {"engine": best.engine, "title": best.title, "error": best.error, "engines": rows}


def bit_for_bit(engines: list[Found], fn: Any, args: tuple[Any, ...]) -> Found:
    """The fastest engine whose results are eager's bit for bit, on these arguments."""
    with torch.no_grad():
        expected = outputs(Workload(fn, args).copy()())
    timed = sorted((e for e in engines if e["us"] is not None), key=lambda e: e["us"])
    for found in timed:
        engine = ENGINES[found["engine"]]
        with grad_mode(engine.mode):
            made = engine.build(Workload(fn, args).copy())
            results = outputs(made.call(*args))
            same = all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
            made.close()
        if same:
            return {"engine": engine.name, "title": engine.title}
    raise AssertionError("no engine gives eager's results twice")


def optimized(fn: Any, args: tuple[Any, ...], max_error: float, seconds: float) -> Found:
    """The plan that a search finds."""
    plan = ol.optimize(fn, args, max_error=max_error, seconds=seconds).plan
    return {"steps": list(plan.steps), "error": plan.error, "plan": json.loads(plan.to_json())}


def built(
    found: Found,
    fn: Any,
    args: tuple[Any, ...],
    name: str,
    contest: dict[str, Call],
    row: str,
) -> Found:
    """Build what was found anew, for the contest. Of lengths that change each gets its calls."""
    if "plan" in found:
        call: Any = ol.Plan.from_json(json.dumps(found["plan"])).apply(fn, args)
    else:
        engine = ENGINES[found["engine"]]
        mode = functools.partial(grad_mode, engine.mode)
        with mode():
            run = engine.build(Workload(fn, args).copy()).call

        def call(*args: Any) -> Any:
            with mode():
                return run(*args)

    batches = CYCLES[name](args) if name in CYCLES else [args]

    def cycle() -> None:
        for batch in batches:
            call(*batch)

    for _ in range(6):
        cycle()
    contest[row] = cycle
    return {}


def in_turns(contest: dict[str, Call], fn: Any, args: tuple[Any, ...]) -> dict[str, Timing]:
    """Wall times, each contestant first in its turn."""
    timer = timers_for(Workload(fn, args).device)[0]
    about = {row: timer.sample(call, 1e9)[-1] for row, call in contest.items()}
    samples: dict[str, list[float]] = {row: [] for row in contest}
    order = list(contest)
    for i in range(ROUNDS if order else 0):
        turn = i % len(order)
        for row in order[turn:] + order[:turn]:
            about[row] = timer.sample(contest[row], about[row])[-1]
            samples[row].append(about[row])
    return {row: Timing.of(found) for row, found in samples.items() if found}


def targets(name: str, rows: dict[str, Found]) -> list[Found]:
    """What was to be reached of the times, and whether it was."""
    times = {row: found["timing"]["median_us"] for row, found in rows.items() if "timing" in found}
    wanted: list[tuple[str, str, float, str]] = []
    if name not in KINDS:
        wanted.append(("exact", "exact incumbent", 1.0, "the best incumbent that is exact"))
        wanted.append(("exact", "incumbent", 1.0, "the best incumbent"))
    if name in ("resnet50", "resnext101", "bert"):
        wanted.append(("1e-2", "incumbent", 1.5, "1.5x the best incumbent in float32"))
    if name in KINDS:
        wanted.append(("bf16", "incumbent bf16", 1.0, "the best incumbent in bfloat16"))
    return [
        {"variant": row, "figure": "wall", "rule": rule, "found_us": times[row]}
        | {"limit_us": limit, "met": times[row] <= limit}
        for row, beside, factor, rule in wanted
        if row in times and beside in times
        # 2%, or 1 us, is what two timings of one callable differ by.
        for limit in [max(1.02 * times[beside], times[beside] + 1) / factor]
    ]


def run_all(names: list[str], out: Path, budget_seconds: float) -> int:
    """One process for each workload; returns how many gave no result."""
    deadline = time.monotonic() + budget_seconds
    here: Found = {"benchmark": "optimize", "environment": environment()}
    results: Found = {**here, "workloads": earlier(out, here).get("workloads", {})}
    missing = 0
    for i, name in enumerate(names):
        # Large models take most of the time, so small ones leave them more than their share.
        left = deadline - time.monotonic()
        weights = [1.0 if n in SMALL else 4.0 for n in names[i:]]
        start, share = time.monotonic(), left * weights[0] / sum(weights)
        data = _in_a_process(name, share) if share > 0 else None
        said = "" if data else ", no result"
        print(f"{name}: {time.monotonic() - start:.0f} s of {share:.0f}{said}", flush=True)
        if data is None:
            missing += 1
            continue
        done = results["workloads"] | {name: data}
        results["workloads"] = {known: done[known] for known in ORDER if known in done}
        write(out, results)
    return missing


def _in_a_process(name: str, seconds: float) -> Found | None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "one.json"
        command = [sys.executable, "-m", "benchmarks.optimize", "--one", name, "--out", str(out)]
        command += ["--budget-seconds", str(seconds)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        try:
            child.wait(1.5 * seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
        return json.loads(out.read_text()) if out.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(ORDER), help="names, with commas")
    parser.add_argument("--budget-seconds", type=float, default=1500.0, help="for everything")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "optimize")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        no_silent_eager()
        write(options.out, measure(options.one, options.budget_seconds))
        return 0
    names = chosen(parser, options.workloads, list(WORKLOADS))
    return 1 if run_all(names, options.out, options.budget_seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
