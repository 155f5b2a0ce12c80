"""The pieces that ``on_refusal="split"`` makes of a callable that cannot be captured whole."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.api import graph
from onelaunch.bench.workload import Workload
from onelaunch.doctor.run import run_backward
from onelaunch.errors import GraphWarning, let_go

_TIMED = 5
_CALLS = 16
"""Calls at most until every piece is launched; each level of modules takes some."""


@dataclass(frozen=True)
class Pieces:
    """A callable in pieces.

    Attributes:
        launches: the launches of a call.
        host_us: the host time of a call on this machine in microseconds, with its waits; without
            its backward.
        outside: the lines that run as they are, between the pieces.
    """

    launches: int
    host_us: float
    outside: tuple[str, ...]


def pieces(workload: Workload, backward: bool) -> Pieces | None:
    """Graph a workload in pieces, and call it until all are launched; None if they never are.

    In a thread of its own: where Dynamo fails half way, it leaves modes of its thread behind.
    """
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        warnings.simplefilter("ignore", GraphWarning)
        return thread.submit(_pieces, workload, backward, *modes).result()


def _pieces(workload: Workload, backward: bool, grad: bool, inference: bool) -> Pieces | None:
    fast: Any = graph(workload.fn, on_refusal="split")
    try:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), _quiet():
            for _ in range(_CALLS):
                workload.cut_history()
                result = fast(*workload.args, **workload.kwargs)
                if backward:
                    run_backward(result)
                del result
                if fast.stats().split_launches:
                    break
            seconds = [_timed(fast, workload) for _ in range(_TIMED)]
    except Exception as error:  # noqa: BLE001  Dynamo's own; the callable itself has run in eager
        let_go(error)
        return None
    stats = fast.stats()
    if not stats.split_launches:
        return None
    lines = dict.fromkeys(part.where or part.module for part in stats.split)
    return Pieces(stats.split_launches, round(1e6 * min(seconds), 1), tuple(lines))


@contextmanager
def _quiet() -> Generator[None]:
    """Keep Dynamo from logging where it breaks a graph: that is what is asked of it."""
    logger = logging.getLogger("torch._dynamo")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _timed(fast: Any, workload: Workload) -> float:
    start = time.perf_counter()
    fast(*workload.args, **workload.kwargs)
    return time.perf_counter() - start
