"""Events that a capture records, and that the host would wait for after it.

Under capture an event is a fork of the graph and marks no moment. CUDA answers "invalid argument"
when the host waits for it afterwards, and no replay records it again. An event that another stream
of the callable waits for is a fork as it should be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from onelaunch.errors import CaptureError
from onelaunch.source import PACKAGE, TORCH, Place, user_frame

_FIX = "record it after the call: `y = fast(x); event.record()`"


@contextmanager
def refusing_events(kind: Any, capturing: Callable[[Any], bool]) -> Generator[None]:
    """Refuse, at the end of this context, an event that was recorded inside for the host. Captures
    are made one at a time, so the methods of a class have a single substitute.

    Args:
        kind: the class of the device's events.
        capturing: tells whether a stream, or with None the current one, is being captured.

    Raises:
        CaptureError: OL109.
    """
    ident, record, wait = get_ident(), kind.record, kind.wait
    recorded: dict[int, tuple[Any, Place | None]] = {}
    own = record.__code__.co_filename

    def record_noted(event: Any, stream: Any = None) -> None:
        if get_ident() == ident and capturing(stream):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename == own:
                frame = frame.f_back  # `Stream.record_event`
            if not frame.f_code.co_filename.startswith((TORCH, PACKAGE)):
                recorded[id(event)] = event, user_frame()
        record(event, stream)

    def wait_noted(event: Any, stream: Any = None) -> None:
        wait(event, stream)
        if get_ident() == ident:
            recorded.pop(id(event), None)

    kind.record, kind.wait = record_noted, wait_noted
    try:
        yield
    finally:
        kind.record, kind.wait = record, wait
    for _, place in recorded.values():
        what = "an event is recorded in a capture, and no stream waits for it there"
        raise CaptureError("OL109", what, where=place, fix=_FIX)
