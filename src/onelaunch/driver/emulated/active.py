"""The capture that runs in a thread, as the emulated device sees it."""

from __future__ import annotations

import threading
from typing import Protocol

from onelaunch.errors import CaptureError


class Capture(Protocol):
    """A capture that can be refused."""

    def refuse(self, code: str, what: str, fix: str | None = None) -> CaptureError: ...


class _Active(threading.local):
    capture: Capture | None = None


active = _Active()
"""Set by the tape while a body runs under its recorder."""
