"""The base of `split/graphed.py` and `dynamo/function.py`: callables that run in pieces where they
cannot be captured whole."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from onelaunch.capture.recording import Recording
from onelaunch.errors import CaptureError, GraphWarning
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime.candidate import Call, SignatureStatus
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.phase import Phase, RunsEagerly
from onelaunch.runtime.stats import GraphStats, SplitModule, summed
from onelaunch.source import user_line

P = ParamSpec("P")
R = TypeVar("R")

_UNSETTLED = 32
"""The calls in pieces after which the warning is given, even if a piece was never launched."""
_MOST_NAMED = 8  # the most modules that a message names


@dataclass(slots=True)
class Told:
    """The measured call in pieces that the warning tells of, and its cost."""

    done: bool = False
    calls: int = 0  # the calls in pieces so far
    launches: int = 0
    host_us: float = 0.0


class InPieces(Graphed[P, R]):
    """A callable, graphed whole where it can be captured. A refused signature runs in pieces."""

    PIECES: str  # the noun for the graphed pieces in a message

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told = Told()
        self._refusals: dict[tuple[str, str | None], SplitModule] = {}
        """(code, line) -> the refusal of a signature."""

    @abstractmethod
    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run a refused call."""

    @abstractmethod
    def _every_piece(self) -> Iterable[Graphed[..., Any]]:
        """Return the whole and the pieces below it, outer pieces first, without repeats."""

    def _phase(self, call: Call) -> Phase:
        phase = super()._phase(call)
        if isinstance(phase, RunsEagerly) and phase.code == "OL302":
            self._split(CaptureError("OL302", phase.why))
            return RunsEagerly(reason=phase.code)
        return phase

    def _stay_eager(self, status: SignatureStatus, error: CaptureError) -> Miss:
        status.refusal.code, status.refusal.training = error.code, self._callee.training
        self._table.counts.reason = error.code
        self._split(error)
        return MISS

    def _split(self, error: CaptureError) -> None:
        where = error.where or user_line()
        refusal = SplitModule(self._name, error.code, error.what, where)
        self._refusals.setdefault((error.code, where), refusal)

    def _run_callable(self, *args: Any, **kwargs: Any) -> R:
        if not self._refusals:
            return super()._run_callable(*args, **kwargs)
        # A piece is no call of the user's own.
        measures = not self._told.done and self._user is self
        with self._watched() if measures else nullcontext():
            return self._in_pieces(args, kwargs)

    @contextmanager
    def _watched(self) -> Generator[None]:
        """Measure a run in pieces. Warn after the first run without a warm-up or capture."""
        before, started = self.stats(), time.perf_counter()
        yield
        host_us = (time.perf_counter() - started) * 1e6
        after, told = self.stats(), self._told
        told.calls += 1
        settled = (after.captures, after.warmup_calls) == (before.captures, before.warmup_calls)
        if settled or told.calls >= _UNSETTLED:
            told.done = True
            told.launches, told.host_us = after.replays - before.replays, host_us
            self._notices.give(_warning(self._name, self.PIECES, self.stats(), settled))

    # For users.

    @property
    def recordings(self) -> list[Recording]:
        """The recordings of the whole, then of its pieces; newest first within each."""
        return list(self.stats().recordings)

    @property
    def memory_bytes(self) -> int:
        """Device bytes that the recordings hold, with a shared pool counted once."""
        return self._pool.memory_bytes if self.recordings else 0

    def stats(self) -> GraphStats:
        """Return the figures of the whole and its pieces together, and the split modules."""
        figures, split = list[GraphStats](), list[SplitModule]()
        for piece in self._every_piece():
            if isinstance(piece, InPieces):
                figures.append(super(InPieces, piece).stats())
                split += piece._refusals.values()
            else:
                figures.append(piece.stats())
        return GraphStats(
            **summed(figures),
            split=tuple(split),
            split_launches=self._told.launches,
            split_us=self._told.host_us,
        )

    def reset(self) -> None:
        """Free every recording of the whole and its pieces, and forget every signature and refusal;
        see `Graphed.reset`."""
        for piece in list(self._every_piece()):
            if isinstance(piece, InPieces):
                super(InPieces, piece).reset()
                piece._refusals.clear()
            else:
                piece.reset()
        self._told = Told()


def _warning(name: str, pieces: str, stats: GraphStats, settled: bool) -> GraphWarning:
    """Make the warning of a callable that runs in pieces. It names the modules that run as they
    are, the lines that are the reason, and the cost of a call. `pieces`: the noun for the graphed
    pieces. `settled`: True if each piece was launched, or runs as it is for good."""
    # Outer modules come first, so that a line is its innermost module's.
    of_line = {refusal.where: refusal for refusal in stats.split}
    whole = list(dict.fromkeys(f"`{refusal.module}`" for refusal in stats.split))
    what = (
        f"`{name}` runs in pieces: {_listed(whole)}, with {pieces} graphed; "
        f"a call is {stats.split_launches} launch{'es' * (stats.split_launches != 1)} and "
        f"{stats.split_us:.0f} us of host "
        "time, waits for the device included"
    )
    if not settled:
        what += "; some pieces still get other sizes or arguments at each call, and run as they are"
    lines = [
        f"{refusal.where or refusal.module} ({refusal.code}, {refusal.what})"
        for refusal in of_line.values()
    ]
    return GraphWarning("OL311", what, where="\n         ".join(lines))


def _listed(names: list[str]) -> str:
    most = names[:_MOST_NAMED]
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    run = "run as they are" if len(names) > 1 else "runs as it is"
    return f"{', '.join(most)}{rest} {run}"
