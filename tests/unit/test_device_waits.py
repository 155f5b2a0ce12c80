"""Waits of other threads for a device during a capture, without a device."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from onelaunch import beside
from onelaunch.driver.cuda import device_waits
from onelaunch.driver.select import beside_calls

NAME = "_cuda_synchronize"


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that waited for the device."""
    found: list[str] = []

    def wait() -> None:
        found.append(threading.current_thread().name)

    monkeypatch.setattr(device_waits.bindings, NAME, wait, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def synchronize() -> None:
    bindings: Any = device_waits.bindings
    getattr(bindings, NAME)()


def test_another_thread_waits_after_the_capture(waited: list[str]) -> None:
    own = getattr(device_waits.bindings, NAME)
    thread = threading.Thread(target=synchronize, name="other")
    with device_waits.put_off(), device_waits.put_off():
        thread.start()
        synchronize()  # the capture's own is refused by CUDA, at once
        thread.join(0.2)
        assert thread.is_alive()
        assert waited == [threading.current_thread().name]
    thread.join(10)
    assert waited[1:] == ["other"]
    assert getattr(device_waits.bindings, NAME) is own


def test_a_capture_makes_no_way_for_a_call_that_waits_for_it(waited: list[str]) -> None:
    thread = threading.Thread(target=synchronize, name="other")
    with device_waits.put_off():
        thread.start()
        while not beside._awaited:
            time.sleep(0.001)
        with beside_calls(lambda: True):  # a call is under way all the time
            started = time.monotonic()
            for _ in range(50):
                beside.make_way()
            assert time.monotonic() - started < 1
    thread.join(10)
    assert waited == ["other"]
    assert not beside._awaited


def test_a_capture_goes_on_beside_calls_that_never_end() -> None:
    """It waits eight times as long as it works."""
    with beside_calls(lambda: True):
        started = worked = time.monotonic()
        while worked - started < 0.2:
            time.sleep(0.002)
            beside.make_way()
            worked = time.monotonic()
        (capture,) = beside.BESIDE.values()
        share = capture._waited / (time.monotonic() - started)
    assert 0.5 < share <= 0.93


@pytest.mark.parametrize("own", [False, True])
def test_a_thread_of_the_capture_does_not_wait_for_it(
    waited: list[str], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """One that is known by its stream does not wait; another not for ever."""
    if own:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.setattr(device_waits, "_LONGEST_S", 0.05)
    with device_waits.put_off():
        thread = threading.Thread(target=synchronize, name="engine")
        thread.start()
        thread.join(10)
        assert waited == ["engine"]
