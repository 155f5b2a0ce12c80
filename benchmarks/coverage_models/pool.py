"""Worker processes that share out the cases; a worker that dies or hangs is replaced."""

from __future__ import annotations

import functools
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engines import COMPILED

ROOT = Path(__file__).parents[2]
START_SECONDS = 180.0
STEP_SECONDS = {"build": 120.0, "doctor": 360.0, **dict.fromkeys(COMPILED, 240.0)}
"""For a step to come to its end, by its name; then its process is ended."""
OTHER_SECONDS = 120.0
TIME_IS_UP = "time is up"
TASKS_OF_A_WORKER = 60
"""Then another is started: what libraries keep of models adds up."""


@dataclass
class Case:
    """One model in one mode, and what is known of it.

    Attributes:
        engines: which are to run.
        rows: what became of each.
        why: why it was not built.
        ended: all that was to be run has been.
    """

    name: str
    mode: str
    engines: Sequence[str]
    about: str = ""
    why: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: bool = False

    @property
    def left(self) -> list[str]:
        """The engines that have no row yet."""
        return [name for name in self.engines if name not in self.rows]


class _Gone(Exception):
    """A worker that ended, or was ended; the message says how."""


class _Worker:
    """A process and its reports."""

    def __init__(self, device: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.coverage_models.worker", device]
        path = os.pathsep.join([str(ROOT), *sys.path])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the time to compile is measured
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=self._errors
        )
        self._told = b""
        self.tasks = 0
        self.ends = False

    def give(self, task: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(task).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise _Gone(self._end()) from error

    def hear(self, deadline: float) -> dict[str, Any]:
        """The next report.

        Raises:
            _Gone: it ended, or said nothing in time.
        """
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._told:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise _Gone(TIME_IS_UP)
                more = os.read(self._child.stdout.fileno(), 1 << 16)
                if not more:
                    raise _Gone(self._end())
                self._told += more
        line, _, self._told = self._told.partition(b"\n")
        said = json.loads(line)
        self.ends |= said.get("ends", False)
        return said

    def _end(self) -> str:
        code = self._child.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read()[-4000:].splitlines() if line.strip()]
        return f"exit code {code}: {' | '.join(lines[-3:])[-400:]}"

    @property
    def usable(self) -> bool:
        """Whether it takes another task."""
        return not self.ends and self.tasks < TASKS_OF_A_WORKER

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._errors):
            assert pipe is not None
            pipe.close()


def run(
    cases: Sequence[Case],
    device: str,
    workers: int,
    seconds: float,
    done: Callable[[Case], None],
) -> None:
    """Run the cases, as far as the time goes.

    Args:
        cases: their rows are filled in; one with `ended` False was not run to its end.
        device: cpu, tape or cuda.
        workers: processes at the same time.
        seconds: then what is under way is ended.
        done: called after each case, from any thread.
    """
    deadline = time.monotonic() + seconds
    start = functools.partial(_Worker, device, max(1, (os.cpu_count() or 1) // workers))
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)

    def work() -> None:
        worker: _Worker | None = None
        try:
            while time.monotonic() < deadline:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                worker = _finish(case, worker, start, deadline)
                done(case)
        finally:
            if worker is not None:
                worker.end()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _finish(
    case: Case, worker: _Worker | None, start: Callable[[], _Worker], deadline: float
) -> _Worker | None:
    """Run a case to its end, in as many processes as it takes."""
    for _ in range(len(case.engines) + 2):  # a death costs an engine, or the build
        if case.ended or time.monotonic() > deadline:
            break
        step = "start"
        try:
            if worker is None or not worker.usable:
                if worker is not None:
                    worker.end()
                worker = start()
                worker.hear(min(deadline, time.monotonic() + START_SECONDS))
            worker.tasks += 1
            worker.give({"name": case.name, "mode": case.mode, "engines": case.left})
            while step != "done":
                limit = STEP_SECONDS.get(step, OTHER_SECONDS)
                said = worker.hear(min(deadline, time.monotonic() + limit))
                step = _noted(case, said, step)
            case.ended = bool(case.why) or not case.left
        except _Gone as gone:
            if worker is not None:
                worker.end()
                worker = None
            if time.monotonic() < deadline:
                _died(case, step, str(gone))
    return worker


def _noted(case: Case, said: dict[str, Any], step: str) -> str:
    """Note a report; the step that it begins."""
    if "done" in said:
        return "done"
    case.about = said.get("about", case.about)
    if "not_built" in said:
        case.why = said["not_built"] or "no reason"
    if "engine" in said:
        case.rows[said["engine"]] = said["row"]
        return "between"
    return said.get("begun", step)


def _died(case: Case, step: str, how: str) -> None:
    if step in case.left:
        case.rows[step] = {"verdict": "crashed", "text": how}
    elif step in ("between", "done"):
        return  # it ended after a row, as one does that finds its device in disorder
    else:
        case.why = f"died in {step}: {how}"
    case.ended = bool(case.why) or not case.left
