"""`graph(f, compile="later")`: eager's kernels are replayed until Inductor's are there.

A thread compiles and captures a signature once it is recorded. If the result of the new recording
agrees with eager's, later calls replay it in place of the old one.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch

from onelaunch.beside import begin_run
from onelaunch.call.ambient import Modes, refresh_mode_flag, runs_inline
from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat, flatten, unflatten
from onelaunch.driver.distance import close
from onelaunch.errors import CaptureError, let_go
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime.candidate import Candidate
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.options import Options
from onelaunch.runtime.table import TableEntry
from onelaunch.runtime.worker import Footprint, Unmoved, Worker, capturing, copied

P = ParamSpec("P")
R = TypeVar("R")

_TRIES, _WAIT_S = 20, 0.01  # tries to replay a new recording, and the seconds between two of them
_MOST_ATTEMPTS = 2  # the attempts at each signature: it is compiled again if its state has moved


class CompilesLater(Graphed[P, R]):
    """A callable that replays eager's kernels until compiled kernels are there."""

    def __init__(self, fn: Callable[P, R], options: Options, *rest: Any, **named: Any) -> None:
        super().__init__(fn, replace(options, compile=False), *rest, **named)
        self.options = options
        compiled = replace(options, compile=True)
        self._compiled: Graphed[P, R] = Graphed(fn, compiled, None, self._callee.root)
        """Makes the compiled recordings, until they take the places of eager's."""
        self._due = deque[Callable[[], None]]()
        self._tried = Counter[CallSpec]()
        this: Any = weakref.ref(self)
        self._worker = Worker(f"onelaunch compiles {self._name}", lambda: _next_of(this))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if runs_inline(self):
            return self.fn(*args, **kwargs)
        if self._due and not self._worker.busy:
            with self._worker.changed:
                self._worker.wake()
        result = self._replayed(args, kwargs)
        return self._miss(args, kwargs) if result is MISS else result

    def _replay_new(self, entry: TableEntry, candidate: Candidate) -> R | Miss:
        """See `Graphed._replay_new`. A recording that stays is to be compiled."""
        example = copied(self._signatures.flat(candidate.args, candidate.kwargs), candidate.driver)
        before = Footprint(self, candidate.flat, candidate.device)
        result = super()._replay_new(entry, candidate)
        if entry in self._table.entries:
            self._want(entry, example, candidate.flat, before.none())
        return result

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Record the signature of this call ahead of time; see `Graphed.capture`. The recording is
        to be compiled."""
        call = self._call(args, kwargs)
        flat = call.flat
        example, before = copied(flat, call.driver), Footprint(self, flat, call.device)
        earlier, free = set(map(id, self._table.entries)), False

        def learn(result: object) -> None:
            nonlocal free
            free = before.none_in_tensors()

        self._capture_ahead(args, kwargs, learn)
        for entry in self._table.entries:
            if id(entry) not in earlier:
                self._want(entry, example, flat, free and not entry.captured.has_effects())

    def _want(self, entry: TableEntry, example: Flat | None, flat: Flat, free: bool) -> None:
        """Have a recording compiled. `example`: a copy of the call `flat`. `free`: whether its call
        changes nothing that other threads could notice."""
        if self._tried[entry.spec] >= _MOST_ATTEMPTS:
            return
        self._tried[entry.spec] += 1
        unsuited = self._ranks.several or entry.captured.pair is not None
        if example is None or unsuited or not free:
            self._tell("it changes state, draws random numbers, or has a backward")
            return
        read = Unmoved(self, flat)
        job = functools.partial(self._compile, entry.spec, example, Modes(), read)
        self._due.append(job)  # for the next call to start: nothing compiles beside a `warm_up`

    def _compile(self, spec: CallSpec, example: Flat, modes: Modes, read: Unmoved) -> None:
        """Compile and capture a call, and have it replayed if it agrees with eager. The state that
        the call has read must stay as it was: else a run could change it, or draw."""
        args, kwargs = unflatten(example.tree, example.tensors)
        driver, device = self._callee.driver_and_device(example)
        compiled: Any = self._compiled
        fn: Any = self.fn

        def check() -> None:
            if not read.holds():
                raise CaptureError("OL109", "its state has moved")

        try:
            with capturing(modes, driver, device, lambda: self._table.running, check):
                begin_run()
                compiled.capture(*args, **kwargs)
                result, entry = _replayed(compiled, args, kwargs)
                begin_run()
                agrees = _results_agree(result, fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  a compiler's; the recording that works stays
            let_go(error)
            line = str(error).partition("\n")[0][:200]
            if not read.holds():
                return
            if isinstance(error, CaptureError):
                self._tell(f"compiled, it is refused: [{error.code}] {error.what}")
            else:
                self._tell(f"the compiler failed, {type(error).__name__}: {line}")
            return
        if entry is None:
            return  # what it relies on has moved meanwhile
        if not agrees:
            compiled._table.drop(entry)
            self._tell("the compiled result differs from eager's")
            return
        with driver.exclusive():
            self._take_over(entry, spec)

    def _take_over(self, new: TableEntry, spec: CallSpec) -> None:
        """Put a compiled recording in the place of eager's."""
        table = self._compiled._table
        if new not in table.entries:  # `reset` meanwhile
            return
        with table.lock:
            table.keep(entry for entry in table.entries if entry is not new)
        earlier = [entry for entry in self._table.entries if entry.spec == spec]
        new.status = earlier[0].status if earlier else self._signatures.status(spec)
        new.pool_member.forget = weakref.WeakMethod(self._table.evicted)
        self._table.counts.captured(new.captured.facts.seconds)
        self._table.add(new)
        for entry in earlier:
            self._table.drop(entry)

    def _tell(self, why: str) -> None:
        what = f"`{self._name}` keeps eager's kernels for a signature: {why}"
        self._notices.warn("OL316", what, "later")

    # For users.

    @property
    def memory_bytes(self) -> int:
        """Device bytes of its pool, and of the pool of compiled recordings."""
        return super().memory_bytes + self._compiled._pool.memory_bytes

    def reset(self) -> None:
        """Free every recording and forget every signature; see `Graphed.reset`."""
        with self._worker.changed:
            self._due.clear()
        self._tried.clear()
        self._compiled.reset()
        super().reset()


def _next_of(this: weakref.ref[CompilesLater[..., Any]]) -> Callable[[], None] | None:
    graphed = this()
    return graphed._due.popleft() if graphed is not None and graphed._due else None


def _replayed(
    graphed: Graphed[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, TableEntry | None]:
    """Replay a call, and return its result with the recording; None if none fits."""
    for _ in range(_TRIES):
        refresh_mode_flag()  # modes that other threads are in leave it wrong now and then
        for entry in graphed._table.entries:
            result = entry.call(args, kwargs)
            if result is not MISS:
                return result, entry
        time.sleep(_WAIT_S)
    return MISS, None


def _results_agree(result: Any, expected: Any) -> bool:
    """Return whether two results agree, but for the rounding of other kernels."""
    mine, theirs = flatten(result), flatten(expected)
    if mine.tree != theirs.tree:
        return False
    with torch.no_grad():
        return all(
            (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and close(a, b)
            for a, b in zip(mine.tensors, theirs.tensors, strict=True)
        )
