"""A way straight to torch's kernels: past autograd, autocast and the modes of the caller."""

from __future__ import annotations

import functools
import operator
from contextlib import AbstractContextManager

import torch

_NAMES = "PythonTLSSnapshot", "Python", "AutogradFunctionality", "ADInplaceOrView", "AutocastCPU"
_KEYS = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in _NAMES)
_ABOVE_KERNELS = functools.reduce(operator.or_, _KEYS)
"""The dispatch keys above kernels. A replay repeats what they decided during the capture."""


def raw() -> AbstractContextManager[object]:
    """Run what follows without autograd, autocast and dispatch modes."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)


no_functions = torch._C.DisableTorchFunction
"""A context without function modes. Under a mode each look at a tensor, such as `t.shape`, counts
as a function: 3 us instead of 0.1. In a backward modes are on; while torch calls the dispatcher for
the caller's function they are off."""
