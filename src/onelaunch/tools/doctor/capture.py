"""A real capture: it confirms or refutes what an eager run seems to show, and finds the rest."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.api import graph
from onelaunch.errors import CaptureError, GraphWarning, let_go
from onelaunch.finding import Finding, of_refusal
from onelaunch.runtime.stats import GraphStats
from onelaunch.source import line_of, user_frame
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.run import run_backward
from onelaunch.tools.rules import RULES
from onelaunch.tools.rules.findings import under

_CALLS = 24
"""Calls at most. A number that the callable moves on is refused after eight recordings."""
_SETTLED = 2
"""Replays in a row, with no capture between, after which nothing new is expected."""


@dataclass(frozen=True)
class Captured:
    """The outcome of a capture.

    Attributes:
        stats: the figures of the graphed callable.
        replayed: whether calls came to be one launch, and stayed so.
        refused: the finding of its refusal, if it was refused.
        warned: the findings of its warnings.
    """

    stats: GraphStats
    replayed: bool
    refused: Finding | None
    warned: tuple[Finding, ...]


def capture(workload: Workload, backward: bool) -> Captured:
    """Graph a workload, and call it until it replays for good, or is refused.

    Args:
        backward: whether each call is followed by a backward, as in training.
    """
    outside, begins = str(user_frame()), line_of(workload.fn)

    def finding(code: str, what: str, where: str | None, fix: str) -> Finding | None:
        # A fault without a line has that of the call, which says nothing here.
        where = (str(begins) if begins else None) if where == outside else where
        found = of_refusal(code, what, where, fix)
        return None if found is None else under(found, RULES)  # a warning blocks nothing

    fast: Any = graph(workload.fn, on_refusal="raise")
    refused: Finding | None = None
    settled = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(_CALLS):
                torch.rand(())  # so that a seed that the call sets is another than the last state
                before = fast.stats()
                workload.cut_history()
                result = fast(*workload.args, **workload.kwargs)
                if backward:
                    run_backward(result)
                del result
                after = fast.stats()
                same = after.captures == before.captures and after.replays > before.replays
                settled = settled + 1 if same else 0
                if settled == _SETTLED:
                    break
        except CaptureError as error:
            let_go(error)
            refused = finding(error.code, error.what, error.where, error.fix)
        except Exception as error:
            if not fast.stats().warmup_calls:
                raise
            let_go(error)  # it cannot be called so often: a cache that is full, say
    told = [w.message for w in caught if isinstance(w.message, GraphWarning)]
    warned = [
        finding(w.code, w.what, where, w.fix)
        for w in told
        for where in (w.where or "").splitlines() or [None]  # of several hooks, each has its own
    ]
    replayed = refused is None and fast.stats().replays > 0
    return Captured(fast.stats(), replayed, refused, tuple(f for f in warned if f is not None))
