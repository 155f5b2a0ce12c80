"""Clients of an embedding service, in processes without torch, over a local socket.

    python -m benchmarks.serving_load SOCKET WORK --rate 500 --seconds 1 --seed 0

Requests come at random (Poisson) whether or not earlier ones are answered. A time runs from when
a request was due to when its answer is there. `WORK` has the requests and eager's answers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
ASKED = struct.Struct("<IHH")
"""Number of the request, rows, tokens of each row; then the tokens."""
ANSWERED = struct.Struct("<II")
"""Number of the request, rows; then the vectors. No rows: the service is full."""
TOLERANCE = 5e-2
"""The distance of a unit vector from eager's, in bfloat16."""
PATIENCE = 2.0
"""The seconds that a client waits for the last answers."""


@dataclass(frozen=True)
class Outcome:
    """The answers to some requests.

    Attributes:
        times: of each answered request: when it was due, by `time.time`, and its milliseconds.
        refused: the requests that came while the service was full.
        lost: those without an answer.
        wrong: those with another answer than eager's.
    """

    times: list[tuple[float, float]]
    refused: int
    lost: int
    wrong: int

    @property
    def bad(self) -> int:
        return self.refused + self.lost + self.wrong

    def quantile(self, share: float, until: float = float("inf")) -> float:
        """Return milliseconds of the requests that were due until then; infinity for none."""
        found = sorted(ms for due, ms in self.times if due <= until)
        return found[min(len(found) - 1, int(share * len(found)))] if found else float("inf")


def load(path: Path, work: Path, rate: float, seconds: float, clients: int) -> Outcome:
    """Load a service from processes of their own, `rate` requests a second in all."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.serving_load", str(path), str(work)]
    command += ["--rate", str(rate / clients), "--seconds", str(seconds), "--seed"]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(seed)], cwd=ROOT, env=env, stdout=pipe, text=True)
        for seed in range(clients)
    ]
    found = [json.loads(process.communicate()[0]) for process in processes]
    return Outcome(
        [(due, ms) for each in found for due, ms in each["times"]],
        *(sum(each[key] for each in found) for key in ("refused", "lost", "wrong")),
    )


def save_work(work: Path, requests: list[Any], answers: list[Any]) -> None:
    """Write requests, arrays of tokens in rows, and their answers, a vector for each row."""
    flat = {f"tokens{i}": request.astype(np.int32) for i, request in enumerate(requests)}
    np.savez(work, **flat, **{f"answer{i}": answer for i, answer in enumerate(answers)})


class Client:
    """One connection, which sends requests when they are due and takes answers as they come."""

    def __init__(self, path: str, work: str, rate: float, seconds: float, seed: int) -> None:
        with np.load(work) as data:
            count = len(data.files) // 2
            asked = [data[f"tokens{i}"] for i in range(count)]
            self._expected = [data[f"answer{i}"] for i in range(count)]
        self._bodies = [(*tokens.shape, tokens.tobytes()) for tokens in asked]
        dice, at = random.Random(seed), 0.0
        self._due: list[float] = []
        while (at := at + dice.expovariate(rate)) < seconds:
            self._due.append(at)
        self._picks = [dice.randrange(count) for _ in self._due]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        self._connection.setblocking(False)
        self._came: dict[int, tuple[float, bytes]] = {}
        self._width = 4 * self._expected[0].shape[1]

    def run(self) -> dict[str, Any]:
        """Send all, and return what came of them."""
        gc.disable()
        started, offset = time.perf_counter(), time.time() - time.perf_counter()
        out, into, sent = bytearray(), bytearray(), 0
        end = (self._due[-1] if self._due else 0) + PATIENCE
        while len(self._came) < len(self._due) and (now := time.perf_counter() - started) < end:
            while sent < len(self._due) and self._due[sent] <= now:
                rows, length, body = self._bodies[self._picks[sent]]
                out += ASKED.pack(sent, rows, length) + body
                sent += 1
            wait = self._due[sent] - now if sent < len(self._due) else 0.05
            readable, writable, _ = select.select(
                [self._connection], [self._connection] if out else [], [], max(0.0, wait)
            )
            if writable:
                del out[: self._connection.send(out)]
            if readable:
                received = self._connection.recv(1 << 20)
                if not received:
                    break
                into += received
                self._take(into, time.perf_counter() - started)
        return self._outcome(started + offset)

    def _take(self, into: bytearray, now: float) -> None:
        """Take the whole answers from what was received."""
        at = 0
        while len(into) - at >= ANSWERED.size:
            number, rows = ANSWERED.unpack_from(into, at)
            end = at + ANSWERED.size + rows * self._width
            if len(into) < end:
                break
            self._came[number] = now, bytes(into[at + ANSWERED.size : end])
            at = end
        del into[:at]

    def _outcome(self, started: float) -> dict[str, Any]:
        times: list[tuple[float, float]] = []
        refused = wrong = 0
        for number, (at, body) in self._came.items():
            expected = self._expected[self._picks[number]]
            if not body:
                refused += 1
                continue
            found = np.frombuffer(body, np.float32).reshape(-1, expected.shape[1])
            if found.shape != expected.shape or not np.all(
                np.linalg.norm(found - expected, axis=1) <= TOLERANCE
            ):
                wrong += 1
            due = self._due[number]
            times.append((started + due, (at - due) * 1e3))
        lost = len(self._due) - len(self._came)
        return {"times": times, "refused": refused, "lost": lost, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("work")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    client = Client(options.path, options.work, options.rate, options.seconds, options.seed)
    print(json.dumps(client.run()))


if __name__ == "__main__":
    main()
