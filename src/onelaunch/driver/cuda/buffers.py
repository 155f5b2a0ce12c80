"""Ports whose bytes travel before a launch, or after it, through memory of the recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onelaunch.driver.cuda.memory import alias
from onelaunch.driver.protocol import Travel

if TYPE_CHECKING:
    from onelaunch.driver.cuda.capture import CudaPort


def bring(early: Sequence[tuple[int, CudaPort]], sources: Sequence[Tensor]) -> None:
    """Copy the sources of ports to the recording's memory."""
    with torch.inference_mode():  # whatever mode the buffers were made in, and no autograd
        for index, port in early:
            buffer, source = port.buffer, sources[index]
            assert buffer is not None
            if port.travel == Travel.FILL:
                buffer.fill_(source)
            else:
                buffer.copy_(_like(buffer, source, port.displacement))


def take(late: Sequence[tuple[int, CudaPort]], targets: Sequence[Tensor]) -> None:
    """Copy the recording's memory to the targets of ports."""
    with torch.inference_mode():
        for index, port in late:
            buffer = port.buffer
            assert buffer is not None
            _like(buffer, targets[index], port.displacement).copy_(buffer)


def _like(buffer: Tensor, t: Tensor, displacement: int) -> Tensor:
    """View the bytes of `t` where the buffer is of bytes (a port of nodes without bindings)."""
    if buffer.dtype is t.dtype and buffer.shape == t.shape:
        return t
    return alias(t, torch.uint8, tuple(buffer.shape), (1,), -displacement)
