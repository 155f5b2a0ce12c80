"""How far other threads have come, as a capture compares it."""

from __future__ import annotations

import sys
import threading

import pytest

from onelaunch.driver import seeding


def test_a_thread_that_works_has_come_further() -> None:
    over, count = threading.Event(), [0]

    def work() -> None:
        while not over.is_set():
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        before = seeding.other_threads()
        came = count[0]
        while count[0] < came + 100_000:
            pass
        assert thread in before
        assert seeding.other_threads() != before
    finally:
        over.set()
        thread.join()


def test_a_thread_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed, with a frame, and has gone when its time is asked for."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    monkeypatch.setattr(thread, "_native_id", 2**22 - 1)  # the kernel may take a while to forget it
    frames = {**sys._current_frames(), thread.ident: sys._getframe()}
    monkeypatch.setattr(sys, "_current_frames", lambda: frames)
    monkeypatch.setattr(threading, "enumerate", lambda: [thread])
    ((_, _, spent),) = seeding.other_threads().values()
    assert spent is None
