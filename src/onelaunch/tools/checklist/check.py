"""The check of a callable that steps have changed: against float64, or bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from onelaunch.tools.bench.reference import (
    SECONDS,
    Case,
    Outputs,
    Reference,
    equal,
    judge,
    outputs,
    snapshot,
    survived,
)
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.checklist.clock import UNLIMITED, Clock


class Check(NamedTuple):
    """Findings of a check.

    Attributes:
        error: the largest relative error against float64; NaN where the results are of another
            form.
        wrong: the mistake, or None.
        left: the draws that were left out, for want of time.
    """

    error: float
    wrong: str | None
    left: tuple[str, ...] = ()


def check(
    call: Callable[..., Any],
    workload: Workload,
    reference: Reference,
    max_error: float,
    clock: Clock = UNLIMITED,
) -> Check:
    """Call it on the inputs given and on all draws.

    Args:
        max_error: the largest relative error that passes, or eager's own where that is larger; 0
            asks for eager's results, bit for bit.

    Raises:
        Exception: the callable's own.
        TimeIsUp: by the clock, between two calls.
    """
    worst, kept, fresh = 0.0, None, False
    before: Outputs = []
    start = math.inf
    for i, case in enumerate(reference.cases):
        if i == 1:
            start = time.monotonic()  # the first call may compile
        if time.monotonic() - start > SECONDS:
            return Check(worst, None, tuple(c.name for c in reference.cases[i:]))
        clock.check()
        args, kwargs = workload.copy_inputs(case.inputs)
        result = call(*args, **kwargs)
        error, wrong = judged(outputs(result), case, max_error)
        worst = error if math.isnan(error) else max(worst, error)
        if wrong is not None:
            where = "" if case.name == "given" else f", on the draw {case.name}"
            return Check(worst, f"{wrong}{where}")
        if kept is None:
            kept, before = result, snapshot(result)
        elif not fresh and not equal(case.eager, reference.cases[0].eager):
            fresh = survived(kept, before)
            if not fresh:
                return Check(worst, "the next call overwrites its result")
    return Check(worst, None)


def own_error(reference: Reference) -> float:
    """Return eager's own relative error, the largest over all inputs."""
    return max(judged(case.eager, case, math.inf)[0] for case in reference.cases)


def judged(found: Outputs, case: Case, max_error: float) -> tuple[float, str | None]:
    """Return the relative error of results, and the mistake or None; see `check`."""
    own = judge(case.eager, case, math.inf).error
    allowed = max(max_error, own) if math.isfinite(own) else max_error
    verdict = judge(found, case, math.inf if max_error == 0 else allowed)
    if verdict.wrong is None and max_error == 0 and not equal(found, case.eager):
        return verdict.error, "it is not eager's result bit for bit"
    return verdict.error, verdict.wrong


def finite(error: float | None) -> float | None:
    """Return an error as JSON has it: None for infinity and NaN."""
    return error if error is not None and math.isfinite(error) else None
