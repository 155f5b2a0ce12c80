"""What a call costs beside a bare replay of the same kernels: `results/call_overhead.json`.

    python -m benchmarks.call_overhead                    # under 90 seconds on an H200
    python -m benchmarks.call_overhead --quick --workloads mlp --out /tmp/some.json

float32 with TF32 off, under `torch.no_grad()`. Each workload has a process of its own. All of them
build at once, for compilers take a while; once the last is ready they measure one after the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.processes import (
    chosen,
    ends_by,
    parsed,
    ready_by,
    run_together,
    wait_for_turn,
    write,
)
from benchmarks.render import NAMES
from examples.workloads import WORKLOADS
from onelaunch.tools.bench import ENGINES
from onelaunch.tools.bench.engines.engine import Built, Engine
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.precision import relative_error
from onelaunch.tools.bench.reference import first_line, outputs
from onelaunch.tools.bench.timers import Timing, timers_for
from onelaunch.tools.bench.workload import Workload

ORDER = ("mlp", "cnn", "rnn", "resnet50", "bert")
VARIANTS = ("bare", "onelaunch", "onelaunch-static", "onelaunch-rebind", "reduce-overhead")
"""The compiler last, so that the others are built when its time is up."""
OURS = VARIANTS[1:4]
TOLERANCE = 1e-4  # relative
LIMIT_SECONDS = 8.0  # of measuring, each workload; BERT-base takes 6 on an H200


@dataclass
class Row:
    """One variant on one workload.

    Attributes:
        status: ``"ok"``, or with a reason ``"missing"``, ``"failed"`` or ``"wrong"``.
        error: relative to eager's result; 0 where they agree in every bit.
        notes: how inputs travel, and of how many nodes a recording is.
    """

    variant: str
    title: str
    status: str = "ok"
    reason: str | None = None
    error: float | None = None
    notes: list[str] = field(default_factory=list[str])
    host: Timing | None = None
    wall: Timing | None = None


@dataclass
class Contestant:
    """A variant at work."""

    row: Row
    call: Callable[[], object] = field(default=lambda: None)
    built: Built | None = None
    kept: object = None
    """What a call uses by address."""
    about_us: float = 100.0
    samples: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


@dataclass(frozen=True)
class Target:
    """A figure of ours, and what it is to stay below."""

    variant: str
    figure: str
    rule: str
    limit_us: float
    found_us: float

    @property
    def met(self) -> bool:
        return self.found_us <= self.limit_us

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        found = f"{self.variant} {self.figure} {self.found_us:.1f} us"
        return f"{found}, to reach {self.limit_us:.1f} ({self.rule}): {verdict}"


# Building and checking.


def build(name: str, workload: Workload, deadline: float) -> Contestant:
    """Build a variant and check it; what goes wrong is in its row."""
    engine: Engine = ENGINES[name]
    contestant = Contestant(Row(name, engine.title))
    row = contestant.row
    why = engine.missing(workload.device)
    if why is not None:
        row.status, row.reason = "missing", why
        return contestant
    with building(row, deadline):
        own = workload.copy()
        contestant.built = built = engine.build(own)
        check(row, built, workload)
        row.notes = built.notes()
        contestant.call = built.bare or partial(built.call, *own.args, **own.kwargs)
    return contestant


@contextmanager
def building(row: Row, deadline: float) -> Generator[None]:
    """End what is under way at the deadline; what goes wrong is in the row."""
    try:
        with ends_by(deadline):
            yield
    except KeyboardInterrupt:
        row.status, row.reason = "failed", "not built in time"
    except Exception as error:  # noqa: BLE001  an engine may raise anything, and that is its row
        row.status, row.reason = "failed", f"{type(error).__name__}: {first_line(error)}"


def judge(row: Row, error: float, most: float) -> None:
    """Note the error of a result, relative to eager's."""
    row.error = error
    if not error <= most:  # a NaN too
        row.status, row.reason = "wrong", f"relative error {error:.1e} to eager"


