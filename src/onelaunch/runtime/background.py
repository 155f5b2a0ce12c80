"""`graph(f, capture="background")`: captures in a thread of their own, while calls run eagerly.

The first call is watched, in its own thread. If it has changed nothing and drawn no random number,
another thread may run the callable too, while the state that it read stays as it was. First calls
of other signatures are checked alike, but watched only once one runs code that is new. Then the
signature is captured beside the calls, which run eagerly meanwhile. A callable that changes state,
draws, or has a backward is captured as without this option, in the thread of a call: its capture
puts stand-ins into state that other calls would read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, auto
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from onelaunch.beside import STUCK_S, CaptureBeside, is_stuck
from onelaunch.call.ambient import Modes
from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat, flatten, unflatten
from onelaunch.call_events import is_profiled
from onelaunch.capture.run import NeedsTheCaller
from onelaunch.driver.protocol import Driver
from onelaunch.driver.refusals import DrawsAfterAll
from onelaunch.errors import CaptureError, let_go
from onelaunch.frames.codes import CodeFacts
from onelaunch.frames.unwatched_code import UnwatchedCode
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime.candidate import Call
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.signature import spec_of
from onelaunch.runtime.worker import Footprint, Unmoved, Worker, capturing, copied, switching
from onelaunch.unwinding import shared_settings

P = ParamSpec("P")
R = TypeVar("R")

_TRY_S = 5e-4  # the seconds between looks at who has the lock
_MOST_WATCHED = 8
"""The calls of a signature that are watched. After so many its state moves too often."""


class _State(Enum):
    """The knowledge of a signature."""

    NEW = auto()
    WANTED = auto()
    DONE = auto()
    ITS_OWN = auto()  # it is captured in the thread of a call


@dataclass(slots=True, eq=False)
class _Wanted:
    """A signature and an example of its calls."""

    state: _State = _State.NEW
    calls: int = 0  # the calls that found no recording
    moves: int = 0  # how often its state had moved since a call was watched
    example: Flat | None = None
    modes: Modes | None = None
    found: Unmoved | None = None
    """The state that the watched call has read; None until the capture if a larger size's
    recording has made the call."""

    @property
    def is_known(self) -> bool:
        """True while a run would do as the first call."""
        return self.found is None or self.found.holds()


class Captures:
    """The captures of one callable beside its calls, in a thread. `off`: True if the callable is
    captured in the threads of calls."""

    def __init__(self, graphed: CapturesBeside[..., Any]) -> None:
        self.graphed = weakref.ref(graphed)
        self.off = False
        calls = graphed._table.running
        self.worker = Worker(f"onelaunch captures of {graphed._name}", self._next, calls)
        self._wanted: dict[Hashable, _Wanted] = {}
        self._changed = self.worker.changed
        self._runs = 0  # the calls that run eagerly beside captures
        self._calm = False
        """True if the last call has changed nothing. The next runs unwatched while it runs no other
        code."""
        self._notes = False  # whether operations of watched calls are noted: other threads draw
        self._capturing: _Wanted | None = None  # the signature of the last capture that began
        self._code: list[CodeType] | None = None
        """The code of the very first call that is yet to be read; None before that call."""

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        normal: Callable[[], R],
        eager: Callable[[], R],
    ) -> R:
        """Make a call that no recording fits. `normal`: makes it as without this option; may wait
        for a capture of another callable. `eager`: runs it eagerly."""
        graphed = self.graphed()
        assert graphed is not None
        if self.off:
            return self._alone(normal, eager)
        call = graphed._call(args, kwargs)
        if graphed._table.unserved.is_unrecordable(call):
            return normal()
        flat, driver, spec = call.flat, call.driver, spec_of(call)
        key = graphed.served_alike(flat, spec)
        wanted = self._of(key, 4 * graphed.options.max_recordings)
        if wanted is None:
            return normal()
        state, result = wanted.state, MISS  # a capture may change it meanwhile
        if state is _State.DONE:
            result = graphed.at_own(call)
        elif state is _State.NEW:
            result = self._at_larger(graphed, wanted, call)
        if result is not MISS:
            return result
        wants = state is _State.WANTED
        served = state is _State.DONE and graphed.is_served(flat, spec)
        moved = not served if state is _State.DONE else wants and not wanted.is_known
        if moved:
            self._forget(wanted)
            if self.off:
                return self._alone(normal, eager)
        elif wants:
            self._want(wanted, call)
            result = graphed.at_larger(call)
            return self._beside(eager, normal) if result is MISS else result
        elif state is _State.NEW and not self._is_due(key, wanted.calls):
            return self._beside(eager, normal)
        if not self._lock(driver, moved):
            return self._beside(eager, normal)
        try:
            if wanted.state is not _State.NEW:
                return normal()
            return self._learned(graphed, wanted, call, normal, eager)
        finally:
            driver.lock.release()

    def _at_larger(self, graphed: CapturesBeside[..., Any], wanted: _Wanted, call: Call) -> Any:
        """Make the first call of a signature by a recording for larger sizes, and have its own
        captured. It need not be watched: the bucket's proof has shown that it does the same."""
        example = copied(call.flat, call.driver) if graphed.has_larger(call.flat) else None
        if example is None:  # a call may write into its arguments
            return MISS
        result = graphed.at_larger(call)
        if result is not MISS:
            with self._changed:
                if wanted.state is _State.NEW:  # else a call of another thread was first
                    wanted.example, wanted.modes, wanted.found = example, Modes(), None
                    wanted.state = _State.WANTED
                    self.worker.wake()
        return result

    def _beside(self, eager: Callable[[], R], normal: Callable[[], R]) -> R:
        """Run a call eagerly, while a capture may go on beside."""
        with self._changed:
            self._runs += not self.off
            off = self.off  # since this call has asked
        return self._alone(normal, eager) if off else self._counted(eager)

    def _counted(self, eager: Callable[[], R]) -> R:
        """Run a call eagerly, which `_runs` counts already."""
        try:
            return eager()
        finally:
            with self._changed:
                self._runs -= 1
                self._changed.notify_all()

    def _alone(self, normal: Callable[[], R], eager: Callable[[], R]) -> R:
        """Make a call that may be captured in its thread, once no call runs beside captures. If
        these seem to wait for this call, as for a lock that its caller holds, it runs eagerly."""
        with self._changed:
            while self._runs or self.worker.busy:
                if not self._changed.wait(STUCK_S) and (is_stuck() or not self.worker.busy):
                    self._runs += 1
                    break
            else:
                eager = normal
        return normal() if eager is normal else self._counted(eager)

    def _of(self, key: Hashable, most: int) -> _Wanted | None:
        """Return the facts about a signature; None if it is new, and `most` are known."""
        with self._changed:
            if key not in self._wanted and len(self._wanted) >= most:
                return None
            wanted = self._wanted.setdefault(key, _Wanted())
            wanted.calls += 1
            return wanted

    def _lock(self, driver: Driver, waits: bool) -> bool:
        """Take the lock of warm-ups and captures. Return False if a capture beside calls has it.
        `waits`: whether to wait for that capture, too, as the call may do what disturbs it. A
        capture that may wait for a lock of the call's own caller is not waited for."""
        if driver.lock.acquire(blocking=False):
            return True
        while waits or not self.worker.busy:
            if driver.lock.acquire(timeout=_TRY_S):
                return True
            if is_stuck():
                return False
        return False

    def _learned(
        self,
        graphed: Graphed[..., Any],
        wanted: _Wanted,
        call: Call,
        normal: Callable[[], R],
        eager: Callable[[], R],
    ) -> R:
        """Make the first call of a signature, and learn whether it can be captured beside calls. It
        is watched, unless it runs the code of calls that were. If it has read what no call had read
        before, that may have changed: the next call shows it."""
        flat, look = call.flat, UnwatchedCode(graphed._callee.codes)
        alone = not graphed._ranks.several  # else its runs would meet other runs of other processes
        if graphed._callee.reads is None and self._code != [] and alone:
            return self._shown(look, eager)
        example, before = copied(flat, call.driver), Footprint(graphed, flat, call.device)
        if watched := not (self._calm and before.shows_all() and not is_profiled()):
            warmup = graphed._recorder.warmup
            warmup.notes_all = self._notes
            try:
                result = normal()
            finally:
                warmup.notes_all = None
        else:
            with look.looking():
                result = eager()
        free = not any(t.requires_grad for t in (*flat.tensors, *flatten(result).tensors))
        self._calm = free and alone and before.none() and not look.found
        self._notes |= before.unsure
        self.off |= watched and not (before.unsure or (self._calm and example is not None))
        if self._calm and example is not None and before.reads_all():
            found = Unmoved(graphed, flat, before)
            with self._changed:
                wanted.example, wanted.modes, wanted.found = example, Modes(), found
                wanted.state = _State.WANTED
                self.worker.wake()
            graphed._table.unserved.clear()  # its recording is on the way
        return result

    def _shown(self, look: UnwatchedCode, eager: Callable[[], R]) -> R:
        """Make the very first call, which shows its code, or a call until that is read. To read it
        takes half as long as to watch the call does, and goes on beside calls."""
        if self._code is None and not is_profiled():
            with look.looking():
                result = eager()
        else:
            result = eager()
        with self._changed:
            self._code = look.found if self._code is None else self._code
            self.worker.wake()  # in the child of a fork there is none
        return result

    def _read(self) -> None:
        """Read the code of the very first call, piece by piece between calls."""
        graphed = self.graphed()
        calls = CaptureBeside(lambda: [] if graphed is None else graphed._table.running)
        with switching():
            while self._code:
                calls.wait()
                CodeFacts(self._code.pop(), unread=False).meet()

    def _forget(self, wanted: _Wanted) -> None:
        """Have a call of a signature watched again, as its state has moved."""
        with self._changed:
            wanted.state, wanted.moves = _State.NEW, wanted.moves + 1
            self.off |= wanted.moves >= _MOST_WATCHED

    def _became(self, wanted: _Wanted, state: _State, moves: int) -> None:
        with self._changed:
            if wanted.state is _State.WANTED and wanted.moves == moves:  # else it has moved
                wanted.state, wanted.example = state, None

    def _want(self, wanted: _Wanted, call: Call) -> None:
        with self._changed:
            under_way = self.worker.busy and self._capturing is wanted  # else lost, as in a fork
            if wanted.example is None and not under_way:
                wanted.example, wanted.modes = copied(call.flat, call.driver), Modes()
            self.worker.wake()

    def _next(self) -> Callable[[], None] | None:
        """Return the capture that would serve most of the calls so far, or what goes before."""
        if self._code:
            return self._read
        if self.off:
            return None
        wanted = self._wanted.items()
        due = [k for k, w in wanted if w.state is _State.WANTED and w.example and w.modes]
        key = max(due, key=self._gain, default=None)
        return None if key is None else functools.partial(self._capture, self._wanted[key])

    def _gain(self, key: Hashable) -> int:
        """Return how many of the calls so far a recording for one key would have served."""
        graphed, waiting = self.graphed(), (_State.NEW, _State.WANTED)
        found = [(k, w.calls) for k, w in list(self._wanted.items()) if w.state in waiting]
        return sum(n for k, n in found if graphed is not None and graphed.covers(key, k))

    def _is_due(self, key: Hashable, calls: int) -> bool:
        """Return whether a new signature may be learned now. A larger bucket comes first, unless it
        is called much less: its recording may serve this signature, too."""
        graphed, every = self.graphed(), list(self._wanted.items())
        new = (k for k, w in every if w.state is _State.NEW and 2 * w.calls >= calls and k != key)
        return graphed is None or not any(graphed.covers(k, key) for k in new)

    def _capture(self, wanted: _Wanted) -> None:
        graphed, example, modes = self.graphed(), wanted.example, wanted.modes
        self._capturing, wanted.example = wanted, None
        if graphed is None or example is None or modes is None:
            wanted.state = _State.ITS_OWN
            return
        args, kwargs = unflatten(example.tree, example.tensors)
        call = graphed._call(args, kwargs, example)
        running, spec = graphed._table.running, None
        found, moves = wanted.found, wanted.moves

        settings = shared_settings()

        def under_way() -> list[int]:
            if wanted.state is _State.WANTED and shared_settings() != settings:
                self._forget(wanted)
            if wanted.state not in (_State.WANTED, _State.DONE) or wanted.moves != moves:
                raise CaptureError("OL109", "its state has moved")
            return running

        try:
            with capturing(modes, call.driver, call.device, under_way):
                if found is None:
                    wanted.found = found = Unmoved(graphed, example)
                elif not found.holds():
                    self._forget(wanted)
                    return
                graphed.widen(example)
                spec = spec_of(call)
                graphed.capture(*args, **kwargs)
                found.hand_on()
        except Exception as error:  # noqa: BLE001  a call finds it again, alone
            let_go(error)
            if wanted.moves == moves and found is not None and not found.holds():
                self._forget(wanted)
            needs_calls = isinstance(error, NeedsTheCaller | DrawsAfterAll)
            self.off |= needs_calls or getattr(error, "code", "") == "OL110"
            self._became(wanted, _State.ITS_OWN, moves)
            if spec is not None:
                graphed._signatures.statuses.pop(spec, None)
        else:
            self._became(wanted, _State.DONE, moves)
            with capturing(modes, call.driver, call.device, under_way):
                graphed.widen(example)
        finally:
            if wanted.moves == moves:  # else it may be wanted anew
                wanted.found = None
            if wanted.state is not _State.DONE:
                graphed._table.index = {}  # calls at larger sizes have to ask again


