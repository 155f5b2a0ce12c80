"""An engine in a process of its own, where it may crash, hang or leak."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

from onelaunch.tools.bench.engines.engine import Engine
from onelaunch.tools.bench.entry import OnStage, why_missing
from onelaunch.tools.bench.reference import Reference
from onelaunch.tools.bench.rows import Row
from onelaunch.tools.bench.timers import Timer
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.report.result import made

PACKAGE = Path(__file__).parents[2]
WORKER = ("-m", "onelaunch.tools.bench.worker")
LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Isolated:
    """An engine that is to run in a process of its own, which loads the target itself.

    Attributes:
        engine: one of `ENGINES`.
        target: ``path.py:name`` or ``module:name``.
        limit: seconds that its process may take for building and checking, and for each round.
        python: the interpreter, of an environment that has torch and the engine's package; by
            default the one that runs.
        worker: the arguments that make it a worker.
    """

    engine: Engine
    target: str
    limit: float = LIMIT_SECONDS
    python: str | None = None
    worker: tuple[str, ...] = WORKER

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def title(self) -> str:
        return self.engine.title

    def missing(self, device: torch.device) -> str | None:
        return self.engine.missing(device) if self.python is None else None

    def code(self, workload: Workload) -> str:
        return self.engine.code(workload)

    def entry(self, workload: Workload) -> IsolatedEntry:
        row = Row(self.name, self.title, "interrupted", "stopped before its turn")
        return IsolatedEntry(self, workload, row)


@dataclass
class IsolatedEntry:
    """An engine in a comparison whose `EngineEntry` is in another process."""

    engine: Isolated
    workload: Workload
    found: Row
    running: bool = False
    settled: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _errors: IO[bytes] | None = None
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _asked: bool = False

    def prepare(self, reference: Reference, tell: OnStage) -> None:
        """Start the process, and let it build the engine and check it."""
        why = why_missing(self.engine.missing, self.workload.device)
        if why is not None:
            self.found = replace(self.found, status="missing", reason=why)
            return
        try:
            self._start()
        except OSError as error:
            self._fail(f"{self._python} does not start: {error.strerror}")
            return
        self.found = replace(self.found, reason="stopped while it was built or checked")
        tell("in a process of its own: building and checking")
        self._ask("prepare")

    def round(self, timers: tuple[Timer, ...]) -> None:
        """Let it take one round of samples, with the timers of its device."""
        self._ask("round")

    def finish(self) -> None:
        """Let it free what it holds, and end it."""
        try:
            if self.running:
                self._ask("finish")
        finally:
            self._end()

    def row(self) -> Row:
        """Return the findings as data."""
        return replace(self.found, code=self.engine.code(self.workload))

    @property
    def _python(self) -> str:
        return self.engine.python or sys.executable

    def _start(self) -> None:
        # A folder with this package alone: beside it may be packages of another environment.
        folder = self._held.enter_context(tempfile.TemporaryDirectory())
        if PACKAGE.is_dir():
            (Path(folder) / PACKAGE.name).symlink_to(PACKAGE)
        else:  # in a zip, from which Python imports, too
            folder = str(PACKAGE.parent)
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        shared = "shared" if self.workload.share_parameters else "copied"
        errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the folder
        self._errors = self._held.enter_context(errors)
        self._process = subprocess.Popen(
            [self._python, *self.engine.worker, self.engine.name, self.engine.target, shared],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends that one
        )

    def _ask(self, order: str) -> None:
        """Send an order, and take over what the answer says, if there is any."""
        if self._asked:  # an interrupt came before the last answer
            self._end()
            return
        self._asked = True
        answer = self._answer(order)
        self._asked = False
        if answer is None:
            return
        if "failed" in answer:
            self._fail(answer["failed"])
            return
        self.running, self.settled = answer["running"], answer["settled"]
        self.found = made(Row, answer["found"])
        if self.engine.python is not None:
            note = f"{answer['versions']} in {self.engine.python}"
            self.found = replace(self.found, notes=(*self.found.notes, note))
        if not self.running:
            self._end()

    def _answer(self, order: str) -> dict[str, Any] | None:
        """Wait for the answer to an order; None where the process ended, or was ended, instead."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{order}\n".encode())
            process.stdin.flush()
        line, end = b"", time.monotonic() + self.engine.limit
        while not line.endswith(b"\n"):
            left = max(0.0, end - time.monotonic()) if end < math.inf else None
            if not select.select([process.stdout], [], [], left)[0]:
                self._fail(f"took longer than {self.engine.limit:g} s")
                return None
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                self._fail(self._died(process))
                return None
            line += part
        return json.loads(line)

    def _died(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            killed = ", which a system that is out of memory sends" if name == "SIGKILL" else ""
            return f"its process died of {name}{killed}"
        assert self._errors is not None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with code {code}: {said[-1] if said else 'it said nothing'}"

    def _fail(self, why: str) -> None:
        self.found = replace(self.found, status="failed", reason=why)
        self._end()

    def _end(self) -> None:
        """End the process and those that it has started."""
        self.running = False
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self._held.close()