def check(row: Row, built: Built, workload: Workload) -> None:
    """Compare with eager on the inputs given and on others of the same shapes."""
    eager = workload.copy().fn
    errors: list[float] = []
    for args, kwargs in (workload.copy_inputs(), workload.fresh(torch.Generator().manual_seed(1))):
        expected = [t.clone() for t in outputs(eager(*args, **kwargs))]
        errors.append(relative_error(outputs(built.call(*args, **kwargs)), expected))
    judge(row, max(errors), TOLERANCE)


# Measuring.


def measure(
    contestants: Iterable[Contestant],
    device: torch.device,
    samples: int,
    seconds: float = LIMIT_SECONDS,
    kinds: int = 2,
) -> None:
    """Interleaved rounds, until each variant has so many samples of its host time.

    Args:
        kinds: how many timers of the device: wall, host, and its own.
    """
    running = [c for c in contestants if c.row.status == "ok"]
    timers = timers_for(device)[:kinds]
    wall = timers[0]
    for contestant in running:  # clocks up, caches warm; a call may take long, so one at first
        try:
            (contestant.about_us,) = wall.sample(contestant.call, math.inf)
        except RuntimeError as error:
            error.add_note(f"in {contestant.row.title}")
            raise
        wall.sample(contestant.call, contestant.about_us)
    gc.collect()
    gc.disable()
    turn, deadline = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and any(
            len(c.samples.get("host", ())) < samples for c in running
        ):
            for contestant in running[turn:] + running[:turn]:
                for timer in timers:
                    found = timer.sample(contestant.call, contestant.about_us)
                    contestant.samples.setdefault(timer.name, []).extend(found)
                contestant.about_us = contestant.samples["wall"][-1]
            turn = (turn + 1) % len(running)
    finally:
        gc.enable()
    for contestant in running:
        contestant.row.wall = Timing.of(contestant.samples["wall"])
        contestant.row.host = Timing.of(contestant.samples["host"])


