"""Which driver runs a call."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from onelaunch.driver.protocol import Driver

DEVICES = ("cpu", "cuda", "tape")
"""The device types that have a driver."""


@cache
def driver_of(kind: str) -> Driver:
    """The driver of a device type, made once."""
    if kind == "cuda":
        from onelaunch.driver.cuda import CudaDriver

        return CudaDriver()
    from onelaunch.driver.tape.driver import TapeDriver

    return TapeDriver()


def select(tensors: Iterable[Tensor]) -> tuple[Driver, torch.device]:
    """The driver and device of a call: an accelerator's if any tensor is there."""
    found = next((t.device for t in tensors if t.device.type in DEVICES[1:]), None)
    device = found or torch.device("cpu")
    return driver_of(device.type), device


@contextmanager
def preserved_random_state(
    device: torch.device, generators: Iterable[torch.Generator] = ()
) -> Generator[None]:
    """Put the random state of host, device and generators back afterwards.

    Of the CPU also that of the GPU in use: a run that is taken for the host's may work there.
    """
    states = [(g, g.get_state()) for g in generators]
    devices = [device.index] if device.type == "cuda" else []
    if device.type == "cpu" and torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)
