"""`compare`: every way to run a callable, on the same inputs, checked and timed."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onelaunch.errors import bad
from onelaunch.gc_pause import no_collection
from onelaunch.tools.bench.engines import ALONE, DEFAULT, ENGINES
from onelaunch.tools.bench.engines.engine import Engine
from onelaunch.tools.bench.entry import EngineEntry, isolated, reset_compiler, why_missing
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.isolated import Isolated, IsolatedEntry
from onelaunch.tools.bench.profile import Limit, count_kernels, find_limit
from onelaunch.tools.bench.reference import Reference, make_reference
from onelaunch.tools.bench.rows import Comparison
from onelaunch.tools.bench.timeline import Timeline
from onelaunch.tools.bench.timers import WINDOW, timers_for
from onelaunch.tools.bench.workload import (
    OnProgress,
    Workload,
    name_of,
    takes_a_call,
    tell_nobody,
    validated,
)
from onelaunch.tools.names import known, listed

LEAST_ROUNDS = 2


@takes_a_call
def compare(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    engines: Sequence[str | Engine | Isolated] | None = None,
    seconds: float = 10.0,
    name: str | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Run a callable in every engine, check each against float64, and time those that are right.

    An engine is right if it is so on these arguments and on others of the same sizes: other signs
    and scales, zeros, extremes. They come from one seed; trying them takes 10 s at most before the
    engines are built, and 10 s of each engine.

    Each engine works on its own copy of the callable and of the arguments; the caller's are only
    read, and the random state is as before. (The parameters of a model too large for so many copies
    are shared between engines; a remark says so.) A call should give the same result for the same
    arguments: results that dropout or state change are timed but cannot be checked. At
    the end code compiled by `torch.compile` in this process is dropped (`torch._dynamo.reset`), so
    compiled functions of the caller's compile again.

    Args:
        fn: any callable that returns tensors, alone or in containers; modules are called in the
            mode (train or eval) that they are in.
        args: positional arguments.
        kwargs: keyword arguments.
        engines: names from `ENGINES`, or engines. The default leaves out onelaunch's max-autotune,
            which takes minutes to build, and the two limits, which are not whole calls. It leaves
            out ``openxla``, too: it leaves something behind in the process. (The command gives it a
            process of its own.)
        seconds: how long to time at most, after every engine is built; rounds end sooner when the
            wall times of all engines have settled within 2%.
        name: a name for the workload; the callable's by default.
        on_progress: called with a text and the part that is done, 0 to 1.

    Returns:
        The rows. On KeyboardInterrupt, the rows so far.

    Raises:
        ArgumentError: OL401, a bad argument, or a callable that returns no tensor.
        Exception: whatever `fn` itself raises on these arguments, unchanged.

    Example:
        >>> import torch, onelaunch as ol
        >>> model = torch.nn.Linear(8, 4).eval()
        >>> result = ol.compare(model, (torch.randn(2, 8),), engines=["no_grad"], seconds=0.1)
        >>> result.best.engine
        'no_grad'
    """
    here = [engine for engine in DEFAULT if engine.name not in ALONE]
    chosen = choose(here if engines is None else engines)
    workload = validated(fn, args, kwargs, "compare")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        why = "timing takes a number of seconds above 0"
        raise bad(f"seconds={seconds!r}", "compare", why, "seconds=10")
    workload = replace(workload, share_parameters=_too_large(workload, chosen))
    tell = on_progress or tell_nobody
    tell("importing torch.compile", 0.0)
    with isolated(workload.device):
        contest = _Contest(workload, chosen, seconds, tell)
        try:
            contest.run()
        finally:
            reset_compiler()
        return contest.comparison(name or name_of(fn))


def choose(engines: Sequence[str | Engine | Isolated] | None) -> tuple[Engine | Isolated, ...]:
    """Find the engines of these names; all of the default ones for None.

    Raises:
        ArgumentError: OL401, with the unknown names.
    """
    if engines is None:
        return DEFAULT
    chosen = listed(engines, str | Engine | Isolated, "compare", "engines", "no_grad")
    if names := [one for one in chosen if isinstance(one, str)]:
        known(names, list(ENGINES), "engine", "compare", "engines=", "['eager']")
    return tuple(ENGINES[one] if isinstance(one, str) else one for one in chosen)


