"""`graph(f, capture="background")`: captures in a thread of their own, while calls run eagerly.

The first call of a signature is watched, in its own thread. If it has changed nothing and drawn no
random number, another thread may run the callable at the same time. Then the signature is captured
beside the calls, which run eagerly meanwhile. A callable that changes state, draws, or has a
backward is captured as without this option, in the thread of a call: its capture puts stand-ins
into state that other calls would read.
"""

from __future__ import annotations

import atexit
import copy
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Hashable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat, flatten, unflatten
from onelaunch.capture.job import NeedsTheCaller
from onelaunch.driver.protocol import Driver
from onelaunch.driver.select import beside_calls
from onelaunch.errors import CaptureError, let_go
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.signature import spec_of
from onelaunch.unwinding import AUTOCAST

P = ParamSpec("P")
R = TypeVar("R")

_IDLE_S = 5.0
"""The seconds after which a thread without captures ends; the next one starts another."""
_STEP_S = 2e-5
"""The interpreter's switch interval during a capture: a call waits so long for the interpreter,
after each operation, and not the usual 5 ms."""
_TRY_S = 5e-4
"""The seconds between looks at who has the lock."""
_MOST = 8
"""The recordings of a signature that are made beside calls. After so many its state moves too
often."""


class _State(Enum):
    """The knowledge of a signature."""

    NEW = auto()
    WANTED = auto()
    DONE = auto()
    ITS_OWN = auto()
    """It is captured in the thread of a call."""


@dataclass(slots=True, eq=False)
class _Wanted:
    """A signature and an example of its calls.

    Attributes:
        calls: the calls that found no recording.
        made: its recordings.
    """

    state: _State = _State.NEW
    calls: int = 0
    made: int = 0
    example: Flat | None = None
    modes: _Modes | None = None


