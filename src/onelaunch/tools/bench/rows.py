"""The result of a comparison, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from onelaunch.tools.bench.environment import Environment
from onelaunch.tools.bench.profile import Limit
from onelaunch.tools.bench.timers import Timing
from onelaunch.tools.report.document import Document, Timeline
from onelaunch.tools.report.result import Result

Status = Literal["ok", "wrong", "failed", "missing", "unchecked", "interrupted"]
"""``ok``: right and timed. ``wrong``: its result is off, so it was not timed. ``failed``: it
raised. ``missing``: it cannot run on this machine. ``unchecked``: timed, but the callable's own
results change from call to call. ``interrupted``: the comparison was stopped before its turn."""


@dataclass(frozen=True)
class Row:
    """One engine.

    Attributes:
        engine: its name in ``--engines``.
        title: its name in the table.
        status: the outcome.
        reason: the reason if it is not ``ok``, or None.
        error: relative error against the reference; None where nothing finite was returned.
        fresh_output: True if a result survives the next call; None if that could not be seen.
        build_seconds: until it was ready: compiling, warm-up and capture.
        wall: per call, many calls in a row.
        host: until a call returns.
        gpu: how long the GPU is busy with a call.
        noisy: True if the wall time still moved by more than 2% when time was up.
        memory_bytes: device memory that it holds between calls, beyond the model; None if unknown.
        code: the code that does the same.
        notes: further remarks, warnings included.
    """

    engine: str
    title: str
    status: Status
    reason: str | None = None
    error: float | None = None
    fresh_output: bool | None = None
    build_seconds: float | None = None
    wall: Timing | None = None
    host: Timing | None = None
    gpu: Timing | None = None
    noisy: bool = False
    memory_bytes: int | None = None
    code: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison(Result):
    """Every engine on one workload: `comparison["eager"]` is a row, and a loop goes over all.

    Attributes:
        workload: its name.
        rows: one for each engine, in the order asked for.
        profile: the limit of the workload, launches or kernels.
        reference: ``"float64"``, or ``"eager"`` where the callable cannot run in float64.
        tolerance: the largest relative error that passes.
        remarks: remarks on the comparison as a whole.
        environment: hardware and versions.
        rounds: interleaved rounds of timing.
        interrupted: True if it was stopped half-way.
        timelines: one call of eager and one of the best engine, traced after the timing.
    """

    noun = "a comparison"

    workload: str
    rows: tuple[Row, ...]
    profile: Limit | None = None
    reference: str = "float64"
    tolerance: float = 0.0
    remarks: tuple[str, ...] = ()
    environment: Environment = field(default_factory=dict)
    rounds: int = 0
    interrupted: bool = False
    timelines: tuple[Timeline, ...] = ()

    @property
    def best(self) -> Row | None:
        """The fastest correct row whose results are the caller's to keep."""
        return _fastest([row for row in self.rows if row.fresh_output is not False])

    @property
    def fastest(self) -> Row | None:
        """The fastest correct row, even if the next call overwrites its results."""
        return _fastest(list(self.rows))

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The rows whose results were off."""
        return tuple(row for row in self.rows if row.status == "wrong")

    def __getitem__(self, engine: str) -> Row:
        for row in self.rows:
            if row.engine == engine:
                return row
        raise KeyError(engine)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:  # whether or not there is a row
        return True

    def document(self) -> Document:
        from onelaunch.tools.bench.shown import document

        return document(self)


def _fastest(rows: list[Row]) -> Row | None:
    timed = [row for row in rows if row.status == "ok" and row.wall is not None]
    return min(timed, key=lambda row: row.wall.median_us if row.wall else math.inf, default=None)
