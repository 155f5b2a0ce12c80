"""The host's waits for the device in an eager run on CUDA, which torch warns of if asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from onelaunch.finding import Finding
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.run import Listener
from onelaunch.tools.doctor.spot import Spot

_WARNED = "called a synchronizing CUDA operation"
"""https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html"""


class Waits(Listener):
    """The listener that finds operations for which the host waits, whoever calls them."""

    def __init__(self) -> None:
        self._found: list[Spot] = []

    @contextmanager
    def begin(self, workload: Workload, spot: Callable[[], Spot]) -> Generator[None]:
        if workload.device.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_WARNED)
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            shown = warnings.showwarning

            def note(message: Any, *args: Any, **kwargs: Any) -> None:
                if _WARNED in str(message):
                    self._found.append(spot())
                else:
                    shown(message, *args, **kwargs)

            warnings.showwarning = note
            try:
                torch.cuda.set_sync_debug_mode("warn")
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def findings(self) -> list[Finding]:
        what = "the host waits for the device"
        return [spot.finding("OL101", what, None, "run") for spot in self._found]
