"""Exceptions of hooks in autograd's thread for the emulated device, brought to the caller.

As C++ unwinds what a hook raised there, torch asks the guard of the device what the device's type
is. That of CUDA answers in C++. A guard in Python is called with the hook's exception still set in
the interpreter, which takes no result then, and torch ends the process: ``terminate called without
an active exception``. So the guard keeps the exception, and the engine raises it.
"""

# torch keeps both in `torch._C`.
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import atexit
import operator
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


class Guard(_C._acc.DeviceGuard):
    """The device's guard, which keeps the exceptions."""

    def type_(self) -> Any:
        """Name the device that it guards."""
        try:
            _any_call(_EMPTY)
        except SystemError as error:  # "returned a result with an exception set"
            if error.__cause__ is not None:
                _lost.append(error.__cause__)
        return _C._autograd.DeviceType.PrivateUse1


class Engine(_C._ImperativeEngine):
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
    Variable._execution_engine = Engine()
    # A thread that is still leaving the last backward must not ask the guard when there is no
    # interpreter any more: that ends the process in the same way.
    atexit.register(time.sleep, 0.02)
