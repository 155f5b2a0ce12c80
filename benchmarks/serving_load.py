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
PATIENCE = 10.0
"""The seconds that a client waits for the last answers."""


@dataclass(frozen=True)
class Outcome:
    """The answers to some requests.

    Attributes:
        times: of each answered request: when it was due, by `time.time`, and its milliseconds.
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


def drive(path: str, work: str, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Send requests when they are due, take answers as they come, and return what came of them."""
    with np.load(work) as data:
        count = len(data.files) // 2
        asked = [data[f"tokens{i}"] for i in range(count)]
        expected = [data[f"answer{i}"] for i in range(count)]
    bodies = [(*tokens.shape, tokens.tobytes()) for tokens in asked]
    dice, at, due = random.Random(seed), 0.0, list[float]()
    while (at := at + dice.expovariate(rate)) < seconds:
        due.append(at)
    picks = [dice.randrange(count) for _ in due]
    came: dict[int, tuple[float, bytes]] = {}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.setblocking(False)
    gc.disable()
    started, epoch = time.perf_counter(), time.time()
    out, into, sent = bytearray(), bytearray(), 0
    end = seconds + PATIENCE
    while len(came) < len(due) and (now := time.perf_counter() - started) < end:
        while sent < len(due) and due[sent] <= now:
            rows, length, body = bodies[picks[sent]]
            out += ASKED.pack(sent, rows, length) + body
            sent += 1
        wait = max(0.0, due[sent] - now) if sent < len(due) else 0.05
        readable, writable, _ = select.select([connection], [connection] if out else [], [], wait)
        if writable:
            del out[: connection.send(out)]
        if readable:
            into += connection.recv(1 << 20)
            now = time.perf_counter() - started
            for number, answer in taken(into, 4 * expected[0].shape[1]):
                came[number] = now, answer
    times = [(epoch + due[n], (at - due[n]) * 1e3) for n, (at, answer) in came.items() if answer]
    answered = [(expected[picks[n]], answer) for n, (_, answer) in came.items() if answer]
    wrong = sum(not right(answer, vectors) for vectors, answer in answered)
    refused, lost = len(came) - len(answered), len(due) - len(came)
    return {"times": times, "refused": refused, "lost": lost, "wrong": wrong}


def taken(into: bytearray, width: int) -> list[tuple[int, bytes]]:
    """Take the whole answers from what was received: number, and vectors of `width` bytes."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while len(into) - at >= ANSWERED.size:
        number, rows = ANSWERED.unpack_from(into, at)
        start, end = at + ANSWERED.size, at + ANSWERED.size + rows * width
        if len(into) < end:
            break
        found.append((number, bytes(into[start:end])))
        at = end
    del into[:at]
    return found


def right(answer: bytes, expected: Any) -> bool:
    found = np.frombuffer(answer, np.float32).reshape(-1, expected.shape[1])
    if found.shape != expected.shape:
        return False
    return bool(np.all(np.linalg.norm(found - expected, axis=1) <= TOLERANCE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("work")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = options.path, options.work, options.rate, options.seconds, options.seed
    print(json.dumps(drive(*given)))


if __name__ == "__main__":
    main()
