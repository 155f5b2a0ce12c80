"""The timeline of one call: what ran on the host and on the GPU, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["host", "gpu"]


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
    """

    engine: str
    title: str
    wall_us: float
    spans: tuple[Span, ...]
