"""The callable that is graphed, and the roots of the state that it reaches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import nullcontext
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from onelaunch.call.ambient import default_device
from onelaunch.call.containers import composites_in, objects_in
from onelaunch.call.tree import Flat, Same, call_constants, flatten
from onelaunch.call_events import is_profiled
from onelaunch.capture.compilation import compiled
from onelaunch.driver.protocol import Driver
from onelaunch.driver.select import driver_of, select
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.identity import id
from onelaunch.source import Place
from onelaunch.state.contents import Contents
from onelaunch.state.snapshot import LastWalk, ReachableState
from onelaunch.state.walk import Change, StateWalk, reads_more
from onelaunch.watch.difference import of_failed_watch, of_threads

R = TypeVar("R")
Layouts = tuple[tuple[torch.Size, tuple[int, ...]], ...]
"""The sizes and strides of the arguments of a call."""


class Callee:
    """A callable, as it is called and as it is captured. `compile`, `dynamic`, `parallel`: see
    `compilation.compiled`. `root`: name and object where the search for state begins; `fn`, or the
    module whose forward `fn` is."""

    def __init__(
        self,
        fn: Callable[..., Any],
        compile: bool | str,
        dynamic: bool,
        root: tuple[str, object] | None,
        parallel: bool = False,
    ) -> None:
        self.fn = fn
        self.compile = compile
        self.dynamic = dynamic
        self.parallel = parallel
        self.root = root or (getattr(fn, "__name__", "callable"), fn)
        self._compiled: Callable[..., Any] | None = None
        self.reads: Reads | None = None
        """The reads seen in past runs; None without a watch: everything reached counts as read."""
        self._gave_work_to_thread: Place | None = None
        """The line of the last watched run that gave work to another thread."""
        self._contents_after: weakref.ref[Contents] | None = None
        """The contents of the state that the last watched warm-up left."""
        self._seen_layouts: set[Layouts] = set()
        """Layouts of the arguments of the watched warm-ups that ended in that state."""
        self._failed: str | None = None
        """The error that ended the watch of the last run."""
        self._last = LastWalk()
        """The last walk of the state that every call reaches."""
        self._device_of_call: dict[Hashable, torch.device] = {}
        """Call without a tensor on an accelerator -> the device where its last run worked."""
        self._returned: WeakValueDictionary[int, object] = WeakValueDictionary()
        """id -> object that a run returned."""

    def note_result(self, result: object) -> None:
        """Note the objects in a result: a later call that returns one of them did not make it."""
        for value in objects_in([result]):
            self._returned[id(value)] = value

    def returned_before(self) -> dict[int, Same]:
        """Return the living objects that runs returned, except objects with tensors inside."""
        return {
            key: Same(value, None)
            for key, value in self._returned.items()
            if not flatten(value, objects=True).tensors
        }

    @property
    def state_root(self) -> object:
        return self.root[1]

    def roots(self, flat: Flat) -> list[tuple[str, object]]:
        objects = [(path, c.value) for path, c in call_constants(flat.tree) if not c.is_plain]
        return [self.root, *objects]

    def reached(self, flat: Flat) -> ReachableState:
        # The tensors of an argument that is taken apart come with each call: they are no state.
        self.forget(value for value in flat.taken_apart if self.reads and self.reads.of(value))
        roots = self.roots(flat)
        return ReachableState(roots, self.reads, self._last if len(roots) == 1 else None)

    @property
    def in_place(self) -> bool:
        """True if kernels reach large arguments and results in the caller's memory."""
        return False

    @property
    def training(self) -> bool | None:
        """True if the callable is a module that is training; None if it has no such flag."""
        root = self.state_root
        return getattr(root, "training", None) if isinstance(root, torch.nn.Module) else None

    @property
    def codes(self) -> Collection[CodeType]:
        return () if self.reads is None else self.reads.codes

    def forget(self, values: Iterable[object]) -> None:
        """Drop the noted reads of some objects."""
        objects = list(values)
        if self.reads is not None and objects:
            self.reads.forget(objects)
            self._last = LastWalk()

    def with_read_watch(
        self,
        run: Callable[[], R],
        device: torch.device,
        step_aside: Callable[[], object] | None = None,
        before: StateWalk | None = None,
    ) -> Callable[[], R]:
        """Return `run` with a watch that records the callable's reads; see `read_watch`."""

        def watched() -> R:
            watch = self.read_watch(device, step_aside, before)
            try:
                with nullcontext() if watch is None else watch.watching():
                    return run()
            finally:
                self.store_reads(watch)

        return watched

    def read_watch(
        self,
        device: torch.device,
        step_aside: Callable[[], object] | None = None,
        before: StateWalk | None = None,
        arguments: Iterable[torch.Tensor] = (),
    ) -> FrameWatch | None:
        """Return a watch for one run; None if a profiler has its hook.

        Args:
            before: the state before the run. If it is as the last watched warm-up left it, frames
                that end as in that warm-up read the same, and are not read again.
            arguments: of the run. With other sizes a frame may read other items.
        """
        if is_profiled():
            return None
        reads = Reads() if self.reads is None else self.reads.copy()
        left = self._contents_after and self._contents_after()
        same = before is not None and before.contents is left
        same = same and _layouts(arguments) in self._seen_layouts
        ended = frozenset(reads.ended) if same else frozenset[tuple[CodeType, int]]()
        return FrameWatch(reads, device, step_aside, ended)

    def state_after(self, flat: Flat, result: object, before: StateWalk | None) -> ReachableState:
        """Return the state that a warm-up has left. If it was watched, note that state, too.

        Args:
            result: the result of the run. Objects in it that the state does not lead to are not
                state, unless they came back before.
            before: the state before the run; None if no run was watched before.
        """
        reached = self.reached(flat)
        if self.reads is not None and (before is None or self.reads is not before.reads):
            self.note_state_after(reached, flat, result, before)
        return reached

    def note_state_after(
        self,
        reached: ReachableState,
        flat: Flat,
        result: object,
        before: StateWalk | None,
        walked: StateWalk | None = None,
    ) -> None:
        """Note that a run from the present state, on such arguments, repeats the last watched run.

        Args:
            result: the result of that run.
            before: the state before it. If it read nothing more than runs before, their reads are
                kept, and with them the last walk.
            walked: a walk of the present state by the reads of that run.
        """
        reads, last = self.reads, self._last
        assert reads is not None
        new = [v for v in composites_in([result]) if id(v) not in self._returned]
        entries = {id(v): entry for v in new if (entry := reads.of(v)) is not None}
        self.forget(new)
        earlier = before and before.reads
        if before and earlier and earlier is not reads and not reads.exceeds(earlier, before.ids()):
            earlier.ended |= reads.ended
            self.reads, self._last = earlier, last
            reads = earlier
        reached.know(reads, self._last, None if new else walked)
        lasting = entries.keys() & map(id, reached.walk().owners)
        if lasting:
            reads.owners.update((key, entries[key]) for key in lasting)
            reached.forget()
        contents = reached.walk().contents
        if self._contents_after is None or self._contents_after() is not contents:
            self._contents_after, self._seen_layouts = weakref.ref(contents), set()
        self._seen_layouts.add(_layouts(flat.tensors))

    def store_reads(self, watch: FrameWatch | None) -> None:
        self.reads = None if watch is None else watch.seen
        self._gave_work_to_thread = None if watch is None else watch.handed_on
        self._failed = None if watch is None else watch.failed

    def unseen(self) -> CaptureError | None:
        """Return a refusal if the last watched run was not seen as a whole."""
        if self._gave_work_to_thread is not None:
            return of_threads(self._gave_work_to_thread)
        return None if self._failed is None else of_failed_watch(self._failed)

    def read_more(
        self, reached: ReachableState, before: StateWalk, changes: Sequence[Change]
    ) -> bool:
        """Return whether a capture read more than all runs before it."""
        more = reads_more(reached.roots, self.reads, before, changes)
        if not more and before.reads is not None:
            self.reads = before.reads  # so that guards of several recordings agree
        return more

    def driver_and_device(
        self, flat: Flat, reached: ReachableState | None = None
    ) -> tuple[Driver, torch.device]:
        """Return the driver and device of a call: an accelerator's if an argument, parameter or
        buffer is there, or if the last run of the call worked there; see `ran_elsewhere`."""
        driver, device = select(flat.tensors)
        if device.type == "cpu":
            state = reached or self.reached(flat)
            driver, device = select(t for _, t in state.walk().tensors())
            if reached is None:
                state.drop_tensors()
        if device.type == "cpu" and self._device_of_call:
            device = self._device_of_call.get(_given(flat), device)
            driver = driver_of(device.type)
        return driver, device

    def ran_elsewhere(
        self, flat: Flat, taken: torch.device, result: object, left: ReachableState | None = None
    ) -> bool:
        """Return whether a run worked on another device than `taken`, and note the device. `left`:
        the state after the run."""
        key = _given(flat)
        if taken != _CPU and key not in self._device_of_call:
            return False  # its arguments or state have shown the device
        tensors = flatten(result, objects=True).tensors
        state = [] if left is None else [t for _, t in left.walk().tensors()]
        _, device = select([*tensors, *state])
        self._device_of_call.pop(key, None)
        if device != _CPU:
            if len(self._device_of_call) >= _MOST_SEEN:
                self._device_of_call.clear()
            self._device_of_call[key] = device
        return device != taken

    @property
    def eager_form(self) -> Callable[..., Any]:
        """The version of the callable whose operations can be watched."""
        return self.fn

    def is_compiled(self, driver: Driver) -> bool:
        """Return whether a capture runs compiled code, whose operations no dispatch mode sees."""
        return self.captured_form(driver) is not self.eager_form

    def captured_form(self, driver: Driver) -> Callable[..., Any]:
        """Return the version of the callable that warm-ups and captures run."""
        if not self.compile or driver.compiler is None:
            return self.fn
        if self._compiled is None:
            self._compiled = compiled(self.fn, driver, self.compile, self.dynamic, self.parallel)
        return self._compiled


def _layouts(tensors: Iterable[torch.Tensor]) -> Layouts:
    return tuple((t.shape, t.stride() if t.layout is torch.strided else ()) for t in tensors)


_CPU = torch.device("cpu")
_MOST_SEEN = 256


def _given(flat: Flat) -> Hashable:
    """Return a key for calls that reach no tensor of an accelerator."""
    return flat.tree, default_device()
