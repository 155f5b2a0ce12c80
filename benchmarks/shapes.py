"""Sizes that vary, and memory that is bounded: `results/shapes.json`.

    python -m benchmarks.shapes                       # everything, under five minutes on an H200
    python -m benchmarks.shapes --parts memory,capture    # these anew, the others as they are

Each part has a process of its own, and so has each engine that serves the requests. Those build at
once, for compilers take a while; they are timed one after the other. Without a GPU everything is
small, and no target is judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes_recordings as recordings
from benchmarks import shapes_serving as serving
from benchmarks.processes import earlier, parsed
from onelaunch.tools.bench.environment import environment

ROOT = Path(__file__).parents[1]
PARTS = ("memory", "capture", "overhead", "requests", "churn")
GRACE_SECONDS = 60  # for a process to start, and to write what it has when its time is up


@dataclass(frozen=True)
class Target:
    """A figure, and what it is to reach."""

    what: str
    rule: str
    found: str
    met: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.found}, to reach {self.rule}: {'met' if self.met else 'MISSED'}"


def targets(parts: dict[str, Any]) -> list[Target]:
    """Those whose figures are there."""
    found: list[Target] = []
    for name, judge in JUDGES.items():
        if name in parts:
            found += judge(parts[name])
    return found


def judge_memory(part: dict[str, Any]) -> list[Target]:
    alone = part["alone"]["reserved bytes"]
    shared = part["one pool"]["reserved bytes"] / alone
    apart = part["separate pools"]["reserved bytes"] / alone
    what = f"memory of {len(part['sizes'])} sizes of a conv stack, of that of the largest"
    return [
        Target(what, "1.15x", f"{shared:.2f}x (in separate pools {apart:.2f}x)", shared <= 1.15)
    ]


def judge_capture(part: dict[str, Any]) -> list[Target]:
    every, sizes = part["all"], part["sizes"]
    share = every["reserved bytes"] / part["alone"]["reserved bytes"]
    driver = every["driver bytes"] / 2**20
    what = f"{sizes} sizes of a 12-layer encoder"
    seconds = every["seconds"]
    return [
        Target(f"{what}, captured", "10 s", f"{seconds:.1f} s", seconds <= 10),
        Target(
            f"{what}, memory, of that of the largest",
            "1.2x, and the driver's own",
            f"{share:.2f}x, and {driver:.0f} MiB of the driver's",
            share <= 1.2,
        ),
    ]


def judge_overhead(part: dict[str, Any]) -> list[Target]:
    made: list[Target] = []
    for inputs, limit in (("one input", 5), ("three inputs", 10)):
        more = part[f"padded, {inputs}"]["median_us"] - part[f"exact, {inputs}"]["median_us"]
        what = f"host time of a padded call above an exact one, {inputs}"
        made.append(Target(what, f"{limit} us", f"{more:.1f} us", more <= limit))
    return made


def judge_requests(part: dict[str, Any]) -> list[Target]:
    rows = {name: row for name, row in part["engines"].items() if row.get("status") == "ok"}
    others = [row for name, row in rows.items() if not name.startswith("onelaunch")]
    made: list[Target] = []
    for ours in (row for name, row in rows.items() if name.startswith("onelaunch")):
        title, late = ours["title"], ours["captures after the first pass"]
        what = f"{title}: captures after the first pass over the requests"
        made.append(Target(what, "0", str(late), late == 0))
        for what, unit, pick, best in (
            ("requests per second", "", lambda row: row["throughput"]["per second"], max),
            ("p50 of the latency", " us", lambda row: row["latency"]["p50 us"], min),
            ("p99 of the latency", " us", lambda row: row["latency"]["p99 us"], min),
        ):
            if not others:
                continue
            other = best(others, key=pick)
            limit, mine = pick(other), pick(ours)
            rule = f"{limit:,.0f}{unit} of {other['title']}"
            met = best(limit, mine) == mine
            made.append(Target(f"{title}: {what}", rule, f"{mine:,.0f}{unit}", met))
    return made


def judge_churn(part: dict[str, Any]) -> list[Target]:
    requests = f"{part['requests']:,} requests under a budget"
    growth = max(part["reserved growth bytes"], part["device growth bytes"])
    over = part["largest pool bytes"] > part["budget bytes"]
    evictions = part["evictions"]
    return [
        Target(f"{requests}, wrong results", "0", str(part["wrong"]), part["wrong"] == 0),
        Target(f"{requests}, growth", "0 bytes", f"{growth:,} bytes", growth <= 0),
        Target(
            f"{requests}, evictions",
            "more than 0, the budget kept",
            f"{evictions:,}{', and the budget was NOT kept' if over else ''}",
            evictions > 0 and not over,
        ),
    ]


JUDGES: dict[str, Any] = {
    "memory": judge_memory,
    "capture": judge_capture,
    "overhead": judge_overhead,
    "requests": judge_requests,
    "churn": judge_churn,
}


# One process for each part, and for each engine.


def one(name: str, seconds: float, tiny: bool) -> dict[str, Any]:
    """A part, or ``requests:ENGINE``, which says when it is built and waits to be told to go on."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    scale = recordings.SMALL if tiny else recordings.Scale()
    if tiny:
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\.")  # advice of compilers
    with torch.no_grad():
        if name == "memory":
            return recordings.memory(scale, device)
        if name == "capture":
            return recordings.capture(scale, device)
        if name == "overhead":
            return recordings.overhead(scale, device)
        if name == "churn":
            return recordings.churn(scale, device, seconds)
        load = serving.SMALL if tiny else serving.Load()
        session = serving.build(name.partition(":")[2], load, device, seconds)
        print("ready", flush=True)
        sys.stdin.readline()
        return serving.measure(session, device, seconds / 3)


