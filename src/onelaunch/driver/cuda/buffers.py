"""Ports whose bytes travel before a launch, through memory of the recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
                buffer.copy_(source)
