"""The driver of a call."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pkgutil import resolve_name
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.beside import BESIDE, CaptureBeside, is_beside
from onelaunch.call.spec import has_strides
from onelaunch.driver.protocol import Driver
from onelaunch.driver.substitutes import replaced
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
    if t.device.type not in _MAKERS or not has_strides(t) or t.is_quantized:
        return False
    return type(t) in (Tensor, nn.Parameter, driver_of(t.device.type).tensor_class)


def computing(device: torch.device) -> torch.device:
    """Find the device whose kernels and random generators serve a device: itself, or the host."""
    return torch.device("cpu") if driver_of(device.type).computes_on_host else device


_SETTERS: Any = (
    (torch.random, "set_rng_state"),
    (torch.cuda, "set_rng_state"),
    (torch, "set_default_dtype"),
    (random, "setstate"),
)
"""The functions by which Dynamo puts back what a compilation may have changed in the process."""
_setters = threading.RLock()


@contextmanager
def _setting_nothing() -> Generator[None]:
    """Have those functions do nothing in captures beside calls: other threads draw meanwhile."""

    def unless_beside(write: Callable[..., object], *args: object) -> None:
        if not is_beside():
            write(*args)

    with _setters, ExitStack() as stack:
        for module, name in _SETTERS:
            write = partial(unless_beside, getattr(module, name))
            stack.enter_context(replaced(module, **{name: write}))
        yield


@contextmanager
def beside_calls(
    under_way: Callable[[], object], check: Callable[[], object] = lambda: None
) -> Generator[None]:
    """Mark this thread as one that captures while other threads call the same callable. What it
    runs draws no random numbers: states that are put back would be those of other threads.
    `under_way`: returns whether a call is under way, for which the capture makes way. `check`:
    called before each run of the callable. What either raises ends the capture."""
    thread = get_ident()
    BESIDE[thread] = CaptureBeside(under_way, check)
    try:
        with _setting_nothing():
            yield
    finally:
        del BESIDE[thread]


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's default generators, of the host and of a device."""
    module: Any = torch.get_device_module(device)
    return [torch.get_rng_state(), getattr(module, "get_rng_state", torch.get_rng_state)()]


@contextmanager
def preserved_random_state(
    device: torch.device, generators: Iterable[torch.Generator] = ()
) -> Generator[None]:
    """Put the random state of host, device and generators back afterwards. For the CPU also that of
    the GPU in use: a run that is taken for the host's may work there."""
    if is_beside():
        yield
        return
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
