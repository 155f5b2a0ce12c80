"""The timeline of one call: what ran on the host and on the GPU, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from onelaunch.bench.trace import Event, TracedCall, nested, record

Lane = Literal["host", "gpu"]
MOST = 2000  # spans of a lane: more are neither seen nor loaded by a page


@dataclass(frozen=True)
class Span:
    """One stretch of work: an operator on the host, a kernel or a copy on the GPU.

    Attributes:
        start_us: since the call began.
        depth: operators that it runs inside of.
    """

    name: str
    lane: Lane
    start_us: float
    duration_us: float
    depth: int = 0


@dataclass(frozen=True)
class Timeline:
    """One call of an engine.

    Attributes:
        engine: its name in ``--engines``.
        title: its name in the table.
        wall_us: from the call's begin until host and GPU were done, under the profiler.
        left_out: spans that would be too many: the innermost of the host first.
    """

    engine: str
    title: str
    wall_us: float
    spans: tuple[Span, ...]
    left_out: int = 0

    @staticmethod
    def of(data: dict[str, Any]) -> Timeline:
        """Make it from the dict that `dataclasses.asdict` gives."""
        spans = tuple(Span(**span) for span in data["spans"])
        fields: dict[str, Any] = {**data, "spans": spans}
        return Timeline(**fields)


def record_timeline(
    engine: str, title: str, call: Callable[[], object], device: torch.device
) -> Timeline | None:
    """Trace one call of an engine; None where another profiler is at work.

    Call it after all timing: on CUDA the profiler stays attached and slows launches down.

    Args:
        call: the engine, warm: it is called twice.
        device: the device of the call; on a CPU there is the host alone.
    """
    calls = record(call, device)
    return timeline(engine, title, calls[-1]) if calls else None


def timeline(engine: str, title: str, call: TracedCall) -> Timeline:
    """Lay out a traced call: the host's events by depth, the GPU's work, and no more than `MOST`
    spans of either."""
    host = [_span(event, "host", depth) for event, depth, _ in nested(call.events)]
    gpu = [_span(event, "gpu") for event in call.events if event.on_gpu]
    shown = [*_fewer(host), *_fewer(gpu)]
    left_out = len(host) + len(gpu) - len(shown)
    return Timeline(engine, title, call.stop_us, tuple(shown), left_out)


def _span(event: Event, lane: Lane, depth: int = 0) -> Span:
    return Span(event.name, lane, event.start_us, event.duration_us, depth)


def _fewer(spans: Iterable[Span]) -> list[Span]:
    """Leave out the innermost spans, level by level, until few enough are left; then the last."""
    kept = sorted(spans, key=lambda span: (span.start_us, span.depth))
    deepest = max((span.depth for span in kept), default=0)
    while len(kept) > MOST and deepest > 0:
        kept = [span for span in kept if span.depth < deepest]
        deepest -= 1
    return kept[:MOST]