@dataclass
class _Contest:
    """The state of a comparison."""

    workload: Workload
    engines: tuple[Engine | Isolated, ...]
    seconds: float
    tell: OnProgress
    reference: Reference | None = None
    profile: Limit | None = None
    entries: tuple[EngineEntry | IsolatedEntry, ...] = ()
    rounds: int = 0
    interrupted: bool = False
    timelines: tuple[Timeline, ...] = ()

    def run(self) -> None:
        with contextlib.ExitStack() as finished:  # each, also where an interrupt comes meanwhile
            self._run(finished)
        if self.profile is not None and not self.interrupted:
            self.profile = replace(self.profile, kernels=count_kernels(self.workload.copy()))

    def _run(self, finished: contextlib.ExitStack) -> None:
        self.entries = tuple(_entry(engine, self.workload) for engine in self.engines)
        for entry in self.entries:
            finished.callback(entry.finish)
        try:
            self._prepare()
            self._measure()
            self.tell("tracing a call", 1.0)
            self.timelines = self._timelines()
        except KeyboardInterrupt:
            self.interrupted = True
            if self.rounds == 0:
                # One quick round, so that what was built has figures; a second Ctrl-C stops it.
                with contextlib.suppress(KeyboardInterrupt):
                    self._round()

    def _prepare(self) -> None:
        self.tell("float64 reference", 0.0)
        self.reference = make_reference(self.workload, torch.Generator().manual_seed(0))
        self.workload = self.reference.placed(self.workload)
        for entry in self.entries:
            entry.workload = self.workload
        self.tell("timing eager calls", 0.7 / (2 + len(self.entries)))
        self.profile = find_limit(self.workload.copy())
        for i, entry in enumerate(self.entries):
            part = (1 + i) / (2 + len(self.entries)) * 0.7
            entry.prepare(self.reference, functools.partial(self._tell_stage, entry, part))

    def _tell_stage(self, entry: EngineEntry | IsolatedEntry, part: float, doing: str) -> None:
        """Tell what is done with an engine; `doing` is "building", say."""
        self.tell(f"{doing} {entry.engine.title}", part)

    def _measure(self) -> None:
        """Time round after round until the wall times have settled, or the time is up."""
        start = time.monotonic()
        gc.collect()
        with no_collection():
            while running := self._round():
                spent = (time.monotonic() - start) / self.seconds
                self.tell(f"timing, round {self.rounds}", 0.7 + 0.3 * min(1.0, spent))
                if self.rounds >= 2 * WINDOW and all(entry.settled for entry in running):
                    break
                if spent >= 1 and self.rounds >= LEAST_ROUNDS:
                    break

    def _round(self) -> list[EngineEntry | IsolatedEntry]:
        """Time each engine once, another one first each round, so that a drift meets all alike."""
        running = [entry for entry in self.entries if entry.running]
        turn = self.rounds % max(1, len(running))
        for entry in running[turn:] + running[:turn]:
            entry.round(timers_for(self.workload.device))
        self.rounds += bool(running)
        return running

    def _timelines(self) -> tuple[Timeline, ...]:
        """Trace a call of eager and of the best engine, where they run in this process."""
        best = Comparison("", tuple(entry.row() for entry in self.entries)).best
        names = {"eager", best.engine} if best else {"eager"}
        here = [entry for entry in self.entries if isinstance(entry, EngineEntry)]
        found = [entry.timeline() for entry in here if entry.engine.name in names]
        return tuple(one for one in found if one is not None)

    def comparison(self, name: str) -> Comparison:
        reference = self.reference
        return Comparison(
            workload=name,
            rows=tuple(entry.row() for entry in self.entries),
            profile=self.profile,
            reference=reference.kind if reference else "none",
            tolerance=reference.tolerance if reference else 0.0,
            remarks=tuple(_remarks(self.workload, reference)) if reference else (),
            environment=environment(),
            rounds=self.rounds,
            interrupted=self.interrupted,
            timelines=self.timelines,
        )


def _entry(engine: Engine | Isolated, workload: Workload) -> EngineEntry | IsolatedEntry:
    return engine.entry(workload) if isinstance(engine, Isolated) else EngineEntry(engine, workload)


def _remarks(workload: Workload, reference: Reference) -> Iterator[str]:
    if workload.share_parameters:
        yield "The engines share the parameters: memory would not hold a copy for each of them."
    yield from reference.doubts()


def _too_large(workload: Workload, engines: tuple[Engine | Isolated, ...]) -> bool:
    """Return True if a copy of the parameters for each engine takes half of the free memory."""
    device = workload.device
    running = sum(why_missing(engine.missing, device) is None for engine in engines)
    copies = running + 2  # for the reference, which is twice as wide
    needed = copies * sum(p.nbytes for p in workload.parameters())
    if device.type == "cuda":
        return 2 * needed > torch.cuda.mem_get_info(device)[0]
    names = os.sysconf_names
    if "SC_AVPHYS_PAGES" not in names:  # not on a Mac
        return False
    return 2 * needed > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
