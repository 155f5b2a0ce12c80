"""What hooks raise in autograd's thread of the emulated device, brought to the caller as on CUDA.

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
"""Called from C in a way that the interpreter never makes shorter, leaving its checks out."""

_lost: list[BaseException] = []
"""What hooks raised, until their backwards have returned."""


class Guard(_C._acc.DeviceGuard):
    """The device's."""

    def type_(self) -> Any:
        """Which device it guards."""
        try:
            _any_call(_EMPTY)
        except SystemError as error:  # "returned a result with an exception set"
            if error.__cause__ is not None:
                _lost.append(error.__cause__)
        return _C._autograd.DeviceType.PrivateUse1


class Engine(_C._ImperativeEngine):
    """Autograd's, for every device."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.autograd.backward`."""
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:  # "returned NULL without setting an exception"
            if not _lost:
                raise
        raise _lost.pop()


def install() -> None:
    """For the process."""
    Variable._execution_engine = Engine()
    # A thread that is still leaving the last backward must not ask the guard when there is no
    # interpreter any more: that ends the process in the same way.
    atexit.register(time.sleep, 0.02)
