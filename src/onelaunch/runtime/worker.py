"""A thread for captures beside calls: its jobs, and what they need to know of the calls."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onelaunch.beside import STUCK_S, is_stuck, make_way_in_hook
from onelaunch.call.ambient import Modes, noted_modes
from onelaunch.call.spec import has_strides
from onelaunch.call.tree import Flat, constants
from onelaunch.call_events import hook
from onelaunch.driver.overlaps import Overlaps
from onelaunch.driver.protocol import Driver
from onelaunch.driver.seeding import HostGenerators, generator_kinds, other_threads
from onelaunch.driver.select import beside_calls, random_states
from onelaunch.runtime.forks import condition
from onelaunch.runtime.graphed import Graphed
from onelaunch.state.iterators import KINDS as ITERATORS
from onelaunch.state.walk import SMALL, StateWalk

_IDLE_S = 5.0  # the seconds after which a thread without jobs ends; the next job starts another
_LAST_S = 60.0  # the seconds that a compiler may take at the exit of the process
_TRIES, _WAIT_S = 20, 1e-3  # looks at state that has changed, and the seconds between two of them
_STEP_S = 2e-5
"""The interpreter's switch interval during a capture. A call waits so long for the interpreter
after each operation; the usual interval is 5 ms."""


class Worker:
    """A thread that starts with its first job, and ends when there is none for a while. `next_job`:
    returns the next job, or None. Called under `changed`. `calls`: the threads in calls, for which
    the thread makes way wherever it is in Python. `changed`: to be held while jobs are added, and
    notified of each."""

    def __init__(
        self,
        name: str,
        next_job: Callable[[], Callable[[], object] | None],
        calls: list[int] | None = None,
    ) -> None:
        self._busy = False
        self.changed = condition()
        self._name, self._next, self._calls = name, next_job, calls
        self._thread: threading.Thread | None = None
        self._ended = False

    def wake(self) -> None:
        """Start the thread, or tell it of a job. Hold `changed`."""
        if not self.alive and not self._ended:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
            _running.add(self)
        self.changed.notify_all()

    def _work(self) -> None:
        if self._calls is None:
            self._work_on()
            return
        # One hook for all jobs: Python 3.12 instruments all code anew for the first of a process.
        making_way = hook(make_way_in_hook, gate=self._calls)
        making_way.begin()
        try:
            self._work_on()
        finally:
            making_way.end()
            sys.setprofile(None)

    def _work_on(self) -> None:
        while True:
            with self.changed:
                job = self._next()
                if job is None and not self._ended:
                    self.changed.wait(_IDLE_S)
                    job = self._next()
                if self._ended or job is None:
                    self._thread = None
                    return
                self._busy = True
            try:
                job()
            except Exception:  # noqa: BLE001  shown as any thread's; the thread goes on
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
            finally:
                del job  # it keeps tensors
                with self.changed:
                    self._busy = False
                    self.changed.notify_all()

    def end(self, seconds: float | None = None) -> None:
        """End the thread after the job that is under way, and wait for it unless it is stuck.
        `seconds`: see `is_stuck`."""
        with self.changed:
            self._ended, thread = True, self._thread
            self.changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            while thread.is_alive() and not is_stuck(seconds):
                thread.join(STUCK_S)

    @property
    def alive(self) -> bool:
        """True while there is a thread: the child of a fork has none."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def busy(self) -> bool:
        """True during a job."""
        return self._busy and self.alive


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for worker in list(_running):
        worker.end(_LAST_S)


