"""The ports of a recording of the tape: copies in and out, at addresses told by each launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.protocol import Travel
from onelaunch.driver.rows import first_rows, grow
from onelaunch.driver.tape.recorder import TapeRecorder
from onelaunch.sizes.dims import Varying

OnHost = Callable[[Tensor], Tensor]


class Port:
    """One copy between the caller's memory and the recording's, at an address set by launch.

    Args:
        on_host: makes a host tensor over the memory of one of the device.

    Attributes:
        at_once: true if `point` copies, and no step.
    """

    at_once = False

    def __init__(
        self, on_host: OnHost, buffer: Tensor, displacement: int, travel: Travel = Travel.NODE
    ) -> None:
        self.buffer = on_host(buffer)
        self.on_host = on_host
        self.travel: Travel = travel
        self._displacement = displacement
        self._address = 0

    @property
    def span(self) -> tuple[int, int]:
        """The addresses of the recording's end."""
        start = self.buffer.data_ptr()
        return start, start + self.buffer.nbytes

    def point(self, t: Tensor) -> None:
        """Take note of where the caller's end is."""
        self._address = t.data_ptr() - self._displacement

    def bring(self) -> None:
        """Copy from the caller's end."""
        ctypes.memmove(self.buffer.data_ptr(), self._address, self.buffer.nbytes)

    def take(self) -> None:
        """Copy to the caller's end."""
        ctypes.memmove(self._address, self.buffer.data_ptr(), self.buffer.nbytes)


class CopyPort(Port):
    """An input that is copied as a launch begins: of any layout, or of the host for ``"fill"``."""

    at_once = True

    def point(self, t: Tensor) -> None:
        self.buffer.copy_(self.on_host(t))


class VaryingPort(Port):
    """A port whose end at the caller may be smaller; `point` takes the caller's tensor itself."""

    def __init__(self, on_host: OnHost, buffer: Tensor, varying: Varying) -> None:
        super().__init__(on_host, buffer, 0, Travel.PAD)
        self._rows = self.buffer.view(varying.dtype).view(varying.shape)
        self._varying = varying
        self._end: Tensor | None = None

    def point(self, t: Tensor) -> None:
        self._end = self.on_host(t)

    def bring(self) -> None:
        assert self._end is not None
        grow(self._rows, self._end, self._varying.dims, self._varying.fill)
        self._end = None

    def take(self) -> None:
        assert self._end is not None
        self._end.copy_(first_rows(self._rows, self._end.shape))
        self._end = None


class Ports:
    """The ports that a body asks for while it is recorded; see `Capture`."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self._on_host = recorder.memory.on_host
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []

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
            if varying is not None:
                port = VaryingPort(self._on_host, buffer, varying)
            else:
                kind = Port if travel == Travel.NODE else CopyPort
                port = kind(self._on_host, buffer, displacement, travel)
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
            if varying is None:
                port = Port(self._on_host, buffer, displacement)
            else:
                port = VaryingPort(self._on_host, buffer, varying)
        self._recorder.steps.append(port.take)
        self.outputs.append(port)
