"""One engine in a comparison: built, checked, timed in rounds, and then a row."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from onelaunch.tools.bench.engines.engine import Built, Engine, grad_mode
from onelaunch.tools.bench.reference import (
    SECONDS,
    Outputs,
    Reference,
    Verdict,
    equal,
    first_line,
    judge,
    message_of,
    outputs,
    said,
    snapshot,
    survived,
)
from onelaunch.tools.bench.rows import Row, Status
from onelaunch.tools.bench.timeline import Timeline, record_timeline
from onelaunch.tools.bench.timers import Timer, TimerName, Timing, one_call_us, settled, synchronize
from onelaunch.tools.bench.workload import Workload

RECOMPILE_LIMIT = 64
# They are about how an engine calls torch, which a reader of its row can do nothing about.
OUTDATED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)

OnStage = Callable[[str], object]


@dataclass
class EngineEntry:
    """An engine in a comparison, with the findings so far."""

    engine: Engine
    workload: Workload
    status: Status = "interrupted"
    reason: str | None = "stopped before its turn"
    built: Built | None = None
    error: float | None = None
    fresh_output: bool | None = None
    build_seconds: float | None = None
    memory_bytes: int | None = None
    about_us: float = 0.0
    samples: dict[TimerName, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    timed: Callable[[], object] | None = None
    draw: str = "given"  # that it is checked on

    @property
    def running(self) -> bool:
        """True while it is built and still to be timed."""
        return self.timed is not None

    @property
    def settled(self) -> bool:
        return settled(self.samples.get("wall", []))

    def prepare(self, reference: Reference, tell: OnStage = str) -> None:
        """Build the engine and check it; an exception becomes its reason.

        Args:
            tell: is told what is done, `"building"` or `"checking"`.
        """
        why = why_missing(self.engine.missing, self.workload.device)
        if why is not None:
            self.status, self.reason = "missing", why
            return
        with self._guarded():
            self.reason = "stopped while it was built or checked"
            tell("building")
            own = self.workload.copy()
            held = _reserved(own.device)
            start = time.perf_counter()
            # The trials of autotuners, graph breaks, and the packages that an exporter could use.
            hushed = only_errors("torch._dynamo", "torch.onnx")
            with hushed, contextlib.redirect_stderr(io.StringIO()):
                self.built = self.engine.build(own)
            synchronize(own.device)
            self.build_seconds = time.perf_counter() - start
            tell("checking")
            self._check(self.built, reference)
            if self.status == "wrong":
                self.close()
                return
            self._measure_memory(self.built, held)
            args, kwargs = self.workload.copy_inputs()
            self.timed = self.built.bare or functools.partial(self.built.call, *args, **kwargs)
            self.about_us = one_call_us(self.timed, own.device)

    def _check(self, built: Built, reference: Reference) -> None:
        """Call it on each case's inputs, and see whether the first result outlives the second."""
        verdicts: list[Verdict] = []
        kept: Any = None
        before: Outputs = []
        start = time.monotonic()
        for case in reference.cases:
            if verdicts and time.monotonic() - start > SECONDS:
                left = [c.name for c in reference.cases[len(verdicts) :]]
                self.notes.append(f"{SECONDS:g} s were up before the draws {', '.join(left)}")
                break
            self.draw = case.name
            args, kwargs = self.workload.copy_inputs(case.inputs)
            result = built.call(*args, **kwargs)
            verdicts.append(judge(outputs(result), case, case.tolerance))
            if kept is None:
                kept, before = result, snapshot(result)
            elif self.fresh_output is None and not equal(case.eager, reference.cases[0].eager):
                self.fresh_output = survived(kept, before)
            if verdicts[-1].wrong is not None and reference.repeatable:
                break
        self.error = max((v.error for v in verdicts if v.error == v.error), default=None)
        wrong = self._on_draw(verdicts[-1].wrong)
        self.draw = "given"
        if not reference.repeatable:
            self.status, self.reason = "unchecked", reference.doubt
        elif wrong is not None:
            self.status, self.reason = "wrong", wrong
        else:
            self.status, self.reason = "ok", None

    def _on_draw(self, what: str | None) -> str | None:
        """Add the draw to the text of a mistake that was found on it."""
        return what if what is None or self.draw == "given" else f"{what}, on the draw {self.draw}"

    def _measure_memory(self, built: Built, held: int | None) -> None:
        if held is not None and built.outside:
            self.notes.append("it holds memory of the GPU that torch does not count")
        elif held is not None:
            self.memory_bytes = max(0, (_reserved(self.workload.device) or 0) - held)
        elif built.memory_bytes is not None:
            self.memory_bytes = built.memory_bytes()

    def round(self, timers: tuple[Timer, ...]) -> None:
        """Take one round of samples with every timer."""
        with self._guarded():
            for timer in timers:
                if self.timed is None:
                    return
                samples = timer.sample(self.timed, self.about_us)
                self.samples.setdefault(timer.name, []).extend(samples)
                if timer.name == "wall":
                    self.about_us = samples[-1]

    def timeline(self) -> Timeline | None:
        """Trace a call, after all timing; None if it is not running, or cannot be traced."""
        if self.timed is None:
            return None
        engine = self.engine
        try:
            with warnings.catch_warnings(), grad_mode(engine.mode):
                warnings.simplefilter("ignore")
                return record_timeline(
                    engine.name, engine.title, self.timed, self.workload.device, self.about_us
                )
        except Exception:  # noqa: BLE001  an engine may raise anything, and its times are known
            return None

    @contextlib.contextmanager
    def _guarded(self) -> Generator[None]:
        """Enter the engine's grad mode; warnings become notes, and an exception the reason."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            try:
                with grad_mode(self.engine.mode):
                    yield
            except Exception as error:  # noqa: BLE001  an engine may raise anything
                self.status = "failed"
                memory = "out of memory: " if _out_of_memory(error) else ""
                self.reason = self._on_draw(f"{memory}{said(error)}")
                self.close()
        for warning in caught:
            if issubclass(warning.category, OUTDATED):
                continue
            note = f"{warning.category.__name__}: {first_line(warning.message)}"
            if note not in self.notes:
                self.notes.append(note)

    def close(self) -> None:
        """Free what the engine holds."""
        built, self.built, self.timed = self.built, None, None
        if built is not None:
            built.close()

    def finish(self) -> None:
        """Ask the engine for its notes, then free it."""
        if self.built is not None and self.running:
            self.notes = self.built.notes() + self.notes
        self.close()

    def row(self) -> Row:
        """Return the findings as data."""
        timings = {name: Timing.of(found) for name, found in self.samples.items() if found}
        status, reason = self.status, self.reason
        if status in ("ok", "unchecked") and "wall" not in timings:
            status, reason = "interrupted", "checked, but stopped before it was timed"
        return Row(
            engine=self.engine.name,
            title=self.engine.title,
            status=status,
            reason=reason,
            error=self.error if self.error != float("inf") else None,
            fresh_output=self.fresh_output,
            build_seconds=self.build_seconds,
            wall=timings.get("wall"),
            host=timings.get("host"),
            gpu=timings.get("gpu"),
            noisy="wall" in timings and not self.settled,
            memory_bytes=self.memory_bytes,
            code=self.engine.code(self.workload),
            notes=tuple(self.notes),
        )


def why_missing(missing: Callable[[torch.device], str | None], device: torch.device) -> str | None:
    """Ask an engine why it cannot run, or None; a package that does not import is a reason, too."""
    try:
        return missing(device)
    except Exception as error:  # noqa: BLE001  a package may raise anything
        return f"its package does not work here: {said(error)}"


@contextlib.contextmanager
def isolated(device: torch.device, compiles: bool = True) -> Generator[None]:
    """Leave the random state, and the limits of the compiler, as they were; free what was held.

    Args:
        compiles: whether code is compiled, by engines that share the model's code: Dynamo counts
            compilations by code.
    """
    with contextlib.ExitStack() as contexts:
        contexts.callback(free, device)
        contexts.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        if compiles:
            config: Any = importlib.import_module("torch._dynamo").config
            contexts.enter_context(config.patch(recompile_limit=RECOMPILE_LIMIT))
        yield


def free(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_compiler() -> None:
    """Drop the code that was compiled in this process."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()


@contextlib.contextmanager
def only_errors(*names: str) -> Generator[None]:
    """Keep loggers from saying less than errors."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _out_of_memory(error: Exception) -> bool:
    """Return True for an error of an allocator, torch's for the CPU included."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "DefaultCPUAllocator" in message_of(error)


def _reserved(device: torch.device) -> int | None:
    """Count the bytes that the caching allocator holds with nothing idle; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