class Child:
    """A process that measures one thing."""

    def __init__(self, name: str, folder: Path, seconds: float, tiny: bool, threads: int) -> None:
        self.name, self.seconds = name, seconds
        self._out = folder / f"{name.replace(':', '-')}.json"
        command = [sys.executable, "-m", "benchmarks.shapes", "--one", name, "--out", self._out]
        command += ["--seconds", str(seconds), *(["--small"] if tiny else [])]
        path = os.pathsep.join([str(ROOT), *sys.path])
        env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True
        )

    def ready(self, deadline: float) -> None:
        """Wait until it is built, or gone; end it if it takes longer, by `time.monotonic`."""
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        listener.join(max(0.0, deadline - time.monotonic()))
        if listener.is_alive():
            self._process.kill()
            listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        while self._process.stdout.readline() not in ("ready\n", ""):
            continue

    def result(self) -> dict[str, Any]:
        """Let it go on, and wait for what it found."""
        try:
            self._process.communicate("go\n", self.seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": "not done in time"}
        if not self._out.exists():
            return {"status": "failed", "reason": f"exit code {self._process.returncode}"}
        return json.loads(self._out.read_text())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(names: list[str], folder: Path, seconds: float, tiny: bool) -> dict[str, Any]:
    """All engines build at once; then each is timed alone."""
    threads = max(1, (os.cpu_count() or 1) // 2)
    here = [n for n in names if torch.cuda.is_available() or n not in serving.ON_GPUS_ONLY]
    children = {n: Child(f"requests:{n}", folder, seconds, tiny, threads) for n in here}
    rows: dict[str, Any] = {
        name: {"title": serving.TITLES[name], "status": "missing", "reason": "needs a GPU"}
        for name in names
    }
    try:
        deadline = time.monotonic() + 2 * seconds + GRACE_SECONDS
        for child in children.values():
            child.ready(deadline)
        for name, child in children.items():
            rows[name] = {"title": serving.TITLES[name], **child.result()}
            print(f"  {name}: {row_text(rows[name])}", flush=True)
    finally:
        for child in children.values():
            child.end()
    load = serving.SMALL if tiny else serving.Load()
    return {"load": asdict(load), "engines": rows}


def row_text(row: dict[str, Any]) -> str:
    if "throughput" not in row:
        return f"{row['status']}: {row['reason']}"
    latency, rate = row["latency"], row["throughput"]["per second"]
    return (
        f"{row['status']}, {rate:,.0f} requests per second, "
        f"p50 {latency['p50 us']:,.0f} us, p99 {latency['p99 us']:,.0f} us, "
        f"built in {row['build seconds']:.0f} s"
    )


def run_all(parts: list[str], engines: list[str], out: Path, seconds: float, tiny: bool) -> int:
    """Run and write after each part; returns how many gave no result."""
    results: dict[str, Any] = {"benchmark": "shapes", "environment": environment(), "small": tiny}
    results |= {"parts": earlier(out, results).get("parts", {}), "targets": []}
    missing = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in parts:
            started = time.monotonic()
            if name == "requests":
                found = serve(engines, Path(folder), seconds, tiny)
            else:
                child = Child(name, Path(folder), seconds, tiny, 1)
                try:
                    found = child.result()
                finally:
                    child.end()
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
            if "status" in found:
                missing += 1
                print(f"  no result: {found['reason']}", flush=True)
                continue
            results["parts"] = {
                known: found if known == name else results["parts"][known]
                for known in PARTS
                if known == name or known in results["parts"]
            }
            if not tiny:
                results["targets"] = [asdict(target) for target in targets(results["parts"])]
            out.write_text(json.dumps(results, indent=1) + "\n")
    for target in results["targets"]:
        print(Target(**target))
    if tiny:
        print("small: no target is judged")
    return missing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--engines", default=",".join(serving.ENGINES), help="names, with commas")
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="for the long run, and to build each engine"
    )
    parser.add_argument("--small", action="store_true", help="as on a machine without a GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "shapes", argv)
    tiny = options.small or not torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        options.out.write_text(json.dumps(one(options.one, options.seconds, tiny)))
        return 0
    parts, engines = options.parts.split(","), options.engines.split(",")
    known = {*PARTS, *serving.ENGINES}
    if unknown := [name for name in (*parts, *engines) if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}: {', '.join(PARTS)}")
    here = environment()
    print(f"{here['gpu'] or here['cpu']}, torch {here['torch']}", flush=True)
    return 1 if run_all(parts, engines, options.out, options.seconds, tiny) else 0


if __name__ == "__main__":
    sys.exit(main())
