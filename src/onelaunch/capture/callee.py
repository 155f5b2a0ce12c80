"""The callable that is graphed, and the roots of the state that it reaches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import nullcontext
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from onelaunch.call.ambient import default_device
from onelaunch.call.containers import objects_in
from onelaunch.call.tree import Flat, Same, call_constants, flatten, is_plain
from onelaunch.call_events import is_profiled
from onelaunch.capture.compilation import compiled
from onelaunch.driver.protocol import Driver
from onelaunch.driver.select import driver_of, select
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.source import Place
from onelaunch.state.snapshot import LastWalk, ReachableState
from onelaunch.state.walk import Change, StateWalk, reads_more

R = TypeVar("R")


class Callee:
    """A callable, as it is called and as it is captured.

    Args:
        fn: the callable as the caller calls it.
        compile: whether Inductor's version of it is captured; see `compilation`.
        dynamic: whether one such version serves all sizes.
        root: name and object where the search for state begins: the module whose forward `fn` is,
            or `fn`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        compile: bool | str,
        dynamic: bool,
        root: tuple[str, object] | None,
    ) -> None:
        self.fn = fn
        self.compile = compile
        self.dynamic = dynamic
        self.root = root or (getattr(fn, "__name__", "callable"), fn)
        self._compiled: Callable[..., Any] | None = None
        self.reads: Reads | None = None
        """The reads that were seen."""
        self.handed_on: Place | None = None
        """The line of the last watched run that gave work to another thread."""
        self._last = LastWalk()
        """The last walk of the state that every call reaches."""
        self._seen: dict[Hashable, torch.device] = {}
        """The devices of calls that reach no tensor there, by the arguments of the call."""
        self._returned: WeakValueDictionary[int, object] = WeakValueDictionary()
        """id -> objects that runs returned."""

    def note_result(self, result: object) -> None:
        """Note the objects in the result of a run: one that comes again is not made by the call."""
        for value in objects_in([result]):
            self._returned[id(value)] = value

    def returned_before(self) -> dict[int, Same]:
        """Return the objects without tensors that runs returned, and that something holds."""
        return {
            key: Same(value, None)
            for key, value in self._returned.items()
            if not flatten(value, objects=True).tensors
        }

    @property
    def state_root(self) -> object:
        """The object where the search for state begins."""
        return self.root[1]

    def roots(self, flat: Flat) -> list[tuple[str, object]]:
        """Return the named roots of the state that a call reaches."""
        objects = [
            (path, c.value) for path, c in call_constants(flat.tree) if not is_plain(c.value)
        ]
        return [self.root, *objects]

    def reached(self, flat: Flat) -> ReachableState:
        roots = self.roots(flat)
        return ReachableState(roots, self.reads, self._last if len(roots) == 1 else None)

    @property
    def in_place(self) -> bool:
        """True if kernels are to reach its large arguments and results in the caller's memory."""
        return False

    @property
    def training(self) -> bool | None:
        """True if the callable is a module that is training; None if it has no such flag."""
        root = self.state_root
        return getattr(root, "training", None) if isinstance(root, torch.nn.Module) else None

    @property
    def codes(self) -> Collection[CodeType]:
        """The code objects that past runs executed."""
        return () if self.reads is None else self.reads.codes

    def forget(self, values: Iterable[object]) -> None:
        """Forget what was read of these objects."""
        if self.reads is not None:
            self.reads.forget(values)
            self._last = LastWalk()

    def watched(
        self, run: Callable[[], R], step_aside: Callable[[], object] | None = None
    ) -> Callable[[], R]:
        """Return `run`, made to record the callable's reads; for `step_aside` see `FrameWatch`."""

        def watched() -> R:
            watch = self.watch(step_aside)
            try:
                with nullcontext() if watch is None else watch.watching():
                    return run()
            finally:
                self.saw(watch)

        return watched

    def watch(self, step_aside: Callable[[], object] | None = None) -> FrameWatch | None:
        """Return a watch for a run of the callable; None if a profiler has the hook for it."""
        if is_profiled():
            return None
        return FrameWatch(Reads() if self.reads is None else self.reads.copy(), step_aside)

    def saw(self, watch: FrameWatch | None) -> None:
        """Store what a run showed. Without a watch, all that the callable reaches counts as
        read."""
        self.reads = None if watch is None else watch.reads
        self.handed_on = None if watch is None else watch.handed_on

    def read_more(
        self, reached: ReachableState, before: StateWalk, found: Sequence[Change]
    ) -> bool:
        """Return whether a capture read more than all runs before it; `found` is its changes."""
        more = reads_more(reached.roots, self.reads, before, found)
        if not more and before.reads is not None:
            self.reads = before.reads  # so that guards of several recordings agree
        return more

    def driver_and_device(
        self, flat: Flat, reached: ReachableState | None = None
    ) -> tuple[Driver, torch.device]:
        """Return the driver and device: an accelerator's if any argument, parameter or buffer is
        there, or the last run of such a call worked there; see `learn`."""
        driver, device = select(flat.tensors)
        if device.type == "cpu":
            state = reached or self.reached(flat)
            driver, device = select(t for _, t in state.walk().tensors())
            if reached is None:
                state.drop_tensors()
        if device.type == "cpu" and self._seen:
            device = self._seen.get(_given(flat), device)
            driver = driver_of(device.type)
        return driver, device

    def ran_elsewhere(
        self, flat: Flat, taken: torch.device, result: object, left: ReachableState | None = None
    ) -> bool:
        """Return whether a run that reached no tensor of an accelerator shows another device than
        `taken`, by its results and the state that it `left`; and note it for the next call."""
        key = _given(flat)
        if taken != _CPU and key not in self._seen:
            return False  # its arguments or state have shown the device
        tensors = flatten(result, objects=True).tensors
        state = [] if left is None else [t for _, t in left.walk().tensors()]
        _, device = select([*tensors, *state])
        self._seen.pop(key, None)
        if device != _CPU:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = device
        return device != taken

    @property
    def shown(self) -> Callable[..., Any]:
        """The version of the callable whose operations can be watched."""
        return self.fn

    def is_compiled(self, driver: Driver) -> bool:
        """Return whether a capture runs compiled code, whose operations no dispatch mode sees."""
        return self.on(driver) is not self.shown

    def on(self, driver: Driver) -> Callable[..., Any]:
        """Return the callable for warm-up and capture: `fn`, or its compiled version."""
        if not self.compile or driver.compiler is None:
            return self.fn
        if self._compiled is None:
            self._compiled = compiled(self.fn, driver, self.compile, self.dynamic)
        return self._compiled


_CPU = torch.device("cpu")
_MOST_SEEN = 256


def _given(flat: Flat) -> Hashable:
    """Return a key that distinguishes calls that reach no tensor of an accelerator."""
    return flat.tree, default_device()
