"""``policy="measure"``: a recording on trial against the callable itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from onelaunch.callpath import MISS
from onelaunch.table import Entry, Signature

_TRIALS = 5
"""Replays that are timed before it is decided."""


def timed(entry: Entry, signature: Signature) -> Callable[..., Any]:
    """The call path of a recording on trial: times the caller's own first replays, then keeps the
    faster way."""
    call, captured, info = entry.call, entry.captured, entry.info
    itself = weakref.ref(entry)  # which refers to this
    spans: list[float] = []

    def timed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captured.driver.synchronize(captured.device)
        started = perf_counter()
        result = call(args, kwargs)
        if result is MISS:
            return MISS
        captured.driver.synchronize(captured.device)
        spans.append((perf_counter() - started) * 1e6)
        if len(spans) == _TRIALS:
            info.replay_us = median(spans)
            slower = info.eager_us is not None and info.eager_us < info.replay_us
            signature.eager = "measured" if slower else signature.eager
            kept = itself()
            if kept is not None:
                kept.call = _never if slower else call
        return result

    return timed


def _never(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call path of a recording that lost to eager."""
    return MISS
