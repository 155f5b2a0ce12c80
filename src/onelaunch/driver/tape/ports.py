"""The ends of a recording of the tape: what a launch copies in and out, and where."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.emulated import device as emulated
from onelaunch.driver.emulated.storage import host
from onelaunch.driver.protocol import Travel
from onelaunch.driver.rows import first_rows, grow
from onelaunch.driver.tape.recorder import Recorder
from onelaunch.sizes.dims import Varying


class Port:
    """One copy between the caller's memory and the recording's, at an address set by launch.

    Attributes:
        position: of its copy among the steps; -1 where `point` copies.
    """

    def __init__(self, buffer: Tensor, displacement: int, travel: Travel = "node") -> None:
        self.buffer = on_host(buffer)
        self.travel: Travel = travel
        self.position = -1
        self.nbytes = buffer.numel()
        self._displacement = displacement
        self._address = 0

    @property
    def point(self) -> Callable[[Tensor], object]:
        """What a launch tells where the caller's end is."""
        return self._point

    def _point(self, t: Tensor) -> None:
        self._address = t.data_ptr() - self._displacement

    def bring(self) -> None:
        ctypes.memmove(self.buffer.data_ptr(), self._address, self.nbytes)

    def take(self) -> None:
        ctypes.memmove(self._address, self.buffer.data_ptr(), self.nbytes)


class CopyPort(Port):
    """An input that `point` copies at once: of any layout, or of the host for ``"fill"``.

    Attributes:
        whole: whether `buffer` is as the caller's tensor is, and all of its memory.
    """

    def __init__(self, buffer: Tensor, travel: Travel, whole: bool = False) -> None:
        super().__init__(buffer, 0, travel)
        self.whole = whole
        self._on_device = isinstance(buffer, emulated.TapeTensor)

    @property
    def point(self) -> Callable[[Tensor], object]:
        return functools.partial(_copy, self.buffer) if self._on_device else self.buffer.copy_


class RowPort(Port):
    """A port whose end at the caller may be smaller; `point` takes the caller's tensor itself."""

    def __init__(self, buffer: Tensor, varying: Varying) -> None:
        super().__init__(buffer, 0, "pad")
        self._rows = self.buffer.view(varying.dtype).view(varying.shape)
        self._varying = varying
        self._end: Tensor | None = None

    def _point(self, t: Tensor) -> None:
        self._end = on_host(t)

    def bring(self) -> None:
        assert self._end is not None
        grow(self._rows, self._end, self._varying.dims, self._varying.fill)
        self._end = None

    def take(self) -> None:
        assert self._end is not None
        self._end.copy_(first_rows(self._rows, self._end.shape))
        self._end = None


class Ports:
    """What a body may ask for while it is recorded; see `Capture`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
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
                port = RowPort(buffer, varying)
            elif travel != "node":
                port = CopyPort(buffer, travel)
            elif displacement == 0 and _is_whole(source, buffer):
                like = torch.empty(0, dtype=source.dtype, device="cpu")
                like.set_(buffer.untyped_storage(), 0, source.shape, source.stride())  # pyright: ignore
                port = CopyPort(like, travel, whole=True)
            else:
                port = Port(buffer, displacement)
            self._recorder.save(port.buffer)
            port.point(source)
            if not isinstance(port, CopyPort):
                self._record(port, port.bring)
                port.bring()
        self.inputs.append(port)

    def staged(self) -> None:
        """See `Capture.staged`."""

    def output(self, buffer: Tensor, displacement: int = 0, varying: Varying | None = None) -> None:
        """Add an output port; see `Capture.output`."""
        with raw(), no_functions():
            port = RowPort(buffer, varying) if varying else Port(buffer, displacement)
        self._record(port, port.take)
        self.outputs.append(port)

    def _record(self, port: Port, copy: Callable[[], object]) -> None:
        port.position = len(self._recorder.steps)
        self._recorder.steps.append(copy)


def _is_whole(source: Tensor, buffer: Tensor) -> bool:
    """Whether a plain CPU tensor is all the bytes of its buffer, so that `copy_` copies just those:
    at two thirds of the time of a copy by addresses."""
    spec = TensorSpec.of(source)
    plain = source.device.type == "cpu" and spec.kind in (Tensor, torch.nn.Parameter)
    whole = spec.dense and source.nbytes == buffer.numel() and buffer.storage_offset() == 0
    return plain and whole and not (spec.conj or spec.neg)


def _copy(buffer: Tensor, source: Tensor) -> None:
    buffer.copy_(on_host(source))


def on_host(t: Tensor) -> Tensor:
    """A CPU tensor over the memory of `t`: `t` itself, unless it is on the emulated device."""
    return host(t) if isinstance(t, emulated.TapeTensor) else t
