"""Measurements in processes of their own: all build at once, then measure one after the other.

A child may build until `ready_by`. It prints a line ``ready`` when it is built, and measures when
it reads a line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from onelaunch.tools.bench.environment import environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GRACE_SECONDS = 30.0  # for a process to see that its time is up
AGAIN_SECONDS = 5.0  # an interrupt may come where it is lost, in a destructor say


def parsed(
    parser: argparse.ArgumentParser, name: str, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options of a benchmark, with ``--out``: by default the file in `RESULTS`, which holds the
    figures of a GPU, so that without one another file has to be named."""
    out = RESULTS / f"{name}.json"
    parser.add_argument(
        "--out",
        type=Path,
        help="the file of results; benchmarks/results/"
        f"{name}.json by default, but only where there is a GPU",
    )
    options = parser.parse_args(argv)
    if options.out is None and not torch.cuda.is_available():
        parser.error(f"no GPU: name a file with --out, benchmarks/results/{name}.json has a GPU's")
    options.out = options.out or out
    return options


def chosen(parser: argparse.ArgumentParser, given: str, known: Sequence[str]) -> list[str]:
    """The names that an option asks for, and a line on where they run."""
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{', '.join(unknown)}: is none of {', '.join(known)}")
    here = environment()
    print(f"{here['gpu'] or here['cpu']}, torch {here['torch']}", flush=True)
    return names


def write(out: Path, results: dict[str, Any]) -> None:
    """Write results to a file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def earlier(out: Path, now: dict[str, Any]) -> dict[str, Any]:
    """What a run before this left in the file, if it agrees in all of `now`: benchmark, hardware,
    software."""
    before = json.loads(out.read_text()) if out.exists() else {}
    return before if all(before.get(key) == value for key, value in now.items()) else {}


_READY_BY = "ONELAUNCH_READY_BY"


def ready_by() -> float:
    """When this process is to be built, by `time.time()`, which processes share."""
    return float(os.environ[_READY_BY])


def wait_for_turn() -> None:
    """Say that this process is built, and wait for its turn to measure."""
    print("ready", flush=True)
    sys.stdin.readline()


def no_silent_eager() -> None:
    """Have Dynamo raise where it would give up a function: the engines compile the same code, and
    one of them would run eagerly and not say so."""
    config: Any = importlib.import_module("torch._dynamo").config
    config.recompile_limit, config.fail_on_recompile_limit_hit = 64, True


@contextlib.contextmanager
def ends_by(deadline: float) -> Generator[None]:
    """Raise KeyboardInterrupt in what is still under way then, a tenth of a second from now at the
    earliest, and again until it ends."""
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, deadline - time.time()), AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _time_is_up(*_: object) -> None:
    raise KeyboardInterrupt


def run_and_write(
    module: str,
    names: Sequence[str],
    options: Sequence[str],
    out: Path,
    *,
    build_seconds: float,
    measure_seconds: float,
    put: Callable[[dict[str, Any], str, dict[str, Any]], None],
    summary: Callable[[str, dict[str, Any]], str],
) -> int:
    """Run together; after each, `out` holds its result beside those of before, of this run and of
    earlier ones.

    Args:
        put: puts what one wrote into the results.
        summary: of what one wrote, for the terminal.

    Returns:
        how many gave no result.
    """
    here: dict[str, Any] = {
        "benchmark": module.rpartition(".")[2],
        "environment": environment(),
    }
    results = earlier(out, here) or here
    started = time.monotonic()
    missing = 0

    def done(name: str, data: dict[str, Any] | None) -> None:
        nonlocal missing
        if data is None:
            missing += 1
            print(f"{name}: no result", flush=True)
            return
        results["environment"] = data.pop("environment")
        put(results, name, data)
        print(summary(name, data), flush=True)
        write(out, results)

    run_together(
        module,
        names,
        options,
        build_seconds=build_seconds,
        measure_seconds=measure_seconds,
        done=done,
    )
    print(f"{time.monotonic() - started:.0f} s in all; {out}")
    return missing


def run_together(
    module: str,
    names: Sequence[str],
    options: Sequence[str],
    *,
    build_seconds: float,
    measure_seconds: float,
    done: Callable[[str, dict[str, Any] | None], None],
    at_once: int | None = None,
) -> None:
    """Run ``python -m module --one NAME --out FILE`` for each name.

    Args:
        module: what is run.
        names: what the children are told to measure, in the order in which they do.
        options: further arguments for each of them.
        build_seconds: how long each may build, its start included; then it is ended if it is not
            ready.
        measure_seconds: how long each may measure.
        done: called after each with its name and what it wrote, None where that is nothing.
        at_once: how many build at the same time; default all.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.json" for name in names}
        children: dict[str, subprocess.Popen[str]] = {}

        def build(name: str) -> None:
            deadline = time.time() + build_seconds
            child = children[name] = _start(module, name, files[name], options, deadline)
            _until_ready(child, build_seconds + GRACE_SECONDS)

        try:
            with ThreadPoolExecutor(at_once or len(names)) as pool:
                list(pool.map(build, names))
            for name in names:
                _measured(children[name], measure_seconds + GRACE_SECONDS)
                there = files[name].exists()
                done(name, json.loads(files[name].read_text()) if there else None)
        finally:
            for child in children.values():
                child.kill()
                child.wait()


def _start(
    module: str, name: str, out: Path, options: Sequence[str], deadline: float
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, "--one", name, "--out", str(out), *options]
    path = os.pathsep.join([str(ROOT), *sys.path])
    # More than there are cores, all told: the small networks are soon compiled.
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    env = {**os.environ, "PYTHONPATH": path, _READY_BY: str(deadline)}
    env["TORCHINDUCTOR_COMPILE_THREADS"] = threads
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)


def _until_ready(child: subprocess.Popen[str], seconds: float) -> None:
    """Wait until it says so or is gone; end it if it takes longer."""
    listener = threading.Thread(target=_listen, args=(child,), daemon=True)
    listener.start()
    listener.join(seconds)
    if listener.is_alive():
        child.kill()
        listener.join()


def _measured(child: subprocess.Popen[str], seconds: float) -> None:
    """Tell it to measure, and wait until it is gone; processes that it began may be there still."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone
        child.stdin.write("go\n")
        child.stdin.close()
    threading.Thread(target=_read, args=(child,), daemon=True).start()
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()


def _read(child: subprocess.Popen[str]) -> None:
    """Read what it still says, so that it never waits for a reader."""
    assert child.stdout is not None
    with child.stdout as told:
        told.read()


def _listen(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    while child.stdout.readline() not in ("ready\n", ""):  # or it is gone
        continue
