"""What recordings cost and what they did, as data: the answers of `stats()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onelaunch.capture.recording import Recording


@dataclass(frozen=True)
class GraphStats:
    """One graphed callable, since it was made or `reset`.

    Attributes:
        recordings: those that exist, the newest first.
        captures: how many were made, with those that are gone; `capture_seconds` is of all of them.
        replays: launches, with those of recordings that were evicted.
        evictions: recordings that went because the pool's `max_bytes` was reached.
        warmup_calls: calls that ran the callable itself before a capture.
        eager_calls: calls that ran it for another reason: too many signatures, a refusal, a pool
            that is full.
        sizes: how often each size was called, where there are buckets: a number for each size of
            the one dimension, or a tuple of them where there are several.
        padding: the share of the rows of all buckets that were padding, 0 to 1, as if each call
            and each piece of one had run in its bucket: warm-up calls run at their own size.
        bucket_rows: those rows, real ones and padding.
    """

    recordings: tuple[Recording, ...]
    captures: int
    capture_seconds: float
    replays: int
    evictions: int
    warmup_calls: int
    eager_calls: int
    sizes: dict[int | tuple[int, ...], int] = field(
        default_factory=dict[int | tuple[int, ...], int]
    )
    padding: float = 0.0
    bucket_rows: int = 0

    @property
    def kept_bytes(self) -> int:
        """What of the pool the recordings keep for themselves."""
        return sum(r.kept_bytes for r in self.recordings)

    @property
    def driver_bytes(self) -> int:
        """What the driver took for them, outside the pool."""
        return sum(r.driver_bytes for r in self.recordings)


@dataclass(frozen=True)
class PoolStats:
    """A pool, and the callables that use it.

    Attributes:
        memory_bytes: device memory of the pool, which `max_bytes` bounds.
        callables: one for each graphed callable that uses the pool and still exists.
    """

    memory_bytes: int
    max_bytes: int | None
    callables: tuple[GraphStats, ...]

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """Those of all callables."""
        return tuple(r for one in self.callables for r in one.recordings)

    @property
    def kept_bytes(self) -> int:
        """What of the reserved memory is not shared, but kept by one recording each."""
        return sum(one.kept_bytes for one in self.callables)

    @property
    def driver_bytes(self) -> int:
        """What the driver took for all recordings, outside the pool."""
        return sum(one.driver_bytes for one in self.callables)

    @property
    def captures(self) -> int:
        """Recordings made, with those that are gone."""
        return sum(one.captures for one in self.callables)

    @property
    def capture_seconds(self) -> float:
        """Time that the captures took."""
        return sum(one.capture_seconds for one in self.callables)

    @property
    def replays(self) -> int:
        """Launches."""
        return sum(one.replays for one in self.callables)

    @property
    def evictions(self) -> int:
        """Recordings that went because `max_bytes` was reached."""
        return sum(one.evictions for one in self.callables)

    @property
    def warmup_calls(self) -> int:
        """Calls that ran a callable itself before a capture."""
        return sum(one.warmup_calls for one in self.callables)

    @property
    def eager_calls(self) -> int:
        """Calls that ran a callable itself for another reason."""
        return sum(one.eager_calls for one in self.callables)

    @property
    def padding(self) -> float:
        """The share of the rows of all callables' buckets that were padding, 0 to 1. Rows of one
        callable count as those of another."""
        rows = sum(one.bucket_rows for one in self.callables)
        return sum(one.padding * one.bucket_rows for one in self.callables) / rows if rows else 0.0


@dataclass
class Counts:
    """What a graphed callable counts as it goes; nothing of it at a replay."""

    captures: int = 0
    capture_seconds: float = 0.0
    evictions: int = 0
    warmup_calls: int = 0
    eager_calls: int = 0

    def captured(self, seconds: float) -> None:
        """Count a capture that took so long."""
        self.captures += 1
        self.capture_seconds += seconds


def graph_stats(recordings: Sequence[Recording], counts: Counts, gone: int) -> GraphStats:
    """Sum up a callable's figures; `gone` replays are of recordings that were evicted."""
    return GraphStats(
        recordings=tuple(recordings),
        captures=counts.captures,
        capture_seconds=counts.capture_seconds,
        replays=sum(info.replays for info in recordings) + gone,
        evictions=counts.evictions,
        warmup_calls=counts.warmup_calls,
        eager_calls=counts.eager_calls,
    )
