"""``policy="measure"``: a recording on trial against the callable itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from onelaunch.replay.call_path import MISS
from onelaunch.runtime.table import Entry

_TRIALS = 5
"""Calls of either way that are timed before it is decided."""


def timed(entry: Entry, eager: Callable[..., Any]) -> Callable[..., Any]:
    """The call path of a recording on trial: times the caller's own first calls, replayed and then
    run eagerly, and keeps the faster way.

    Args:
        eager: the way that is kept if the recording loses: its checks, and the callable itself.
            No warm-up is timed in its place: that one is watched, which may cost more than it does.
    """
    call, captured, info = entry.call, entry.captured, entry.info
    itself = weakref.ref(entry)  # which refers to this
    replays: list[float] = []
    eagers: list[float] = []

    def timed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        way, spans = (call, replays) if len(replays) < _TRIALS else (eager, eagers)
        captured.driver.synchronize(captured.device)
        started = perf_counter()
        result = way(args, kwargs)
        if result is MISS:
            return MISS
        captured.driver.synchronize(captured.device)
        spans.append((perf_counter() - started) * 1e6)
        if len(eagers) >= _TRIALS:
            info.replay_us, info.eager_us = median(replays), median(eagers)
            kept = itself()
            if kept is not None:
                kept.call = eager if info.eager_us < info.replay_us else call
        return result

    return timed
