"""Waits for a whole device by other threads during a capture. CUDA would refuse them, which also
ends the capture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from onelaunch.beside import awaiting
from onelaunch.driver.cuda.streams import bindings
from onelaunch.driver.substitutes import replaced

_WAITS = ("_cuda_synchronize", "_accelerator_synchronizeDevice")
_LONGEST_S = 10.0
"""The most seconds that a wait is put off: the callable may wait for a thread that waits."""
_capture = threading.RLock()  # the lock that a capture holds


@contextmanager
def put_off() -> Generator[None]:
    """Have `torch.cuda.synchronize` of other threads begin after the capture of this thread."""
    with _capture:
        waits = {name: getattr(bindings, name) for name in _WAITS if hasattr(bindings, name)}
        later = {name: partial(_after_the_capture, wait) for name, wait in waits.items()}
        with replaced(bindings, **later):
            yield


def _after_the_capture(wait: Callable[..., object], *args: Any) -> object:
    if torch.cuda.is_current_stream_capturing():  # by a thread of the capture itself
        return wait(*args)
    with awaiting():
        held = _capture.acquire(timeout=_LONGEST_S)
    try:
        return wait(*args)
    finally:
        if held:
            _capture.release()
