"""A way straight to torch's kernels: past autograd, autocast and the modes of the caller."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def _keys(*names: str) -> torch._C.DispatchKeySet:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


# A replay repeats what these decided during the capture.
_ABOVE_KERNELS = _keys(
    *("PythonTLSSnapshot", "Python", "AutogradFunctionality", "ADInplaceOrView", "AutocastCPU")
)


def raw() -> AbstractContextManager[object]:
    """Run what follows without autograd, autocast and dispatch modes."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)


no_functions = torch._C.DisableTorchFunction
"""A context without function modes. Under a mode each look at a tensor, such as `t.shape`, counts
as a function: 3 us instead of 0.1. In a backward modes are on; while torch calls the dispatcher for
the caller's function they are off."""
