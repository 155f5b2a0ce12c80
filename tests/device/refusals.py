"""What a bare capture takes and what it refuses: small programs, run on a device or on the tape.

    python tests/device/refusals.py --driver cuda --out tests/device/refusals_cuda.json
    python tests/device/refusals.py --driver tape

The CUDA column is what `torch.cuda.graph` does with each of `refusal_programs`, nothing of
onelaunch in between. `test_refusals.py` holds the tape to it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / "src"), str(root)]

from tests.device.refusal_programs import PROGRAMS, Env


@dataclass(frozen=True)
class Verdict:
    """What became of one program."""

    captured: bool
    error: str = ""
    message: str = ""
    eager: bool = True  # it runs without a capture

    @staticmethod
    def of(error: BaseException, eager: bool = True) -> Verdict:
        lines = str(error).strip().splitlines() or [""]
        return Verdict(False, type(error).__name__, lines[0][:200], eager)


def on_cuda(name: str) -> Verdict:
    """Capture one program by hand, after a warm-up on a side stream."""
    env = Env.on("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            PROGRAMS[name](env)
        torch.cuda.synchronize()
    except Exception as raised:  # noqa: BLE001  (it becomes the verdict)
        return Verdict.of(raised, eager=False)
    env = Env.on("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    error: BaseException | None = None
    try:
        with torch.cuda.graph(graph):
            try:
                PROGRAMS[name](env)
            except Exception as raised:
                error = raised
                raise
    except Exception as raised:  # noqa: BLE001  (it becomes the verdict)
        # What the program itself met says more than what the end of the capture then reports.
        return Verdict.of(error or raised)
    return Verdict(True)


def on_tape(name: str) -> Verdict:
    """Capture one program with the tape's driver, after running it once."""
    from onelaunch.driver.select import driver_of

    try:
        PROGRAMS[name](Env.on("tape"))
    except Exception as raised:  # noqa: BLE001  (it becomes the verdict)
        return Verdict.of(raised, eager=False)
    env = Env.on("tape")
    driver = driver_of(env.device.type)
    try:
        driver.capture(lambda _: PROGRAMS[name](env), driver.new_pool(env.device))
    except Exception as error:  # noqa: BLE001  (it becomes the verdict)
        return Verdict.of(error)
    return Verdict(True)


def is_healthy() -> bool:
    """Whether CUDA still works after a refused capture: memory, random numbers, a capture."""
    try:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        x = torch.rand(4, device="cuda")
        with torch.cuda.graph(graph):
            y = x + torch.rand(4, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
        return bool(torch.isfinite(y).all())
    except RuntimeError:
        return False


def work(driver: str, names: list[str]) -> None:
    """Run programs until one breaks the process; a line of JSON for each."""
    for name in names:
        verdict = on_cuda(name) if driver == "cuda" else on_tape(name)
        healthy = driver != "cuda" or is_healthy()
        print("row", json.dumps([name, verdict.__dict__, healthy]), flush=True)
        if not healthy:
            return


def column(driver: str) -> dict[str, dict[str, Any]]:
    """Every program's verdict, in a few processes at once."""
    names, jobs = list(PROGRAMS), min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(lambda k: part(driver, names[k::jobs]), range(jobs))
    rows = {name: row for some in parts for name, row in some.items()}
    return {name: rows[name] for name in names}


def part(driver: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Verdicts of some programs; a process that one of them broke is replaced for the next."""
    rows: dict[str, dict[str, Any]] = {}
    while left := [n for n in names if n not in rows]:
        command = [sys.executable, __file__, "--driver", driver, "--work", *left]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        before = len(rows)
        for line in done.stdout.splitlines():
            if line.startswith("row "):
                name, verdict, healthy = json.loads(line[4:])
                rows[name] = verdict | ({} if healthy else {"breaks_process": True})
        if len(rows) == before:
            # It took the process down with it, in a capture or before: for a person to look at.
            last = (done.stderr.strip().splitlines() or [""])[-1][:200]
            died = Verdict(False, f"exit {done.returncode}", last, eager=False)
            rows[left[0]] = died.__dict__ | {"breaks_process": True}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--driver", choices=["cuda", "tape"], required=True)
    parser.add_argument("--out", type=Path, help="a JSON file; standard output by default")
    parser.add_argument("--work", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.driver, options.work)
    on = platform.processor() or platform.machine()
    cuda = options.driver == "cuda"
    if cuda and not torch.cuda.is_available():
        sys.exit("no GPU here, so there is no CUDA column to make")
    table = {
        "device": torch.cuda.get_device_name() if cuda else on,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "rows": column(options.driver),
    }
    text = json.dumps(table, indent=1) + "\n"
    return options.out.write_text(text) and None if options.out else print(text, end="")


if __name__ == "__main__":
    main()
