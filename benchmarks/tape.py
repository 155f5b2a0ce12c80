"""What a replay costs beside eager where there is no GPU: `results/tape.json`.

    python -m benchmarks.tape                    # 6 minutes
    python -m benchmarks.tape --quick --workloads mlp --out /tmp/some.json

Plain CPU tensors, float32, torch with one thread, under `torch.no_grad()`; each workload in a
process of its own. A round times a short batch of calls of both, one after the other, by the CPU
time of the thread, so that what else runs on the machine counts little; the ratio is the median of
the rounds'. Before that both must agree in every bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onelaunch as ol
from benchmarks.processes import run_together
from benchmarks.render import NAMES
from examples.workloads import WORKLOADS
from onelaunch.bench.environment import environment
from onelaunch.bench.reference import first_line, outputs
from onelaunch.bench.timers import Timing

RESULTS = Path(__file__).parent / "results"
ORDER = (
    *("sine", "sine_step", "linear_small", "linear", "conv2d", "conv"),
    *("mlp", "cnn", "rnn", "resnet50_small", "resnet50", "bert", "resnext101"),
)
LIMIT = 1.2
"""Times eager: what a replay is to cost at most."""
WARMUP, EPOCHS = 4, 10
BATCH_US, BATCH_CALLS = 500.0, 200
ROUNDS, SECONDS = 21, 20.0
"""A workload is measured for so long, and for at least so many rounds."""
BUILD_SECONDS = 300.0


@dataclass
class Row:
    """One workload.

    Attributes:
        status: ``"ok"``, or with a reason ``"missing"``, ``"failed"`` or ``"wrong"``.
        ratio: the median of the rounds' ratios of replay to eager.
        nodes: calls and copies of one replay.
    """

    status: str = "ok"
    reason: str | None = None
    eager: Timing | None = None
    replay: Timing | None = None
    ratio: float | None = None
    nodes: int = 0

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio <= LIMIT


@dataclass
class Pair:
    """The same work twice, and what tells whether it came out the same."""

    eager: Callable[[], object]
    replay: Callable[[], object]
    graphed: Any
    same: Callable[[], bool]


# What is measured.


def inference(name: str) -> Pair:
    """A workload of `examples`."""
    fn, args = WORKLOADS[name]()
    graphed = ol.graph(fn)
    eager, replay = partial(fn, *args), partial(graphed, *args)
    for _ in range(WARMUP):
        replay()

    def same() -> bool:
        results = list(zip(outputs(eager()), outputs(replay()), strict=True))
        return bool(results) and all(torch.equal(a, b) for a, b in results)

    return Pair(eager, replay, graphed, same)


def sine_step() -> Pair:
    """A step of Adam towards the minimum of sin(2x) on five numbers, as one callable."""
    start = torch.randn(5)

    def made() -> tuple[Tensor, Callable[[], Tensor]]:
        x = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.1, fused=True)

        def step() -> Tensor:
            with torch.enable_grad():
                optimizer.zero_grad()
                loss = torch.sin(2 * x).sum()
                loss.backward()
                optimizer.step()
                return loss.detach()

        return x, step

    (x, eager), (twin, replayed) = made(), made()
    graphed = ol.graph(replayed)
    for _ in range(WARMUP):
        eager()
        graphed()

    def same() -> bool:
        losses = [(eager(), graphed()) for _ in range(EPOCHS)]
        return all(torch.equal(a, b) for a, b in [*losses, (x, twin)])

    return Pair(eager, graphed, graphed, same)


# Measuring.


def measured(name: str, seconds: float) -> Row:
    """Build, check, and take rounds; what goes wrong is in the row."""
    row = Row()
    try:
        pair = sine_step() if name == "sine_step" else inference(name)
        recordings = pair.graphed.recordings
        if len(recordings) != 1:
            row.status, row.reason = "failed", f"{len(recordings)} recordings"
        elif not pair.same():
            row.status, row.reason = "wrong", "not the bits of eager"
    except ModuleNotFoundError as error:
        row.status, row.reason = "missing", str(error)
        return row
    except Exception as error:  # noqa: BLE001  a workload may raise anything, and that is its row
        row.status, row.reason = "failed", f"{type(error).__name__}: {first_line(error)}"
        return row
    if row.status == "ok":
        row.nodes = recordings[0].nodes
        eager, replay = rounds(pair, seconds)
        row.eager, row.replay = Timing.of(eager), Timing.of(replay)
        row.ratio = statistics.median(b / a for a, b in zip(eager, replay, strict=True))
    return row


def rounds(pair: Pair, seconds: float) -> tuple[list[float], list[float]]:
    """Microseconds per call of both, round by round; which goes first changes each time."""
    found: dict[Callable[[], object], list[float]] = {pair.eager: [], pair.replay: []}
    about = batch(pair.eager, 1)
    calls = max(1, min(BATCH_CALLS, int(BATCH_US / about)))
    order = [pair.eager, pair.replay]
    gc.collect()
    gc.disable()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(found[pair.eager]) < ROUNDS:
            for call in order:
                found[call].append(batch(call, calls))
            order.reverse()
    finally:
        gc.enable()
    return found[pair.eager], found[pair.replay]


def batch(call: Callable[[], object], calls: int) -> float:
    """Microseconds of this thread's CPU time per call."""
    start = time.thread_time_ns()
    for _ in range(calls):
        call()
    return max(time.thread_time_ns() - start, 1) / 1e3 / calls