class _Modes:
    """The modes of this thread that belong to a signature, to be entered in another thread."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in AUTOCAST
        ]

    @contextmanager
    def entered(self) -> Generator[None]:
        with ExitStack() as entered:
            entered.enter_context(torch.inference_mode(self._inference))
            entered.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._casts:
                if enabled:
                    cast = torch.autocast(kind, dtype, cache_enabled=self._cache)
                    entered.enter_context(cast)
            yield


class _Footprint:
    """The changes by a call that other threads could notice."""

    def __init__(self, graphed: Graphed[..., Any], flat: Flat, device: torch.device) -> None:
        self._device = device
        self._reached = graphed._callee.reached(flat)
        self._walk = self._reached.walk()
        self._tensors = [t for _, t in self._walk.tensors()]
        self._versions = list(map(_version, self._tensors))
        self._drawn = self._random_state()

    def _random_state(self) -> list[Tensor]:
        device: Any = torch.get_device_module(self._device)
        return [torch.get_rng_state(), getattr(device, "get_rng_state", torch.get_rng_state)()]

    def none(self) -> bool:
        """Return whether the call has changed nothing, and drawn nothing."""
        return (
            all(v is not None for v in self._versions)
            and list(map(_version, self._tensors)) == self._versions
            and all(map(torch.equal, self._random_state(), self._drawn))
            and not self._reached.changed(self._walk)[1]
        )


def _version(t: Tensor) -> int | None:
    """Return the number of in-place writes; None if torch does not count them."""
    return None if t.is_inference() else t._version


@dataclass(eq=False)
class Captures:
    """The captures of one callable beside its calls, by a thread that starts with the first.

    Attributes:
        busy: True while the thread captures.
        off: True if the callable is captured in the threads of calls.
    """

    graphed: weakref.ref[CapturesBeside[..., Any]]
    busy: bool = False
    off: bool = False
    _wanted: dict[Hashable, _Wanted] = field(default_factory=dict[Hashable, _Wanted])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _ended: bool = False
    _runs: int = 0
    """The calls that run eagerly beside captures."""

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        normal: Callable[[], R],
        eager: Callable[[], R],
    ) -> R:
        """Make a call that no recording fits.

        Args:
            normal: makes it as without this option; may wait for a capture of another callable.
            eager: runs the callable itself.
        """
        graphed = self.graphed()
        assert graphed is not None
        if self.off:
            return self._alone(normal)
        flat = graphed._signatures.flat(args, kwargs)
        driver, device = graphed._callee.driver_and_device(flat)
        if graphed._table.unserved.is_unrecordable(driver, flat):
            return normal()
        spec = spec_of(driver, flat, device)
        wanted = self._of(graphed.served_alike(flat, spec))
        served = wanted.state is _State.DONE and graphed.is_served(flat, spec)
        if wanted.state is _State.DONE and not served:  # what it relies on has moved
            wanted.state = _State.ITS_OWN if wanted.made >= _MOST else _State.WANTED
        if wanted.state is _State.WANTED:
            self._want(wanted, flat)
            return self._beside(eager)
        if not self._lock(driver):
            return self._beside(eager)
        try:
            if wanted.state is not _State.NEW:
                return normal()
            return self._learned(graphed, wanted, flat, device, normal)
        finally:
            driver.lock.release()

    def _beside(self, eager: Callable[[], R]) -> R:
        """Run the callable itself, while a capture may go on beside."""
        with self._changed:
            self._runs += 1
        try:
            return eager()
        finally:
            with self._changed:
                self._runs -= 1
                self._changed.notify_all()

    def _alone(self, normal: Callable[[], R]) -> R:
        """Make a call that may be captured in its thread, once no call runs beside captures."""
        if self._runs or self.busy:
            with self._changed:
                self._changed.wait_for(lambda: not (self._runs or self.busy))
        return normal()

    def _of(self, key: Hashable) -> _Wanted:
        with self._changed:
            wanted = self._wanted.setdefault(key, _Wanted())
            wanted.calls += 1
            return wanted

    def _lock(self, driver: Driver) -> bool:
        """Take the lock of warm-ups and captures. Return False if a capture beside calls has it."""
        while not driver.lock.acquire(timeout=_TRY_S):
            if self.busy:
                return False
        return True

    def _learned(
        self,
        graphed: Graphed[..., Any],
        wanted: _Wanted,
        flat: Flat,
        device: torch.device,
        normal: Callable[[], R],
    ) -> R:
        """Make the first call of a signature, and learn whether it can be captured beside calls."""
        example = _copied(flat)
        before = _Footprint(graphed, flat, device)
        result = normal()
        free = not any(t.requires_grad for t in (*flat.tensors, *flatten(result).tensors))
        if example is not None and free and before.none():
            wanted.example, wanted.modes = example, _Modes()
            wanted.state = _State.WANTED
            graphed._table.unserved.clear()  # its recording is on the way
        else:
            self.off = True
        return result

    def _want(self, wanted: _Wanted, flat: Flat) -> None:
        """Have a signature captured."""
        with self._changed:
            if wanted.example is None:
                wanted.example, wanted.modes = _copied(flat), _Modes()
            if self._thread is None and not self._ended:
                name = f"onelaunch captures of {cast(Any, self.graphed())._name}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
                _running.add(self)
            self._changed.notify_all()

    def _work(self) -> None:
        """Capture the signatures that are wanted, the one with most calls first."""
        while True:
            with self._changed:
                due = self._due()
                if not due and not self._ended:
                    self._changed.wait(_IDLE_S)
                    due = self._due()
                if self._ended or not due:
                    self._thread = None
                    return
                wanted = max(due, key=lambda w: w.calls)
                self.busy = True
            try:
                self._capture(wanted)
            finally:
                wanted.example = None
                with self._changed:
                    self.busy = False
                    self._changed.notify_all()

    def _due(self) -> list[_Wanted]:
        wanted = self._wanted.values()
        return [w for w in wanted if w.state is _State.WANTED and w.example and w.modes]

    def _capture(self, wanted: _Wanted) -> None:
        graphed, example, modes = self.graphed(), wanted.example, wanted.modes
        if graphed is None or example is None or modes is None:
            wanted.state = _State.ITS_OWN
            return
        args, kwargs = unflatten(example.tree, example.tensors)
        driver, device = graphed._callee.driver_and_device(example)
        try:
            with modes.entered(), _on(device), _switching():
                driver.synchronize(device)  # the copies were made on streams of other threads
                running = graphed._table.running
                with beside_calls(lambda: running):
                    graphed.capture(*args, **kwargs)
        except CaptureError as error:
            let_go(error)
            wanted.state = _State.ITS_OWN
            if isinstance(error, NeedsTheCaller) or error.code == "OL110":
                self.off = True
            elif error.code not in _OF_LIMITS:
                _refuse(graphed, example, error, modes)
        except Exception as error:  # noqa: BLE001  the callable's: the next call raises it
            let_go(error)
            wanted.state = _State.ITS_OWN
        else:
            wanted.state = _State.DONE
            wanted.made += 1

    def end(self) -> None:
        """End the thread after the capture that is under way, and wait for it."""
        with self._changed:
            self._ended, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


_OF_LIMITS = frozenset({"OL301", "OL304"})
"""The refusals for want of room, which a call warns of."""
_running: weakref.WeakSet[Captures] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for captures in list(_running):
        captures.end()


def _copied(flat: Flat) -> Flat | None:
    """Return a call with copies of its tensors; None if a copy has another layout."""
    with torch.no_grad():
        tensors = [t.clone().requires_grad_(t.requires_grad) for t in flat.tensors]
    alike = all(a.stride() == b.stride() for a, b in zip(tensors, flat.tensors, strict=True))
    return flat._replace(tensors=tensors) if alike else None


@contextmanager
def _on(device: torch.device) -> Generator[None]:
    """Make a device the current one of this thread."""
    chosen = getattr(torch.get_device_module(device), "device", None)
    with nullcontext() if chosen is None else chosen(device):
        yield


@contextmanager
def _switching() -> Generator[None]:
    """Have the interpreter switch threads often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_STEP_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _refuse(graphed: Graphed[..., Any], example: Flat, error: CaptureError, modes: _Modes) -> None:
    """Have the next call of a refused signature raise, or run eagerly, as `on_refusal` says."""
    driver, device = graphed._callee.driver_and_device(example)
    with modes.entered():
        state = graphed._signatures.state(spec_of(driver, example, device))
    state = state.for_mode(graphed._callee.training)
    if graphed.options.on_refusal == "raise":
        state.known_refusal = copy.copy(error)
        state.training = graphed._callee.training
    else:
        graphed._ungraphed(state, error)


class CapturesBeside(Graphed[P, R]):
    """A callable that is captured beside its calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._captures = Captures(weakref.ref(self))

    def served_alike(self, flat: Flat, spec: CallSpec) -> Hashable:
        """Return a key of all calls that the recording for this call will serve."""
        return spec

    def is_served(self, flat: Flat, spec: CallSpec) -> bool:
        """Return whether a recording serves a call, which is yet to be tried."""
        return False

    def _recorded_or_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return self._captures.call(
            args,
            kwargs,
            lambda: super(CapturesBeside, self)._recorded_or_eager(args, kwargs),
            lambda: self._beside(args, kwargs),
        )

    def _beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the callable itself: no capture that another thread makes now touches its state."""
        self._table.counts.ran_eagerly("background")
        self._table.running.append(threading.get_ident())
        return self._eager(args, kwargs)

    def reset(self) -> None:
        """Free every recording and forget every signature; see `Graphed.reset`."""
        self._captures.end()
        self._captures = Captures(weakref.ref(self))
        super().reset()
