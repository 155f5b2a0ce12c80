"""A Chrome trace of some calls: as they are, and as one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from onelaunch.api import graph
from onelaunch.bench.trace import export
from onelaunch.bench.workload import Workload
from onelaunch.errors import GraphError
from onelaunch.profiler.measure import WARM_CALLS, prepared

CALLS = 3
EAGER, GRAPHED = "eager call", "graphed call"


def write_trace(workload: Workload, file: Path) -> str | None:
    """Trace some eager calls and some of `ol.graph`, on copies, and write the Chrome trace.

    The calls are named in it, and the replays in these; Perfetto and chrome://tracing open it.

    Returns:
        Why there are no graphed calls; None where there are.
    """
    with prepared(workload) as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast: Any = None
        why = None
        try:
            fast = graph(own.copy().fn, on_refusal="raise")
            _repeat(fast, own, WARM_CALLS)
        except GraphError as error:
            fast, why = None, str(error).splitlines()[0]

        def run() -> None:
            _repeat(own.fn, own, CALLS, EAGER)
            if fast is not None:
                _repeat(fast, own, CALLS, GRAPHED)

        export(run, own.device, file)
        return why


def _repeat(fn: Callable[..., Any], own: Workload, calls: int, name: str = "warm-up") -> None:
    """Call it some times, each call done before the next."""
    for _ in range(calls):
        with record_function(name):
            fn(*own.args, **own.kwargs)
        if own.device.type == "cuda":
            torch.cuda.synchronize(own.device)
