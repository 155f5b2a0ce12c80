"""The result of an optimisation, as data: what was tried, what it gave, what is kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onelaunch.bench.environment import Environment
from onelaunch.bench.timers import Timing

Outcome = Literal["kept", "no gain", "wrong", "failed", "not possible"]
Round = Literal["first", "recheck", "final"]


@dataclass(frozen=True)
class Trial:
    """One step tried on top of the steps kept before it.

    Attributes:
        step: its name, ``"fold-batchnorm"``.
        title: its name for people, ``"BatchNorm folded into convolutions"``.
        outcome: whether it is kept, or why not.
        reason: the reason if it is not kept, or what it did (``"12 of 12 norms"``).
        error: relative error against float64 with the step on; None if it never ran.
        before: wall time without it, measured in turns with `after`.
        after: wall time with it.
        round: when it was tried: in the first pass, taken out or tried again after it, or with
            the result as a whole.
    """

    step: str
    title: str
    outcome: Outcome
    reason: str | None
    error: float | None
    before: Timing | None
    after: Timing | None
    round: Round = "first"


@dataclass(frozen=True)
class Plan:
    """The steps to take, and how they were found.

    Attributes:
        workload: the name of the callable.
        steps: the names of what is kept, in the order in which it is applied.
        trials: all that was tried, in order.
        max_error: the largest relative error that was allowed.
        error: relative error of the result against float64.
        eager: wall time of the callable as it was given.
        result: wall time of the callable that came out.
        environment: hardware and versions.
        remarks: remarks on the whole.
    """

    workload: str
    steps: tuple[str, ...]
    trials: tuple[Trial, ...]
    max_error: float
    error: float
    eager: Timing
    result: Timing
    environment: Environment
    remarks: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write it as JSON text; `from_json` gives an equal plan."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
            ValueError: the text is not such a plan.
        """
        try:
            return _plan(json.loads(text))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan in JSON: {error}") from error


def _plan(data: dict[str, Any]) -> Plan:
    fields: dict[str, Any] = {
        **data,
        "steps": tuple(data["steps"]),
        "trials": tuple(_trial(trial) for trial in data["trials"]),
        "eager": Timing(**data["eager"]),
        "result": Timing(**data["result"]),
        "remarks": tuple(data["remarks"]),
    }
    return Plan(**fields)


def _trial(data: dict[str, Any]) -> Trial:
    timings = {name: Timing(**data[name]) if data[name] else None for name in ("before", "after")}
    fields: dict[str, Any] = {**data, **timings}
    return Trial(**fields)
