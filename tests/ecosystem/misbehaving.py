"""Programs that are not as they are said to be, for the test of the harness."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor

from .harness import Run, inference


def _doubled(run: Run, calls: int = 6, **options: Any) -> None:
    fast = run.graph(lambda x: x * 2, **options)
    with torch.no_grad():
        for i in range(calls):
            run.see(fast(run.rand(i, 4)))


@inference()
def right(run: Run) -> None:
    _doubled(run)


@inference()
def wrong_at_the_end_alone(run: Run) -> None:
    """Results that the next call overwrites were right when they were shown."""
    _doubled(run, outputs="static")


@inference()
def another_number(run: Run) -> None:
    _doubled(run)
    run.see(losses=[0.5, float(len(run.graphs))])


@inference()
def another_random_state(run: Run) -> None:
    _doubled(run)
    if run.graphs:
        torch.rand(1)


@inference()
def without_replays(run: Run) -> None:
    _doubled(run, calls=3)


@inference()
def dead(run: Run) -> None:
    _doubled(run)
    if run.graphs:
        os.kill(os.getpid(), signal.SIGSEGV)


@inference(refused={"cpu": "OL102"})
def refused_by_another_code(run: Run) -> None:
    fast = run.graph(lambda x: x * 2 if x.sum() > 0 else x)
    for i in range(6):
        run.see(fast(run.rand(i, 4)))


@inference(refused={"cpu": "OL101"})
def refused_as_it_says(run: Run) -> None:
    fast = run.graph(lambda x: x * 2 if x.sum() > 0 else x)
    for i in range(6):
        run.see(fast(run.rand(i, 4)))


@inference()
def an_error_of_its_own(run: Run) -> None:
    _doubled(run)
    assert not run.graphs, "it was graphed"


@inference(recordings=1)
def too_many_recordings(run: Run) -> None:
    fast = run.graph(lambda x: x * 2)
    for i in range(12):
        run.see(fast(run.rand(i, 4 + i % 2)))


@inference()
def warned(run: Run) -> None:
    def keep(x: Tensor, kept: bool) -> Tensor:
        return x[x > 0] if kept else x

    fast = run.graph(keep, on_refusal="eager")
    for i in range(12):
        run.see(fast(run.rand(i, 4), bool(i % 2)))
