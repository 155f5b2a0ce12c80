"""The rows of the tables built once more: ways to run a workload, each checked and counted.

A builder returns a function that is called when it is the process's turn to measure, and that
returns what was found of each row.
"""

from __future__ import annotations

import copy
import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks import backend, call_overhead, optimize, training
from benchmarks.backend_workloads import made
from benchmarks.call_overhead import Contestant, Row, judge, measure
from benchmarks.claims_listed import OURS_OF_BACKEND, is_ours
from benchmarks.processes import RESULTS, ready_by
from benchmarks.training_check import Reference
from benchmarks.training_engines import PARTS, network
from examples.placement import device
from examples.workloads import WORKLOADS
from onelaunch.runtime.graphed import Graphed
from onelaunch.tools.bench import ENGINES
from onelaunch.tools.bench.precision import relative_error
from onelaunch.tools.bench.reference import first_line, outputs
from onelaunch.tools.bench.timers import Timing
from onelaunch.tools.bench.workload import Workload

SAMPLES, SECONDS = 45, 0.8


@dataclass
class Found(Row):
    """What was found of a row.

    Attributes:
        recordings: made for it.
        launches: of a later call.
        eager: calls of ours within that call that were no launches.
        figures: in microseconds; the less, the better.
    """

    title: str = ""
    recordings: int | None = None
    launches: int | None = None
    eager: int = 0
    figures: dict[str, float] = field(default_factory=dict[str, float])

    def fail(self, reason: str) -> None:
        """Note what is wrong, if nothing was before."""
        if self.status == "ok":
            self.status, self.reason = "failed", reason


Finish = Callable[[], list[Found]]


# Counting.


@dataclass(frozen=True)
class Counts:
    """The recordings, launches and other calls of all graphed callables in this process."""

    recordings: int
    launches: int
    eager: int

    @staticmethod
    def now() -> Counts:
        """Count. Graphed callables within others, of plans and compilers, count too."""
        # By `type`: a proxy whose object is gone says so when it is asked for its class.
        graphed: list[Any] = [o for o in gc.get_objects() if issubclass(type(o), Graphed)]
        stats = [one.stats() for one in graphed]
        return Counts(
            sum(len(one.recordings) for one in stats),
            sum(one.replays for one in stats),
            sum(one.eager_calls + one.warmup_calls for one in stats),
        )


def count(found: Found, call: Callable[[], object], before: Counts) -> None:
    """Count the launches of a call that is not the first.

    Args:
        before: the counts before the row was built.
    """
    call()
    earlier = Counts.now()
    call()
    now = Counts.now()
    found.recordings = now.recordings - before.recordings
    found.launches = now.launches - earlier.launches
    found.eager = now.eager - earlier.eager


# Ways to run a workload.


class Ways:
    """The variants of a workload: each is built, counted, and measured in turn with the others."""

    def __init__(self, kinds: int = 2) -> None:
        self._kinds = kinds
        self._built: list[tuple[Contestant, Found]] = []

    def add(self, variant: str, ours: bool, build: Callable[[], Contestant]) -> None:
        """Build a variant; what goes wrong is in its row."""
        before = Counts.now()
        contestant, found = build(), Found(variant)
        self._built.append((contestant, found))
        if ours and contestant.row.status == "ok":
            with call_overhead.building(contestant.row, ready_by()):
                count(found, contestant.call, before)

    def finish(self) -> list[Found]:
        """Measure them."""
        contestants = [contestant for contestant, _ in self._built]
        try:
            measure(contestants, device(), SAMPLES, SECONDS, self._kinds)
        except Exception as error:  # noqa: BLE001  a call may raise anything, a warning of ours too
            why = f"{type(error).__name__}: {first_line(error)}"
            for _, found in self._built:
                found.fail(f"when timed: {why}")
        for contestant, found in self._built:
            if contestant.row.status != "ok":
                found.status, found.reason = contestant.row.status, contestant.row.reason
            for figure, samples in contestant.samples.items():
                found.figures[figure] = Timing.of(samples).median_us
        return [found for _, found in self._built]


def calls(name: str, variants: Sequence[str]) -> Finish:
    """Build engines of `ol.compare`."""
    torch.manual_seed(0)
    fn, args = WORKLOADS[name]()
    workload = Workload(fn, args)
    ways = Ways(kinds=3)
    with torch.no_grad():
        for variant in variants:
            ways.add(variant, is_ours(variant), partial(_call, variant, workload))
    return torch.no_grad()(ways.finish)


MODES = {
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}


def _call(variant: str, workload: Workload) -> Contestant:
    """Build an engine; one that is called in another mode than ours enters it at each call."""
    mode = ENGINES[variant].mode
    with MODES[mode]():
        contestant = call_overhead.build(variant, workload, ready_by())
    if mode != "no_grad":
        contestant.call = MODES[mode]()(contestant.call)
    return contestant


def trained(name: str, variants: Sequence[str]) -> Finish:
    """Build engines of a part of `benchmarks.training`."""
    part, _, workload = name.partition(":")
    model, batches = network(workload)
    reference = Reference(part, model, batches)
    ways = Ways()
    for engine in PARTS[part]:
        if engine.name in variants:
            build = partial(training.build, engine, model, batches, reference, ready_by())
            ways.add(engine.name, is_ours(engine.name), build)
    return ways.finish


def compiled(name: str, variants: Sequence[str]) -> Finish:
    """Build engines of `benchmarks.backend`, which share one cache here: no build is timed."""
    dtype, _, workload = name.partition(":")
    eager = made(workload, backend.TYPES[dtype])
    expected = backend.warm(eager.step(lambda fn: fn, None))
    most = backend.TOLERANCE[dtype, eager.train]
    caches = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    ways = Ways()

    def build(variant: str) -> Contestant:
        work = made(workload, backend.TYPES[dtype])
        contestant = backend.build(variant, work, expected, ready_by(), most, caches.name)
        warned = [note for note in contestant.row.notes if not note.endswith(" recordings")]
        if warned and contestant.row.status == "ok":
            contestant.row.status, contestant.row.reason = "failed", f"warns: {warned[0]}"
        return contestant

    for variant in variants:
        ways.add(variant, variant in OURS_OF_BACKEND, partial(build, variant))

    def finish() -> list[Found]:
        with caches:
            return ways.finish()

    return finish


def planned(name: str, variants: Sequence[str]) -> Finish:
    """Apply plans that `ol.optimize` found, and build the engines beside them."""
    rows = json.loads((RESULTS / "optimize.json").read_text())["workloads"][name]["rows"]
    fn, args = optimize.given(name)
    with torch.no_grad():
        expected = [t.clone() for t in outputs(copy.deepcopy(fn)(*args))]

    def build(variant: str) -> Contestant:
        row = variant.removeprefix("onelaunch ").partition(" (")[0]
        contestant = Contestant(Row(variant, variant))
        contest: dict[str, optimize.Contestant] = {}
        with call_overhead.building(contestant.row, ready_by()):
            optimize.built(rows[row], fn, args, name, contest, row)
            mode, cycle, call = contest[row]
            if is_ours(variant):
                with mode():
                    error = relative_error(outputs(call(*args)), expected)
                # Half as much again as it was: other kernels may be chosen.
                judge(contestant.row, error, max(1.5 * rows[row]["error"], 1e-6))

            def run() -> object:
                with mode():
                    return cycle()

            contestant.call = run
        return contestant

    ways = Ways()
    for variant in variants:
        ways.add(variant, is_ours(variant), partial(build, variant))
    return ways.finish
