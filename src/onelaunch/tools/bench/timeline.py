"""The timeline of one call: what ran on the host and on the GPU, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from onelaunch.tools.bench.trace import TracedCall, TraceEvent, nested, record
from onelaunch.tools.report.document import Lane, Span, Timeline

LONG_US = 100_000.0
MOST = 2000  # spans of a lane: more are neither seen nor loaded by a page


def record_timeline(
    engine: str, title: str, call: Callable[[], object], device: torch.device, about_us: float = 0
) -> Timeline | None:
    """Trace some calls of an engine, and lay out the one that took the median time; None where
    another profiler is at work.

    Call it after all timing: on CUDA the profiler stays attached and slows launches down.

    Args:
        call: the engine, warm: it is called six times, and where that takes long four times.
        device: the device of the call; on a CPU there is the host alone.
        about_us: how long a call takes, about.
    """
    calls = record(call, device, 3 if about_us > LONG_US else 5)
    if not calls:
        return None
    return timeline(engine, title, sorted(calls, key=lambda one: one.stop_us)[len(calls) // 2])


def timeline(engine: str, title: str, call: TracedCall) -> Timeline:
    """Lay out a traced call: the host's events by depth, the GPU's work, and no more than `MOST`
    spans of either."""
    host = [_span(event, "host", depth) for event, depth, _ in nested(call.events)]
    gpu = [_span(event, "gpu") for event in call.events if event.on_gpu]
    shown = [*_fewer(host), *_fewer(gpu)]
    left_out = len(host) + len(gpu) - len(shown)
    return Timeline(engine, title, call.stop_us, tuple(shown), left_out)


def _span(event: TraceEvent, lane: Lane, depth: int = 0) -> Span:
    return Span(event.name, lane, event.start_us, event.duration_us, depth)


def _fewer(spans: Iterable[Span]) -> list[Span]:
    """Leave out the innermost spans, level by level, until few enough are left; then the last."""
    kept = sorted(spans, key=lambda span: (span.start_us, span.depth))
    deepest = max((span.depth for span in kept), default=0)
    while len(kept) > MOST and deepest > 0:
        kept = [span for span in kept if span.depth < deepest]
        deepest -= 1
    return kept[:MOST]
