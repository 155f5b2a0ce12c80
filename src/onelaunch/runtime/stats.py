"""The cost and use of recordings, as data: the results of `stats()`. Reasons are in `why.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onelaunch.capture.recording import Recording

DEFERRED = "deferred"  # the reason of an eager run whose signature is captured in a later call


@dataclass(frozen=True)
class SplitModule:
    """A module that runs as it is, under ``on_refusal="split"``, with its children graphed.

    Attributes:
        module: its name, from the class of the graphed module on.
        code, what, where: the refusal that was the reason; the line is its own or a child's.
    """

    module: str
    code: str
    what: str
    where: str | None


@dataclass(frozen=True)
class Figures:
    """The figures of one graphed callable, or of several together; see `GraphStats`."""

    recordings: tuple[Recording, ...]
    captures: int
    capture_seconds: float
    replays: int
    evictions: int
    warmup_calls: int
    eager_reasons: dict[str, int]
    padding: float = 0.0
    bucket_rows: int = 0

    @property
    def eager_calls(self) -> int:
        """Calls that ran the callable itself for another reason than a warm-up."""
        return sum(self.eager_reasons.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pool that the recordings keep for themselves."""
        return sum(r.kept_bytes for r in self.recordings)

    @property
    def driver_bytes(self) -> int:
        """Bytes that the driver took for the recordings, outside the pool."""
        return sum(r.driver_bytes for r in self.recordings)


@dataclass(frozen=True)
class GraphStats(Figures):
    """The figures of one graphed callable, since it was made or `reset`.

    Attributes:
        recordings: the existing recordings, the newest first.
        captures: recordings made, freed ones included.
        capture_seconds: the time of all captures.
        replays: launches, of evicted recordings too.
        evictions: recordings freed because the pool's `max_bytes` was reached.
        warmup_calls: calls that ran the callable itself before a capture.
        eager_reasons: reason -> number of other calls that ran the callable itself. A reason is the
            code of a refusal or warning, such as ``"OL304"``. ``"deferred"``: the capture waits for
            a later call. ``"empty"``: with buckets, a call without rows.
        sizes: with buckets: size -> number of calls. A size is a number, or a tuple where several
            dimensions are bucketed.
        padding: the share of padding in the rows of all buckets, 0 to 1. Each call, and each chunk
            of a call, counts as if it ran in its bucket. Warm-up and eager calls do so, too,
            although they run at their own size. A call that a larger bucket served counts there.
        bucket_rows: the rows of all buckets, real ones and padding.
        larger_calls: with ``capture="background"``: calls that a larger bucket served, as their own
            was not recorded yet.
        split: the modules that run as they are under ``on_refusal="split"``, the outer ones first.
            The other figures are then of all pieces together.
        split_launches: the launches of one call in pieces, without its backward; 0 before the first
            call in which all pieces were launched.
        split_us: the host time of that call, in microseconds, with its waits for the device.
    """

    sizes: dict[int | tuple[int, ...], int] = field(default_factory=dict)
    larger_calls: int = 0
    split: tuple[SplitModule, ...] = ()
    split_launches: int = 0
    split_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PoolStats(Figures):
    """The figures of a pool, and those of the callables that use it.

    Attributes:
        memory_bytes: device memory of the pool.
        max_bytes: the limit of `memory_bytes`; None: no limit.
        callables: the figures of each graphed callable that uses the pool and still exists.
        recordings, captures, capture_seconds, replays, evictions, warmup_calls, eager_reasons,
            padding, bucket_rows: as in `GraphStats`, of all callables. In `padding` every row
            counts the same.
    """

    memory_bytes: int
    max_bytes: int | None
    callables: tuple[GraphStats, ...]


@dataclass(eq=False)
class Counters:
    """The counters of a graphed callable; a replay changes none of them. `reason`: the reason of
    the eager run that is to come, or `DEFERRED`."""

    captures: int = 0
    capture_seconds: float = 0.0
    evictions: int = 0
    warmup_calls: int = 0
    eager_reasons: dict[str, int] = field(default_factory=dict)
    reason: str = DEFERRED

    def captured(self, seconds: float) -> None:
        self.captures += 1
        self.capture_seconds += seconds

    def ran_eagerly(self, reason: str) -> None:
        self.eager_reasons[reason] = self.eager_reasons.get(reason, 0) + 1


_SUMMED = "captures", "capture_seconds", "replays", "evictions", "warmup_calls", "bucket_rows"


def summed(each: Sequence[Figures]) -> dict[str, Any]:
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in _SUMMED}
    padded = sum(one.padding * one.bucket_rows for one in each)
    return sums | {
        "recordings": tuple(r for one in each for r in one.recordings),
        "eager_reasons": dict(sum((Counter(one.eager_reasons) for one in each), Counter[str]())),
        "padding": padded / sums["bucket_rows"] if padded else 0.0,
    }
