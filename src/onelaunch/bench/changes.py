"""Two comparisons side by side: what changed, beyond the noise of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onelaunch.bench.rows import Comparison, Row, row_of
from onelaunch.bench.timers import AGREEMENT, Timing

UNSETTLED = 0.1  # of a time that still moved by more than `AGREEMENT` when time was up

Change = Literal[
    "slower",
    "wrong",
    "failed",
    "faster",
    "mended",
    "within noise",
    "new",
    "gone",
    "not timed",
]
"""``slower``, ``faster``: the ratio of the wall times is beyond their noise. ``wrong``, ``failed``:
it was right before. ``mended``: it was wrong or failed before. ``new``, ``gone``: only one of the
two has a time. ``not timed``: neither has."""


@dataclass(frozen=True)
class EngineChange:
    """One engine in two comparisons.

    Attributes:
        engine: its name in ``--engines``.
        title: its name in the table.
        change: what changed.
        before, after: its rows; None where a comparison has none.
        ratio: the wall time after, in times of that before; None if either is missing.
        noise: the part of 1 by which the ratio may differ from 1 by chance.
    """

    engine: str
    title: str
    change: Change
    before: Row | None
    after: Row | None
    ratio: float | None = None
    noise: float | None = None

    @property
    def worse(self) -> bool:
        """True if it got slower, wrong, or fails now."""
        return self.change in ("slower", "wrong", "failed")


@dataclass(frozen=True)
class Changes:
    """Changes from one comparison to another.

    Attributes:
        before, after: the names of the two, such as their files.
        workloads: the names of what they compared, before and after.
        engines: a change for each engine of either, in the order of the later comparison.
        environment: what differs of the machines: its name, before and after.
    """

    before: str
    after: str
    workloads: tuple[str, str]
    engines: tuple[EngineChange, ...]
    environment: tuple[tuple[str, str | None, str | None], ...] = ()

    @property
    def worse(self) -> tuple[EngineChange, ...]:
        """The engines that got slower or wrong, or fail now."""
        return tuple(change for change in self.engines if change.worse)

    def to_json(self) -> str:
        """Write it as JSON text; `from_json` gives equal changes."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Changes:
        """Read changes that `to_json` wrote.

        Raises:
            ValueError: the text is not such changes.
        """
        try:
            return _changes(json.loads(text))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not changes in JSON: {error}") from error


def changes(
    before: Comparison, after: Comparison, names: tuple[str, str] = ("before", "after")
) -> Changes:
    """Set two comparisons side by side.

    A time has changed if the ratio of the medians is further from 1 than the spreads of both
    together (each half the distance between the quartiles, relative to the median), and than 2%,
    by which a time may move and count as settled; than 10% where one had not settled.
    """
    engines = dict.fromkeys(row.engine for row in (*after.rows, *before.rows))
    keys = dict.fromkeys((*after.environment, *before.environment))
    pairs = ((key, before.environment.get(key), after.environment.get(key)) for key in keys)
    return Changes(
        *names,
        workloads=(before.workload, after.workload),
        engines=tuple(_change(name, _row(before, name), _row(after, name)) for name in engines),
        environment=tuple((key, old, new) for key, old, new in pairs if old != new),
    )


def _row(comparison: Comparison, engine: str) -> Row | None:
    return next((row for row in comparison.rows if row.engine == engine), None)


def _change(engine: str, before: Row | None, after: Row | None) -> EngineChange:
    title = (after or before or _ABSENT).title
    old, new = (before or _ABSENT), (after or _ABSENT)
    if old.wall is None or new.wall is None:
        return EngineChange(engine, title, _status_change(old, new), before, after)
    ratio = new.wall.median_us / old.wall.median_us
    noise = _relative(old.wall) + _relative(new.wall)
    noise = max(noise, UNSETTLED if old.noisy or new.noisy else AGREEMENT)
    change: Change = "within noise"
    if ratio > 1 + noise:
        change = "slower"
    elif ratio < 1 / (1 + noise):
        change = "faster"
    return EngineChange(engine, title, change, before, after, ratio, noise)


def _status_change(old: Row, new: Row) -> Change:
    """Name the change of an engine that has no time in one of the two."""
    ran = ("ok", "unchecked")
    if new.status in ("wrong", "failed") and old.status in ran:
        return "wrong" if new.status == "wrong" else "failed"
    if new.status in ran and old.status in ("wrong", "failed"):
        return "mended"
    if new.wall is not None:
        return "new"
    return "gone" if old.wall is not None else "not timed"


def _relative(timing: Timing) -> float:
    """Return half the distance between the quartiles, as a part of the median."""
    return timing.spread_us / 2 / timing.median_us


_ABSENT = Row("", "", "missing")


def _changes(data: dict[str, Any]) -> Changes:
    pair: Sequence[str] = data["workloads"]
    fields: dict[str, Any] = {
        **data,
        "workloads": (pair[0], pair[1]),
        "engines": tuple(_engine(one) for one in data["engines"]),
        "environment": tuple((key, old, new) for key, old, new in data["environment"]),
    }
    return Changes(**fields)


def _engine(data: dict[str, Any]) -> EngineChange:
    rows = {name: row_of(data[name]) if data[name] else None for name in ("before", "after")}
    fields: dict[str, Any] = {**data, **rows}
    return EngineChange(**fields)
