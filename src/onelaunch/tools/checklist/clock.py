"""The time that a search may take."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Generator

AGAIN_SECONDS = 5.0
"""Seconds until the alarm rings again: a finaliser may swallow the exception that it raises."""


class TimeIsUp(BaseException):
    """The end of the time. No `Exception`, which compilers catch and go on."""


class Clock:
    """The time of a search, which begins now.

    Attributes:
        seconds: how long it may take.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._start = time.monotonic()
        self._limited = False
        self._kept = 0.0
        self._has_alarm = False

    @property
    def left(self) -> float:
        """The seconds that are left; below 0 afterwards."""
        return self._start + self.seconds - self._kept - time.monotonic()

    def keep(self, seconds: float) -> None:
        """Keep the last seconds for what comes at the end, where it says 0."""
        self._kept = seconds
        if self._has_alarm and self.left < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(self.left, 1e-3), AGAIN_SECONDS)

    def check(self) -> None:
        """Raise `TimeIsUp` where it is."""
        if self.left <= 0:
            raise TimeIsUp

    @contextlib.contextmanager
    def limit(self) -> Generator[None]:
        """Begin nothing when time is up, and let an alarm end what is under way."""
        self.check()
        try:
            self._limited = True
            yield
        finally:
            self._limited = False

    @contextlib.contextmanager
    def alarm(self) -> Generator[None]:
        """Raise `TimeIsUp` at its end wherever the work is, a compiler or a call, within `limit`.

        It takes the alarm of the process, so it is for a command. In another thread than the main
        one, and on a system without alarms, it does nothing.
        """
        main = threading.current_thread() is threading.main_thread()
        if not main or not hasattr(signal, "setitimer"):
            yield
            return

        def ring(*_: object) -> None:
            if self._limited:
                raise TimeIsUp

        before = signal.signal(signal.SIGALRM, ring)
        self._has_alarm = True
        self.keep(0)
        try:
            yield
        finally:
            self._has_alarm = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


UNLIMITED = Clock()
