"""What a callable is told that asks whether it is being captured."""

from __future__ import annotations

import threading

import pytest
import torch

from onelaunch.driver.capture_query import CaptureAnswer

asks = torch.cuda.is_current_stream_capturing


def test_no_as_in_a_call_and_then_yes() -> None:
    asking = CaptureAnswer()
    assert not asking.switch_to_yes()  # it was not asked
    with asking.in_force():
        assert not asks()
    assert asking.switch_to_yes()
    with asking.in_force():
        assert asks()
    assert not asking.switch_to_yes()


def test_the_truth_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads, torch's own code, and everyone afterwards."""
    # A build without CUDA has no truth to tell.
    monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    asking = CaptureAnswer(answer=True)
    told: list[bool] = []
    of_torch: dict[str, object] = {"asks": asks}
    exec(compile("def ask(): return asks()", torch.__file__, "exec"), of_torch)
    with asking.in_force():
        thread = threading.Thread(target=lambda: told.append(asks()))
        thread.start()
        thread.join()
        told.append(of_torch["ask"]())  # type: ignore[operator]
    assert told == [False, False]
    assert not asking.asked
    assert not asks()
