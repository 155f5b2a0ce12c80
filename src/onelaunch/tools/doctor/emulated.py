"""What stands for a GPU where there is none: the emulated device, its streams and its events.

On a CPU nothing is a copy between host and device. There, what a GPU would refuse for that reason
can be seen only where the two are apart: on the emulated device, in a process that only diagnoses.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.optim import Optimizer

from onelaunch import testing
from onelaunch.testing.torch_module import Event, Stream
from onelaunch.tools.bench.workload import Workload, parts

_DEVICE = "tape"


def install() -> None:
    """Add the emulated device to this process, if it has no GPU; before its first backward."""
    if not torch.accelerator.is_available():
        testing.install()


@contextmanager
def streams() -> Generator[None]:
    """Let torch.cuda's streams, events and waits run where there is no GPU.

    They do nothing, but that a capture refuses the waits. Functions get other code, and classes
    make other objects, so that those imported by name do too.
    """
    own = torch._C._get_privateuse1_backend_name() == _DEVICE
    if torch.accelerator.is_available() and not own:
        yield
        return
    codes: dict[Any, CodeType] = {function: function.__code__ for function in _FUNCTIONS}
    makers = {kind: vars(kind)["__new__"] for kind in _CLASSES}
    for function, other in _FUNCTIONS.items():
        function.__code__ = other.__code__
    for kind, make in _CLASSES.items():
        kind.__new__ = make
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code
        for kind, make in makers.items():
            kind.__new__ = make


# The code runs among the globals of torch's modules, and imports what it needs.


def _synchronize(device: Any = None) -> None:
    from onelaunch.testing.torch_module import wait

    wait("synchronize")


def _stream(device: Any = None) -> Any:
    from onelaunch.testing.torch_module import Stream

    return Stream()


def _set_stream(stream: Any) -> None:
    """Select a stream, which changes nothing."""


def _make_event(cls: type, *args: Any, **kwargs: Any) -> Event:
    return Event(*args, **kwargs)


def _make_stream(cls: type, *args: Any, **kwargs: Any) -> Stream:
    return Stream(*args, **kwargs)


_FUNCTIONS: dict[Any, Any] = {
    torch.cuda.synchronize: _synchronize,
    torch.accelerator.synchronize: _synchronize,
    torch.cuda.current_stream: _stream,
    torch.cuda.default_stream: _stream,
    torch.accelerator.current_stream: _stream,
    torch.cuda.set_stream: _set_stream,
}
_CLASSES: dict[Any, Any] = {torch.cuda.Event: _make_event, torch.cuda.Stream: _make_stream}


def emulated(workload: Workload) -> Workload:
    """Copy a workload of the CPU to the emulated device.

    Return the workload itself where there is none, where eager does not run there, or where an
    optimizer would step parameters that stay behind.
    """
    backend = torch._C._get_privateuse1_backend_name()
    if workload.device.type != "cpu" or backend != _DEVICE or _steps(workload):
        return workload
    try:
        moved = workload.on(torch.device(backend))
        moved.copy()()
    except (RuntimeError, NotImplementedError, TypeError):  # an operation that it does not have
        return workload
    return moved


def _steps(workload: Workload) -> bool:
    return any(isinstance(part, Optimizer) for part in parts(workload.fn))
