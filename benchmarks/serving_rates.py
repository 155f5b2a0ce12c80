"""The rate of requests that an engine serves within a limit of the p99, over a local socket.

One thread takes the requests that have come, runs the first of them as one batch, and answers.
The batcher's engines put each request into the batcher instead, its length padded to a bucket.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

import onelaunch as ol
from benchmarks.serving_engines import (
    ENGINES,
    Engine,
    Made,
    Scale,
    answers,
    bucket_inputs,
    bucket_of,
    collated,
    mixed_requests,
    service_model,
    visit,
)
from benchmarks.serving_load import ANSWERED, ASKED, Outcome, load, save_work
from onelaunch.errors import GraphError

T = TypeVar("T")
MOST_WAITING = 1024
MAX_WAIT_MS = 2.0
MOST_ANSWERS = 64


class Request(NamedTuple):
    """A request, and the connection that waits for its answer."""

    connection: socket.socket
    number: int
    tokens: Any


class Front:
    """The connections of a service: what has come, and the way back."""

    def __init__(self, path: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ, bytearray())

    def take(self, seconds: float) -> list[Request]:
        """Return the requests that have come; wait so long for the first."""
        found: list[Request] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._selector.register(
                    self._listener.accept()[0], selectors.EVENT_READ, bytearray()
                )
                continue
            connection: Any = key.fileobj
            received = b""
            with contextlib.suppress(OSError):  # the client is gone
                received = connection.recv(1 << 20)
            if not received:
                self._selector.unregister(connection)
                connection.close()
                continue
            key.data.extend(received)
            found += self._parsed(connection, key.data)
        return found

    def _parsed(self, connection: socket.socket, data: bytearray) -> list[Request]:
        found: list[Request] = []
        at = 0
        while len(data) - at >= ASKED.size:
            number, rows, length = ASKED.unpack_from(data, at)
            end = at + ASKED.size + 4 * rows * length
            if len(data) < end:
                break
            tokens = np.frombuffer(bytes(data[at + ASKED.size : end]), np.int32)
            found.append(Request(connection, number, tokens.reshape(rows, length)))
            at = end
        del data[:at]
        return found

    def answer(self, request: Request, vectors: Any) -> None:
        """Send the vectors of a request; None if it is refused."""
        body = b"" if vectors is None else vectors.tobytes()
        head = ANSWERED.pack(request.number, 0 if vectors is None else len(vectors))
        with contextlib.suppress(OSError):  # the client is gone
            request.connection.sendall(head + body)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            connection: Any = key.fileobj
            connection.close()
        self._selector.close()


Loop = Callable[[Front, threading.Event], None]


def first_come(engine: Engine, most_rows: int, device: torch.device) -> Loop:
    """Batches of what waits, in its order; most often they are full under load."""

    def serve(front: Front, stop: threading.Event) -> None:
        waiting = deque[Request]()
        while not stop.is_set():
            waiting.extend(front.take(0 if waiting else 0.02))
            while len(waiting) > MOST_WAITING:
                front.answer(waiting.pop(), None)
            if not waiting:
                continue
            batch = [waiting.popleft()]
            rows = len(batch[0].tokens)
            while waiting and rows + len(waiting[0].tokens) <= most_rows:
                batch.append(waiting.popleft())
                rows += len(batch[-1].tokens)
            vectors = engine(*collated([r.tokens for r in batch], device)).float().cpu()
            parts = vectors.split([len(r.tokens) for r in batch])
            for request, part in zip(batch, parts, strict=True):
                front.answer(request, part.numpy())

    return serve


def batched(batcher: ol.Batcher, scale: Scale, device: torch.device) -> Loop:
    """Each request is put into the batcher, and a thread answers those that are done."""

    def serve(front: Front, stop: threading.Event) -> None:
        done = queue.SimpleQueue[tuple[Request, Any] | None]()
        answering = threading.Thread(target=_answer_all, args=(front, done), daemon=True)
        answering.start()
        while not stop.is_set():
            for request in front.take(0.02):
                _, length = bucket_of(scale, 1, request.tokens.shape[1])
                try:
                    future = batcher.put(*collated([request.tokens], device, length))
                except GraphError:  # it is full
                    front.answer(request, None)
                    continue
                future.add_done_callback(lambda f, r=request: done.put((r, f)))
        done.put(None)
        answering.join()

    return serve


def _answer_all(front: Front, done: queue.SimpleQueue[tuple[Request, Any] | None]) -> None:
    """Answer all that is done in one copy to the host, then what is done by then."""
    open_ = True
    while open_ and (first := done.get()) is not None:
        batch = [first]
        while open_ and not done.empty() and len(batch) < MOST_ANSWERS:
            following = done.get()
            if following is None:
                open_ = False
            else:
                batch.append(following)
        vectors = torch.cat([future.result() for _, future in batch]).float().cpu()
        parts = vectors.split([len(request.tokens) for request, _ in batch])
        for (request, _), part in zip(batch, parts, strict=True):
            front.answer(request, part.numpy())


def served(path: Path, loop: Loop, work: Callable[[], T]) -> T:
    """Serve at a socket while a thread works, and return what that made. Graphs of Inductor belong
    to the thread that made them, so this one serves."""
    front, stop = Front(path), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(work)
        made.add_done_callback(lambda _: stop.set())
        loop(front, stop)
    front.close()
    return made.result()


# The search.


def highest_rate(scale: Scale, measure: Callable[[float], Outcome]) -> dict[str, Any]:
    """Double the rate until the p99 is above the limit, then halve the gap some times."""
    runs: list[dict[str, Any]] = []

    def holds(rate: float) -> bool:
        outcome = measure(rate)
        p50, p99 = outcome.quantile(0.5), outcome.quantile(0.99)
        counts = {key: getattr(outcome, key) for key in ("refused", "lost", "wrong")}
        met = not outcome.bad and p99 <= scale.limit_ms
        runs.append({"rate": rate, "p50 ms": p50, "p99 ms": p99, **counts, "met": met})
        return met

    low, high = 0.0, scale.first_rate
    while high <= 64 * scale.first_rate and holds(high):
        low, high = high, 2 * high
    while not low and high > scale.first_rate / 16:  # the first was too high
        if holds(high / 2):
            low = high / 2
        else:
            high /= 2
    for _ in range(scale.halvings if low else 0):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    best = max((run for run in runs if run["met"]), key=lambda run: run["rate"], default=None)
    wrong = sum(run["wrong"] for run in runs)
    return {**(best or {"rate": 0.0}), "wrong": wrong, "runs": runs}


def build(name: str, scale: Scale, device: torch.device, seconds: float) -> tuple[Made, float]:
    """Make an engine, and call all buckets; how long it took."""
    started = time.perf_counter()
    made = ENGINES[name](service_model(scale, device), scale)
    visit(name, made, scale, device, seconds)
    return made, time.perf_counter() - started


def rate_of(name: str, made: Made, scale: Scale, device: torch.device) -> dict[str, Any]:
    """Find the rate of an engine that is built."""
    engine, fast = made
    before = None if fast is None else fast.stats()
    requests = mixed_requests(scale)
    expected = answers(service_model(scale, device), requests, device)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_work(folder / "work.npz", requests, expected)
        loop = first_come(engine, scale.rows[-1], device)
        if name.endswith("batcher"):
            batcher = fast.batcher(max_wait_ms=MAX_WAIT_MS, max_waiting=MOST_WAITING)
            batcher.measure(*next(bucket_inputs(scale, device)))
            stack.enter_context(batcher)
            loop = batched(batcher, scale, device)
        path = folder / "socket"

        def measure(rate: float) -> Outcome:
            return load(path, folder / "work.npz", rate, scale.run_seconds, scale.clients)

        def search() -> dict[str, Any]:
            measure(scale.first_rate)  # all is loaded
            return highest_rate(scale, measure)

        found = served(path, loop, search)
    if before is not None:
        stats = fast.stats()
        found |= {"padding": stats.padding, "captures": stats.captures}
        for what in ("replays", "warmup_calls", "eager_calls"):
            found[f"{what} under load"] = getattr(stats, what) - getattr(before, what)
    return found
