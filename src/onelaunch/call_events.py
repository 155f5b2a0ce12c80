"""The interpreter's profiling function, for runs that are watched."""

from __future__ import annotations

import enum
import functools
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from onelaunch.native import FAILURES, compiled

OnEvent = Callable[[FrameType, str, Any], object]


class Matters(enum.IntEnum):
    """The events of a function's code that matter; without it, all do."""

    RESULTS = 1
    """Results that it gives to code that is seen. It is not seen itself."""
    USES = 2  # also its calls by code that is seen
    RETURNS = 3  # every return, and no call


class Hook(Protocol):
    """A profiling function that calls Python for the events that matter."""

    def begin(self) -> object:
        """Become the profiling function of this thread."""

    def end(self) -> object:
        """End: other threads leave the hook at their next event."""


class _Thread(threading.local):
    paused = False

    def pause(self, paused: bool) -> bool:
        before, self.paused = self.paused, paused
        return before


_thread = _Thread()


@dataclass(slots=True, eq=False)
class _PythonHook:
    """The hook for machines without a compiler; 1 us for each call of any function."""

    _frames: OnEvent | None
    _codes: dict[int, Matters]
    _leaves: set[type]
    _methods: OnEvent | None
    _owners: tuple[type, ...]
    _gate: list[int] | None
    _over: bool = False

    def begin(self) -> None:
        sys.setprofile(self)

    def end(self) -> None:
        self._over = True

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if _thread.paused:
            return
        if self._over:
            sys.setprofile(None)
        elif self._gate is not None and not self._gate:
            return
        elif event == "c_call" and self._methods is not None:
            if isinstance(getattr(arg, "__self__", None), self._owners):
                self._methods(frame, event, arg)
        elif event not in ("call", "return") or self._frames is None:
            return
        elif not self._is_skipped(frame, event, arg):
            self._frames(frame, event, arg)

    def _is_skipped(self, frame: FrameType, event: str, result: object) -> bool:
        matters = self._codes.get(id(frame.f_code))
        if matters not in _UNSEEN:
            return event == "call" and matters is Matters.RETURNS
        if matters is Matters.RESULTS if event == "call" else self._is_leaf(result):
            return True
        return frame.f_back is None or self._codes.get(id(frame.f_back.f_code)) in _UNSEEN

    def _is_leaf(self, result: object) -> bool:
        return type(result) in self._leaves and not type(result).__dictoffset__


_UNSEEN = (Matters.RESULTS, Matters.USES)


@functools.cache
def _native() -> Any:
    """Return the compiled module, or None."""
    try:
        return compiled("call_events")
    except FAILURES:
        return None


def _hook_class() -> type[Hook]:
    return _native().Hook if _native() else _PythonHook


def hook(
    frames: OnEvent | None = None,
    codes: dict[int, Matters] | None = None,
    leaves: set[type[object]] | None = None,
    methods: OnEvent | None = None,
    owners: tuple[type, ...] = (),
    gate: list[int] | None = None,
) -> Hook:
    """Make a hook.

    Args:
        frames: called with ``"call"`` and ``"return"`` for functions in Python.
        codes: id of code -> which of its events matter. The caller keeps the code alive.
        leaves: types of results of code that is not seen, which matter by their attributes alone.
            The caller may add to both.
        methods: called with ``"c_call"`` for methods in C of instances of `owners`.
        gate: nothing is called while it is empty.
    """
    kind: Any = _hook_class()
    types = set[type]() if leaves is None else leaves
    return kind(frames, {} if codes is None else codes, types, methods, owners, gate)


def is_profiled() -> bool:
    """Return whether the interpreter's profiling function is somebody else's."""
    return not isinstance(sys.getprofile(), (type(None), _hook_class()))


def set_profile(profile: Any) -> None:
    """Set an earlier result of `sys.getprofile`."""
    if isinstance(profile, _hook_class()):
        profile.begin()
    else:
        sys.setprofile(profile)


@contextmanager
def profiling(watcher: Hook) -> Generator[None]:
    """Have a hook be the profiling function of this thread meanwhile."""
    before = sys.getprofile()
    watcher.begin()
    try:
        yield
    finally:
        if sys.getprofile() is watcher:  # not where an interrupt has this end long after the run
            set_profile(before)


def pause(paused: bool) -> bool:
    """Pause the hooks of this thread, or let them go on. Return whether they were paused."""
    return pauses()(paused)


@functools.cache
def pauses() -> Callable[[bool], bool]:
    """Return the function behind `pause`, for those who call it often."""
    return (_native() or _thread).pause


class unwatched:
    """A context for work of onelaunch itself, which hooks do not see. 0.3 us."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = pause(True)

    def __exit__(self, *raised: object) -> None:
        pause(self._before)
