"""The thread for captures beside calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from onelaunch.driver.select import beside_calls
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.runtime.worker import Worker


def test_a_job_stands_still_while_a_call_is_under_way() -> None:
    """Wherever it is in Python: each operation of the call gives the interpreter away."""
    calls: list[int] = []
    steps, stop = [0], threading.Event()

    def step() -> None:
        steps[0] += 1

    def job() -> None:
        with beside_calls(lambda: calls):
            while not stop.is_set():
                step()

    jobs = [job]
    worker = Worker("a test's", lambda: jobs.pop() if jobs else None, calls)
    with worker.changed:
        worker.wake()
    try:
        _until(lambda: steps[0] > 1000)
        time.sleep(0.2)
        calls.append(1)
        time.sleep(0.05)
        before = steps[0]
        time.sleep(0.2)
        assert steps[0] - before <= 2  # one that was under way
        calls.clear()
        _until(lambda: steps[0] > before + 1000)
    finally:
        stop.set()
        worker.end()


def test_a_watch_of_frames_goes_on_when_the_state_of_a_capture_moves() -> None:
    """The capture ends where a run can end, and not by a fault of the watch."""

    def moved() -> object:
        raise CaptureError("OL109", "its state has moved")

    watch = FrameWatch(Reads())
    with beside_calls(moved), watch.watching():
        _until(lambda: True)
    assert watch.seen is not None


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