# One process for each workload.


def one(name: str, seconds: float) -> dict[str, Any]:
    """Measure when told to."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the examples would go there
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("ready", flush=True)
    sys.stdin.readline()
    with torch.no_grad():
        row = measured(name, seconds)
    return {"environment": environment(), "row": asdict(row) | {"met": row.met}}


def run_all(workloads: Iterable[str], out: Path, seconds: float) -> int:
    """Run and write; returns how many workloads gave no result."""
    results: dict[str, Any] = {"benchmark": "tape", "limit": LIMIT, "threads": 1}
    results |= {"environment": {}, "workloads": {}}
    silent: list[str] = []

    def done(name: str, data: dict[str, Any] | None) -> None:
        if data is None:
            silent.append(name)
            print(f"{name}: no result", flush=True)
            return
        results["environment"] = data["environment"]
        results["workloads"][name] = data["row"]
        print(summary(name, data["row"]), flush=True)

    for name in workloads:
        run_together(
            "benchmarks.tape",
            [name],
            ["--seconds", str(seconds)],
            build_seconds=BUILD_SECONDS,
            measure_seconds=BUILD_SECONDS + 10 * seconds,
            done=done,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(out)
    return len(silent)


def summary(name: str, row: dict[str, Any]) -> str:
    """A workload in a line of text."""
    if row["status"] != "ok":
        return f"{NAMES[name]:40}{row['status']}: {row['reason']}"
    eager, replay = (f"{row[k]['median_us']:,.1f} ±{row[k]['spread_us']:,.1f}" for k in SIDES)
    verdict = "met" if row["met"] else "MISSED"
    return f"{NAMES[name]:40}{eager:>22}{replay:>22}  {row['ratio']:.2f}x  {verdict}"


SIDES = ("eager", "replay")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(ORDER), help="names, with commas")
    parser.add_argument("--out", type=Path, default=RESULTS / "tape.json")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each workload")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    seconds = 0.2 if options.quick else options.seconds
    if options.one:
        options.out.write_text(json.dumps(one(options.one, seconds)))
        return 0
    workloads = options.workloads.split(",")
    if unknown := [name for name in workloads if name not in ORDER]:
        parser.error(f"no workload is called {', '.join(unknown)}: {', '.join(ORDER)}")
    here = environment()
    print(f"{here['cpu']}, torch {here['torch']}, one thread; CPU us per call", flush=True)
    return 1 if run_all(workloads, options.out, seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
