"""`capture="background"`: captures and calls that wait for each other, by locks of the user's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch import beside
from onelaunch.runtime import background, worker

from .drop_in import assert_same, random_tensor
from .test_background import captured


@pytest.mark.parametrize("then", ["state", "reset"])
def test_a_callable_that_takes_a_lock_of_its_callers(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The capture waits for the lock, and the caller who holds it must not wait for the capture."""
    for module in (beside, background, worker):
        monkeypatch.setattr(module, "STUCK_S", 0.2)
    lock, scale, x = threading.RLock(), 2.0, random_tensor(0, 2, 3, device=device)

    def f(x: Tensor) -> Tensor:
        with lock:
            return x * scale

    fast: Any = ol.graph(f, capture="background")

    def hold() -> None:
        nonlocal scale
        with lock:
            while not beside.is_stuck():
                assert_same(fast(x), f(x))
                time.sleep(0.01)
            scale = 3.0
            if then == "reset":
                fast.reset()
            assert_same(fast(x), f(x))

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    holding.join(60)
    assert not holding.is_alive()
    call: Callable[[], None] = lambda: assert_same(fast(x), f(x))  # noqa: E731
    captured(fast, 1, call)
