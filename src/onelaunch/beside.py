"""Captures beside calls of other threads, which make way for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import get_ident
from typing import TypeVar

from onelaunch.errors import CaptureError

T = TypeVar("T")

BESIDE: dict[int, CaptureBeside] = {}  # thread -> its capture beside calls
_LOOK_S = 1e-3  # the seconds between looks at whether calls are under way
_awaited: list[int] = []  # threads that wait for the end of a capture, perhaps in a call
STUCK_S = 5.0
"""The seconds without an operation after which a capture may wait for a lock that a call holds."""
_PATIENCE = 8  # the most time that a capture waits for calls, in terms of the time that it works


@contextmanager
def listed(entries: list[T], entry: T) -> Generator[None]:
    """Keep an entry in a list meanwhile, and remove it even after a Ctrl-C anywhere."""
    try:
        entries.append(entry)
        yield
    finally:
        if entry in entries:
            entries.remove(entry)


class CaptureBeside:
    """A capture beside calls, with the time that it has waited for them."""

    def __init__(
        self, under_way: Callable[[], object], check: Callable[[], object] = lambda: None
    ) -> None:
        self.check = check
        self._under_way = under_way
        self._started, self._waited = time.monotonic(), 0.0
        self.seen = self._started  # the time of the last operation

    def wait(self) -> None:
        """Wait while calls are under way: an operation of a call waits for the interpreter."""
        self.seen = time.monotonic()
        while self._under_way() and not _awaited:
            now = time.monotonic()
            if self._waited > _PATIENCE * (now - self._started - self._waited):
                return  # calls are under way all the time
            time.sleep(_LOOK_S)
            self._waited += time.monotonic() - now


def is_beside() -> bool:
    """Tell whether this thread captures beside calls."""
    return get_ident() in BESIDE


def is_stuck(seconds: float | None = None) -> bool:
    """Tell whether a capture beside calls runs nothing for long, as it may wait for a call.
    `seconds`: in place of `STUCK_S`."""
    then = time.monotonic() - (STUCK_S if seconds is None else seconds)
    return any(beside.seen < then for beside in list(BESIDE.values()))


def awaiting() -> AbstractContextManager[None]:
    """Mark this thread as one that waits for the end of a capture, which then makes way no more."""
    return listed(_awaited, get_ident())


def make_way() -> None:
    """Let calls of other threads go first, if this thread captures beside them; 0.05 us if not."""
    beside = BESIDE.get(get_ident()) if BESIDE else None
    if beside is not None:
        beside.wait()


def make_way_in_hook(*_: object) -> None:
    """Make way in a hook, which raises nothing: the next operation raises what ends the capture."""
    if BESIDE:
        with suppress(CaptureError):
            make_way()


def begin_run() -> None:
    """Make way, and check that a capture beside calls may run the callable now."""
    make_way()
    beside = BESIDE.get(get_ident()) if BESIDE else None
    if beside is not None:
        beside.check()