class CapturesBeside(Graphed[P, R]):
    """A callable that is captured beside its calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._captures = Captures(self)

    def served_alike(self, flat: Flat, spec: CallSpec) -> Hashable:
        """Return a key of all calls that the recording for this call will serve."""
        return spec

    def covers(self, key: Any, other: Any) -> bool:
        """Return whether a recording for one key of `served_alike` may serve calls of another."""
        return key == other

    def is_served(self, flat: Flat, spec: CallSpec) -> bool:
        """Return whether a recording serves a call that has missed it in a passing state."""
        return any(e.spec == spec and e.captured.guard.check() for e in self._table.entries)

    def at_own(self, call: Call) -> R | Miss:
        """Make a call by a recording for its sizes; `MISS` if none fits. It may have missed one by
        a flag that modes of other threads set (see `refresh_mode_flag`)."""
        return self._replayed(call.args, call.kwargs)

    def has_larger(self, flat: Flat) -> bool:
        """Return whether a recording for larger sizes may serve a call."""
        return False

    def at_larger(self, call: Call) -> R | Miss:
        """Make a call by a recording for larger sizes; return `MISS` if there is none. Its own
        sizes are to be captured: the next call need not ask for that."""
        return MISS

    def widen(self, example: Flat) -> None:
        """Prove that a recording serves smaller sizes than its own, if that was not tried yet."""

    def _recorded_or_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return self._captures.call(
            args,
            kwargs,
            lambda: super(CapturesBeside, self)._recorded_or_eager(args, kwargs),
            lambda: self._beside(args, kwargs),
        )

    def _beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run a call eagerly: no capture that another thread makes now touches its state."""
        self._begin_eager_run("background")
        return self._run_eagerly(args, kwargs)

    def reset(self) -> None:
        """Free every recording and forget every signature; see `Graphed.reset`."""
        self._captures.worker.end()
        self._captures = Captures(self)
        super().reset()