def parts(
    contestant: Contestant, args: tuple[Tensor, ...], device: torch.device
) -> dict[str, float]:
    """What the pieces of a call cost, in microseconds.

    Medians of tight loops, but for the launch: that is timed with nothing queued before it, as the
    host time of a whole call is.
    """
    assert contestant.built is not None
    fast: Any = contestant.built.call
    captured = fast.__graphed__._table.entries[0].captured
    spec = captured.outputs.tensors[0].spec
    tensors = torch._C._dynamo.guards.TensorGuards(
        *args, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    allocate = partial(
        torch.empty_strided, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
    )
    launch = partial(captured.graph.launch, args, (allocate(),))
    _, host = timers_for(device)[:2]
    launches = [us for _ in range(20) for us in host.sample(launch, 100.0)]
    return {
        "guard check": loop_us(captured.guard.check),
        "tensor check": loop_us(partial(tensors.check, *args)),
        "allocation": loop_us(allocate),
        "launch": Timing.of(launches).median_us,
    }


def loop_us(call: Callable[[], object], calls: int = 2000, rounds: int = 9) -> float:
    found: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        found.append((time.perf_counter_ns() - start) / 1e3 / calls)
    return Timing.of(found).median_us


# Judging.


def targets(workload: str, rows: Iterable[Row]) -> list[Target]:
    """What the figures are to reach, of those that both sides of it were measured for."""
    timed = {row.variant: row for row in rows if row.host and row.wall}
    bare, incumbent = timed.get("bare"), timed.get("reduce-overhead")
    found: list[Target] = []
    for name in OURS:
        ours = timed.get(name)
        if ours is None or bare is None:
            continue
        host, wall = ours.host.median_us, ours.wall.median_us
        floor = bare.host.median_us
        if workload == "mlp" and name != "onelaunch-rebind":
            times = 3.2 if name == "onelaunch" else 2.4
            found.append(Target(name, "host", f"{times}x a bare replay", times * floor, host))
        if workload in ("resnet50", "bert"):
            found.append(Target(name, "host", "25 us above a bare replay", 25 + floor, host))
        share = {"mlp": 6, "resnet50": 4, "bert": 4}.get(workload)
        if share and incumbent:
            limit = incumbent.host.median_us / share
            found.append(Target(name, "host", f"1/{share} of reduce-overhead", limit, host))
        floor = bare.wall.median_us
        rule = "1.05x a bare replay, or 3 us above it"
        found.append(Target(name, "wall", rule, max(1.05 * floor, floor + 3), wall))
    return found


# One process for each workload.


def one(name: str, samples: int) -> dict[str, Any]:
    """Build, say so, wait to be told, measure."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the processes share the cores
    fn, args = WORKLOADS[name]()
    workload = Workload(fn, args)
    with torch.no_grad():
        contestants = [build(variant, workload, ready_by()) for variant in VARIANTS]
        wait_for_turn()
        measure(contestants, workload.device, samples)
        rows = [c.row for c in contestants]
        fresh = next(c for c in contestants if c.row.variant == "onelaunch")
        pieces = {}
        if name == "mlp" and fresh.row.status == "ok":
            pieces = parts(fresh, args, workload.device)
    return result_of(rows, targets(name, rows)) | {"parts_us": pieces}


def result_of(rows: Iterable[Row], targets: Iterable[Target]) -> dict[str, Any]:
    """What a process writes of its rows."""
    return {
        "environment": environment(),
        "rows": [asdict(row) for row in rows],
        "targets": [asdict(t) | {"met": t.met} for t in targets],
    }


def run_all(workloads: list[str], out: Path, samples: int, build_seconds: float) -> int:
    """Run and write; returns how many workloads gave no result."""
    results: dict[str, Any] = {"benchmark": "call_overhead", "environment": {}, "workloads": {}}
    started = time.monotonic()

    def done(name: str, data: dict[str, Any] | None) -> None:
        if data is None:
            print(f"{name}: no result", flush=True)
            return
        results["environment"] = data.pop("environment")
        results["workloads"][name] = data
        print(summary(name, data), flush=True)

    run_together(
        "benchmarks.call_overhead",
        workloads,
        ["--samples", str(samples)],
        build_seconds=build_seconds,
        measure_seconds=2 * LIMIT_SECONDS,
        done=done,
    )
    write(out, results)
    print(f"{time.monotonic() - started:.0f} s in all; {out}")
    return len(workloads) - len(results["workloads"])


def summary(name: str, data: dict[str, Any]) -> str:
    """A workload in a few lines of text."""
    lines = [NAMES[name], f"  {'':38}{'host us':>16}{'wall us':>18}"]
    for row in data["rows"]:
        if row["status"] == "ok":
            host, wall = (spread(row[which]) for which in ("host", "wall"))
            lines.append(f"  {row['title']:38}{host:>16}{wall:>18}")
        else:
            lines.append(f"  {row['title']:38}{row['status']}: {row['reason']}")
    if data["parts_us"]:
        pieces = ", ".join(f"{part} {us:.2f}" for part, us in data["parts_us"].items())
        lines.append(f"  of a call: {pieces} us")
    lines += target_lines(data)
    if not data["targets"]:
        lines.append("  no target is judged without a bare replay on an NVIDIA GPU")
    return "\n".join(lines)


def target_lines(data: dict[str, Any]) -> list[str]:
    """The targets of a result, a line each."""
    return [
        f"  {Target(**{name: value for name, value in target.items() if name != 'met'})}"
        for target in data["targets"]
    ]


def spread(timing: dict[str, float]) -> str:
    return f"{timing['median_us']:.1f} ±{timing['spread_us']:.1f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(ORDER), help="names, with commas")
    parser.add_argument("--quick", action="store_true", help="few samples, for a look")
    parser.add_argument("--samples", type=int, default=500, help="of the host time, at least")
    parser.add_argument("--build-seconds", type=float, default=65.0, help="for all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "call_overhead", argv)
    samples = 30 if options.quick else options.samples
    if options.one:
        found = one(options.one, samples)
        options.out.write_text(json.dumps(found))
        return 0
    workloads = chosen(parser, options.workloads, ORDER)
    if not torch.cuda.is_available():
        print("no GPU: bare replays and CUDA graphs are missing, and the tape's figures say little")
    return 1 if run_all(workloads, options.out, samples, options.build_seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
