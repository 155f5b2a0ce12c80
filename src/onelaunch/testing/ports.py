"""The ports of a recording of the tape: copies in and out, at addresses told by each launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.protocol import Provenance, Travel
from onelaunch.driver.rows import first_rows, grow
from onelaunch.sizes.dims import Varying
from onelaunch.testing.lanes import TapeLanes
from onelaunch.testing.recorder import TapeRecorder


class Port:
    """One copy between the caller's memory and the recording's; see `Capture.input`.

    Attributes:
        at_once: true if `point` copies, and no step: of any layout, or of the host for ``"fill"``.
    """

    def __init__(
        self,
        recorder: TapeRecorder,
        buffer: Tensor,
        travel: Travel,
        displacement: int,
        varying: Varying | None,
    ) -> None:
        self._on_host = recorder.memory.on_host
        self.buffer = self._on_host(buffer)
        self.travel = travel if varying is None else Travel.PAD
        self.at_once = varying is None and travel != Travel.NODE
        self._displacement = displacement
        self._address = 0
        self._varying = varying
        self._end: Tensor | None = None
        """The caller's end of a `varying` port, until it is copied."""

    @property
    def span(self) -> tuple[int, int]:
        """The addresses of the recording's end."""
        start = self.buffer.data_ptr()
        return start, start + self.buffer.nbytes

    def point(self, t: Tensor) -> None:
        """Take note of where the caller's end is."""
        if self.at_once:
            self.buffer.copy_(self._on_host(t))
        elif self._varying is not None:
            self._end = self._on_host(t)
        else:
            self._address = t.data_ptr() - self._displacement

    def bring(self) -> None:
        """Copy from the caller's end."""
        if self._varying is None:
            ctypes.memmove(self.buffer.data_ptr(), self._address, self.buffer.nbytes)
        else:
            rows, end = self._ends(self._varying)
            grow(rows, end, self._varying.dims, self._varying.fill)

    def take(self) -> None:
        """Copy to the caller's end."""
        if self._varying is None:
            ctypes.memmove(self._address, self.buffer.data_ptr(), self.buffer.nbytes)
        else:
            rows, end = self._ends(self._varying)
            end.copy_(first_rows(rows, end.shape))

    def _ends(self, varying: Varying) -> tuple[Tensor, Tensor]:
        assert self._end is not None
        end, self._end = self._end, None
        return self.buffer.view(varying.dtype).view(varying.shape), end


class Ports:
    """The ports that a body asks for while it is recorded; see `Capture`.

    Args:
        provenance: see `Capture.provenance`.
        lanes: see `Capture.lanes`.
    """

    def __init__(
        self,
        recorder: TapeRecorder,
        provenance: Callable[[torch.UntypedStorage], Provenance],
        lanes: TapeLanes | None = None,
    ) -> None:
        self._recorder = recorder
        self.lanes = lanes
        self._provenance = provenance
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []

    def provenance(self, storage: torch.UntypedStorage) -> Provenance:
        return self._provenance(storage)

    def input(
        self,
        source: Tensor,
        buffer: Tensor,
        travel: Travel,
        displacement: int = 0,
        varying: Varying | None = None,
    ) -> None:
        """Add an input port; see `Capture.input`. The example's bytes are brought in at once."""
        with raw(), no_functions():
            port = Port(self._recorder, buffer, travel, displacement, varying)
            self._recorder.save(port.buffer)
            port.point(source)
            if not port.at_once:
                self._recorder.steps.append(port.bring)
                port.bring()
        self.inputs.append(port)

    def staged(self) -> None:
        """See `Capture.staged`."""

    def output(self, buffer: Tensor, displacement: int = 0, varying: Varying | None = None) -> None:
        """Add an output port; see `Capture.output`."""
        with raw(), no_functions():
            port = Port(self._recorder, buffer, Travel.NODE, displacement, varying)
        self._recorder.steps.append(port.take)
        self.outputs.append(port)