class Footprint:
    """The changes by a call that other threads could notice. `unsure`: True if the call or another
    thread has drawn random numbers, as the call's operations were not noted."""

    def __init__(self, graphed: Graphed[..., Any], flat: Flat, device: torch.device) -> None:
        self._graphed, self._flat = graphed, flat
        self._warmup, self._others = graphed._recorder.warmup, other_threads()
        self._warmup.drawn, self.unsure = None, False
        self._host = HostGenerators()
        self._device = device
        self.reached = graphed._callee.reached(flat)
        self._walk = self.reached.walk()
        self._tensors = [t for _, t in self._walk.tensors()]
        self._versions = list(map(_version, self._tensors))
        self._drawn = random_states(device)
        self._modes = noted_modes()

    def none(self) -> bool:
        """Return whether the call has changed nothing, and drawn nothing."""
        return (
            self.none_in_tensors() and not self._modes() and not self.reached.changed(self._walk)[1]
        )

    def shows_all(self) -> bool:
        """Return whether changes by code that was watched before would be noticed. Those to a large
        container might not, where it is read by keys."""
        reads = self.reached.reads
        large = {key for key, (_, _, count) in self._walk.containers.items() if count > SMALL}
        return reads is not None and not any(place in large for place, _ in reads.items)

    def reads_all(self) -> bool:
        """Return whether calls before this one had read all that it has read."""
        return self.reached.reads is self._graphed._callee.reads

    def none_in_tensors(self) -> bool:
        """Return whether the call has written to no tensor of the state, and drawn nothing."""
        return (
            all(v is not None for v in self._versions)
            and list(map(_version, self._tensors)) == self._versions
            and self._has_drawn_nothing()
        )

    def _has_drawn_nothing(self) -> bool:
        """Return whether the call has drawn no random number. Other threads may have drawn. A
        generator or an iterator that its code has read counts as drawn from."""
        callee = self._graphed._callee
        kinds = (*generator_kinds(), *ITERATORS, itertools.count)
        walk = self._walk if self.reads_all() else callee.reached(self._flat).walk()
        read = walk.holding(lambda kind: issubclass(kind, kinds))
        values = (c.value for _, c in constants(self._flat.tree))
        if any(walk.used.get(slot.id) is not None for slot, _ in read):
            return False
        if any(isinstance(value, kinds) for value in values) or self._host.moved(callee.reads):
            return False
        if all(map(torch.equal, random_states(self._device), self._drawn)):
            return True
        if other_threads() == self._others:
            return False
        self.unsure = self._warmup.drawn is None
        return self._warmup.drawn == set()


class Unmoved:
    """The state that a call has read, as it is now. `before`: of a call without effects."""

    def __init__(
        self, graphed: Graphed[..., Any], flat: Flat, before: Footprint | None = None
    ) -> None:
        known = before is not None and before.reads_all()
        self._reached = before.reached if before and known else graphed._callee.reached(flat)
        self._walk: StateWalk | None = self._reached.walk()
        self._lock = condition()  # calls ask `holds` in threads of their own

    def holds(self) -> bool:
        """Return whether it is still so: then another run does as the call did. A run of another
        thread may put back in a moment what it has changed."""
        with self._lock:
            for _ in range(_TRIES):
                if self._walk is None:
                    return True
                after, changes = self._reached.changed(self._walk)
                if not changes:
                    self._walk = after
                    return True
                time.sleep(_WAIT_S)
            return False

    def hand_on(self) -> None:
        """Leave the walk to the next first call, as this one is captured."""
        with self._lock:
            self._walk = None
            self._reached.drop_tensors()


def _version(t: Tensor) -> int | None:
    """Return the number of in-place writes; None if torch does not count them."""
    return None if t.is_inference() else t._version


def copied(flat: Flat, driver: Driver) -> Flat | None:
    """Return a call with copies of its tensors; None if the copies have another layout or share
    memory otherwise, or a tensor has no memory now, as FSDP's parameters between uses."""
    if any(has_strides(t) and t.numel() and not t.untyped_storage().nbytes() for t in flat.tensors):
        return None
    copies = {id(t): _copy(t) for t in flat.tensors}
    tensors, overlaps = [copies[id(t)] for t in flat.tensors], Overlaps(driver)
    alike = all(a.stride() == b.stride() for a, b in zip(tensors, flat.tensors, strict=True))
    alike = alike and overlaps(*tensors) == overlaps(*flat.tensors)
    return flat._replace(tensors=tensors) if alike else None


def _copy(t: Tensor) -> Tensor:
    """Return a copy, which is an inference tensor only if `t` is one, whatever the mode."""
    with torch.inference_mode(t.is_inference()), torch.no_grad():
        return t.clone().requires_grad_(t.requires_grad)


def _on(device: torch.device) -> AbstractContextManager[object]:
    chosen = getattr(torch.get_device_module(device), "device", None)
    return nullcontext() if chosen is None else chosen(device)


@contextmanager
def switching() -> Generator[None]:
    """Return a context in which other threads wait little for the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_STEP_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def capturing(
    modes: Modes,
    driver: Driver,
    device: torch.device,
    under_way: Callable[[], object],
    check: Callable[[], object] = lambda: None,
) -> Generator[None]:
    """Return a context for captures beside the calls of a callable, under the modes of a call. No
    other capture runs meanwhile. `under_way`, `check`: see `beside_calls`."""
    with driver.exclusive(), modes.entered(), _on(device), switching():
        driver.synchronize(device)  # the copies were made on streams of other threads
        with beside_calls(under_way, check):
            yield
