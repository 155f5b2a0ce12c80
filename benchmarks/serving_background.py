"""The p99 of a service while its sizes are captured beside its calls, and eager's."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onelaunch as ol
from benchmarks.serving_engines import (
    VOCABULARY,
    Engine,
    Scale,
    answers,
    collated,
    service_model,
    settle,
)
from benchmarks.serving_load import Outcome, load, save_work
from benchmarks.serving_rates import first_come, served

SHARE = 0.3
"""The share of the time that eager is busy with the requests."""


def beside(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Serve requests of one row, each of its own length, one after the other: eagerly, and while
    each length is captured. Another callable is captured before: the library is loaded."""
    model = service_model(scale, device)
    dice = np.random.default_rng(0)
    requests = [dice.integers(1, VOCABULARY, (1, n)) for n in range(1, scale.sizes + 1)]
    expected = answers(model, requests, device)
    rate = min(SHARE / seconds_of(model, requests, device), scale.first_rate)
    capture_another(device)
    fast: Any = ol.graph(model, capture="background", warmup=1, max_recordings=scale.sizes)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.npz"
        save_work(work, requests, expected)

        def run(name: str, engine: Engine, seconds: float) -> Outcome:
            path, loop = Path(folder) / name, first_come(engine, 1, device)
            return served(path, loop, lambda: load(path, work, rate, seconds, 1))

        eager = run("eager", model, scale.beside_seconds / 4)
        with noting_the_end(fast, scale.sizes) as ends:
            during = run("onelaunch", fast, scale.beside_seconds)
        until = ends[0] if ends else float("inf")
        stats = fast.stats()
    return {
        "sizes": scale.sizes,
        "captured": stats.captures,
        "rate": rate,
        "seconds until captured": until - min(due for due, _ in during.times) if ends else None,
        "eager": figures(eager),
        "while captured": figures(during, until),
        "eager reasons": stats.eager_reasons,
    }


def seconds_of(model: Engine, requests: list[Any], device: torch.device) -> float:
    """Seconds of an eager request, with the copies to and from the device."""
    started = time.perf_counter()
    for tokens in requests:
        model(*collated([tokens], device)).float().cpu()
    settle(device)
    return (time.perf_counter() - started) / len(requests)


def capture_another(device: torch.device) -> None:
    """Capture another callable in the background."""
    fast: Any = ol.graph(torch.sin, capture="background")
    deadline = time.perf_counter() + 30
    while not fast.stats().replays and time.perf_counter() < deadline:
        fast(torch.zeros(8, device=device))
        time.sleep(0.01)


@contextlib.contextmanager
def noting_the_end(fast: Any, captures: int) -> Any:
    """Note when so many captures are made: a list that gets one time."""
    ends: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            if fast.stats().captures >= captures:
                ends.append(time.time())
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ends
    finally:
        stop.set()
        thread.join()


def figures(outcome: Outcome, until: float = float("inf")) -> dict[str, Any]:
    found = [ms for due, ms in outcome.times if due <= until]
    return {
        "requests": len(found),
        "p50 ms": outcome.quantile(0.5, until),
        "p99 ms": outcome.quantile(0.99, until),
        "most ms": max(found, default=float("inf")),
        "bad": outcome.bad,
    }
