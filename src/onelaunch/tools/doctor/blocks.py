"""The operations of an eager run that block a capture, found by the checks that refuse captures."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from onelaunch.driver.refusals import REFUSALS, error_here
from onelaunch.driver.select import select
from onelaunch.error_catalogue import WAIT
from onelaunch.errors import CaptureError
from onelaunch.finding import Finding
from onelaunch.testing.torch_module import noting_waits
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.run import FunctionCall, Listener, RanOperation
from onelaunch.tools.doctor.spot import NOWHERE, Spot
from onelaunch.tools.rules import RULES
from onelaunch.watch.device_constants import DeviceConstants
from onelaunch.watch.observer import Observer, OnRefusal


class Refusals(Observer):
    """An observer that refuses nothing, and keeps all that a capture would refuse."""

    def __init__(self, workload: Workload, spot: Callable[[], Spot]) -> None:
        driver, device = select(workload.tensors())
        super().__init__(
            driver, device, on_refusal=OnRefusal.KEEP, constants=DeviceConstants(device)
        )
        self.found: list[tuple[Spot, CaptureError]] = []
        self._spot = spot

    def note_refusal(self, error: CaptureError) -> CaptureError:
        """Note a refusal with its place; see `Observer`."""
        self.found.append((self._spot(), error))
        return super().note_refusal(error)

    def _keep_refusal(self, error: CaptureError, sure: bool) -> None:
        self.note_refusal(error)


ON_CUDA = {"aten::_grouped_mm": torch.float32}
"""Operations that CUDA does by way of the host in a dtype, and a CPU does not; see `REFUSALS`."""
_TO_HOST = re.compile(r"\.to\(.*[\"']cpu\b")
"""Code that names the host itself: on a CPU, a variable holds the device that stands for a GPU."""


class Blocks(Listener):
    """The listener that finds what blocks a capture.

    Where the callable's tensors are on the CPU, they stand for tensors of a GPU: what would be
    refused there is found too.

    Attributes:
        on_cuda: the findings that hold for a GPU only, and that no capture without it can confirm.
    """

    concerns = frozenset({Tensor.cpu, Tensor.to})

    def __init__(self) -> None:
        self.on_cuda: list[Finding] = []
        self._refusals: Refusals | None = None

    @contextmanager
    def begin(self, workload: Workload, spot: Callable[[], Spot]) -> Generator[None]:
        self._refusals = Refusals(workload, spot)
        with noting_waits(self._waited), self._refusals.host_reads, self._refusals:
            yield
        self._refusals.release()

    def _waited(self, what: str) -> None:
        assert self._refusals is not None
        self._refusals.note_refusal(error_here("OL109", f"`{what}` waits for the device", fix=WAIT))

    def function(self, event: FunctionCall) -> None:
        name, spot = event.function.__name__, event.spot()
        named = name == "cpu" or (spot.library is None and _TO_HOST.search(spot.source))
        if event.args[0].device.type == "cpu" and named:
            what = f"`.{name}()` copies a tensor to the host"
            self.on_cuda.append(spot.finding("OL103", what, None, "run"))

    def operation(self, event: RanOperation) -> None:
        dtype = ON_CUDA.get(event.op.base)
        if dtype is not None and event.args[0].device.type != "cuda":
            row, spot = REFUSALS[event.op.base], event.spot()
            if event.args[0].dtype == dtype and spot != NOWHERE:  # its backward has no line
                self.on_cuda.append(spot.finding(row.code, row.what or "", row.fix, "run"))

    def findings(self) -> list[Finding]:
        found = self._refusals.found if self._refusals is not None else []
        return [
            spot.finding(error.code, error.what, error.fix, "run")
            for spot, error in found
            if error.code in RULES
        ]
