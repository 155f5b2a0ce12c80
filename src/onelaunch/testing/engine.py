"""Exceptions of hooks in autograd's thread for the emulated device, brought to the caller.

As C++ unwinds what a hook raised there, torch asks the guard of the device what the device's type
is. That of CUDA answers in C++. A guard in Python is called with the hook's exception still set in
the interpreter, which takes no result then, and torch ends the process: ``terminate called without
an active exception``. So the guard keeps the exception, and the engine raises it. Since Python 3.12
no frame begins in such a state where the process is profiled; there C takes the exception first.
"""

# torch keeps both in `torch._C`.
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import atexit
import ctypes
import operator
import sys
import time
from typing import Any

import torch
from torch.autograd import Variable

_C: Any = torch._C
_EMPTY = ((),)
_any_call = operator.itemgetter(0)
"""A callable in C that the interpreter always calls with its checks."""

_lost: list[BaseException] = []
"""Exceptions of hooks, until their backwards have returned."""


def _device_type(self: object) -> Any:
    """Name the device, and keep the exception that is set."""
    try:
        _any_call(_EMPTY)
    except SystemError as error:  # "returned a result with an exception set"
        if error.__cause__ is not None:
            _lost.append(error.__cause__)
    return _C._autograd.DeviceType.PrivateUse1


def _taken(address: int | None, *_: object) -> Any:
    """Name the device, and keep the exception at an address, which is no longer set."""
    if address is not None:
        held = ctypes.cast(address, ctypes.py_object)
        _lost.append(held.value)
        ctypes.pythonapi.Py_DecRef(held)
    return _C._autograd.DeviceType.PrivateUse1


if sys.version_info >= (3, 12):
    _take: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_GetRaisedException", ctypes.pythonapi))
    _take.errcheck = _taken
    _device_type = _take


class Guard(_C._acc.DeviceGuard):
    """The device's guard, which keeps the exceptions."""

    type_ = _device_type


class RaisingEngine(_C._ImperativeEngine):
    """Autograd's engine for every device, which raises the exceptions."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.autograd.backward`."""
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:  # "returned NULL without setting an exception"
            if not _lost:
                raise
        raise _lost.pop()


def install() -> None:
    """Replace autograd's engine, for the process."""
    Variable._execution_engine = RaisingEngine()
    # A thread that is still leaving the last backward must not ask the guard when there is no
    # interpreter any more: that ends the process in the same way.
    atexit.register(time.sleep, 0.02)
