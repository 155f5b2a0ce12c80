"""The driver of a call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from onelaunch.driver.protocol import Driver
from onelaunch.gc_pause import importing

_MAKERS: dict[str, str | Callable[[], Driver]] = {
    "cpu": "onelaunch.testing.driver:TapeDriver",
    "cuda": "onelaunch.driver.cuda:CudaDriver",
}
"""Device type -> what makes its driver, or the place of that, imported for the first call."""


def register(kind: str, make: Callable[[], Driver]) -> None:
    """Add the driver of another device type."""
    _MAKERS[kind] = make


@cache
def driver_of(kind: str) -> Driver:
    """Find the driver of a device type; it is made once."""
    make = _MAKERS[kind]
    with importing():
        make = resolve_name(make) if isinstance(make, str) else make
    return make()


def select(tensors: Iterable[Tensor]) -> tuple[Driver, torch.device]:
    """Find the driver and device of a call: an accelerator's if any tensor is there."""
    devices = (t.device for t in tensors)
    host = torch.device("cpu")
    device = next((d for d in devices if d.type != "cpu" and d.type in _MAKERS), host)
    return driver_of(device.type), device


def recordable(t: Tensor) -> bool:
    """Tell whether a tensor is memory and nothing more, of a device that has a driver."""
    if t.device.type not in _MAKERS or t.layout is not torch.strided or t.is_quantized:
        return False
    return type(t) in (Tensor, nn.Parameter, driver_of(t.device.type).tensor_class)


def computing(device: torch.device) -> torch.device:
    """Find the device whose kernels and random generators serve a device: itself, or the host."""
    return torch.device("cpu") if driver_of(device.type).computes_on_host else device


@contextmanager
def preserved_random_state(
    device: torch.device, generators: Iterable[torch.Generator] = ()
) -> Generator[None]:
    """Put the random state of host, device and generators back afterwards.

    For the CPU also that of the GPU in use: a run that is taken for the host's may work there.
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
