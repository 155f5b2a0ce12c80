"""Every engine on every inference workload, in float32 with TF32 off: `results/engines.json`.

    python -m benchmarks.engines                    # all of them, under eight minutes on an H200
    python -m benchmarks.engines --workloads mlp,cnn    # these anew, the others as they are

Each workload runs in a process of its own, so that neither a compiler's state nor a profiler nor a
device error reaches the next; results are written after each. Its engines take turns, call upon
call: only they are to be compared with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import chosen, earlier, parsed, write
from examples.workloads import WORKLOADS
from onelaunch.tools.bench import Comparison, compare
from onelaunch.tools.bench.environment import environment

ENGINES = (
    *("eager", "no_grad", "by-hand", "make_graphed_callables"),
    *("onelaunch", "onelaunch-rebind", "onelaunch-static", "bare"),
    # From here on a compiler builds them, which may take all the time that is left.
    *("compile", "onelaunch-compile", "bare_compiled", "reduce-overhead", "cudagraphs"),
    *("max-autotune", "onelaunch-max-autotune"),
)
SMALL = ("mlp", "cnn", "rnn")
ORDER = (*SMALL, "resnet50", "bert", "resnext101")
GRACE_SECONDS = 45  # for a process to start, and to write what it has when its time is up


def engines_for(workload: str) -> list[str]:
    """max-autotune takes minutes to build, so only the small workloads meet it."""
    return [name for name in ENGINES if "max-autotune" not in name or workload in SMALL]


def measure(workload: str, seconds: float, budget_seconds: float) -> Comparison:
    """Compare the engines on one workload; what the budget leaves undone is in its rows."""
    torch.manual_seed(0)
    fn, args = WORKLOADS[workload]()
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, budget_seconds)
    try:
        return compare(fn, args, engines=engines_for(workload), seconds=seconds, name=workload)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _time_is_up(*_: object) -> None:
    raise KeyboardInterrupt  # which `compare` answers with the rows so far


def run_all(workloads: list[str], out: Path, seconds: float, budget_seconds: float) -> int:
    """One process for each workload; returns how many gave no result."""
    deadline = time.monotonic() + budget_seconds
    results: dict[str, Any] = {"benchmark": "engines", "environment": environment()}
    results["workloads"] = earlier(out, results).get("workloads", {})
    missing = 0
    for i, name in enumerate(workloads):
        # What is left is shared out evenly over what is left to do, large models last.
        left = (deadline - time.monotonic()) / (len(workloads) - i) * (2 if i < 3 else 1.5)
        left = min(left, deadline - time.monotonic() - GRACE_SECONDS)
        start = time.monotonic()
        text = _in_a_process(name, seconds, left) if left > 0 else None
        print(
            f"{name}: {time.monotonic() - start:.0f} s{'' if text else ', no result'}", flush=True
        )
        if text is None:
            missing += 1
            continue
        data = json.loads(text)
        results["environment"] = data.pop("environment")
        done = results["workloads"] | {name: data}
        results["workloads"] = {known: done[known] for known in ORDER if known in done}
        write(out, results)
    return missing


def _in_a_process(name: str, seconds: float, budget_seconds: float) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "one.json"
        command = [sys.executable, "-m", "benchmarks.engines", "--one", name, "--out", str(out)]
        command += ["--seconds", str(seconds), "--budget-seconds", str(budget_seconds)]
        root = Path(__file__).parents[1]
        path = os.pathsep.join([str(root), *sys.path])
        child = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": path})
        try:
            child.wait(budget_seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return out.read_text() if out.exists() else None


def summary(comparison: Comparison) -> str:
    """The comparison in a few lines of text."""
    lines = [comparison.profile.summary] if comparison.profile else []
    for row in comparison.rows:
        wall = f"{row.wall.median_us:9.1f} us wall" if row.wall else " " * 17
        host = f"{row.host.median_us:9.1f} us host" if row.host else " " * 17
        said = "noisy" if row.status == "ok" and row.noisy else ""
        said = f"{row.status}: {row.reason}" if row.status != "ok" else said
        lines.append(f"  {row.engine:24}{wall}{host}  {said}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(ORDER), help="names, with commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing, each workload")
    parser.add_argument("--budget-seconds", type=float, default=450.0, help="for everything")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "engines")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        comparison = measure(options.one, options.seconds, options.budget_seconds)
        options.out.write_text(comparison.to_json())
        print(summary(comparison), flush=True)
        return 0
    workloads = chosen(parser, options.workloads, list(WORKLOADS))
    return 1 if run_all(workloads, options.out, options.seconds, options.budget_seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
