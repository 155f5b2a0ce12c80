"""The modes of a thread as they were, where a run did not end by itself."""

# The stacks of modes have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch

_C: Any = torch._C
_AUTOCAST = ("cpu", "cuda", "privateuseone")


class unwound:
    """Around a run: what comes out of it leaves on no mode that was off before.

    A Ctrl-C between any two lines, and a recursion that goes too deep, stop a context manager half
    way: a `with` that has not begun is not ended. In the callable's own code that is eager's
    affair, but what runs in a capture takes the place of a call that has no effects when it fails.
    """

    __slots__ = ("_autocast", "_cached", "_dispatch", "_functions", "_grad", "_nested", "_profile")

    def __enter__(self) -> None:
        self._dispatch: int = _C._len_torch_dispatch_stack()
        self._functions: int = _C._len_torch_function_stack()
        self._grad = torch.is_grad_enabled()
        self._profile = sys.getprofile()
        self._cached = torch.is_autocast_cache_enabled()
        self._nested = _nested()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            return
        if sys.getprofile() is not self._profile:  # to set a profiler in C again would end it
            sys.setprofile(self._profile)
        while _C._len_torch_dispatch_stack() > self._dispatch:
            _C._pop_torch_dispatch_stack()
        while _C._len_torch_function_stack() > self._functions:
            _C._pop_torch_function_stack()
        torch.set_grad_enabled(self._grad)
        for device, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        while _nested() > self._nested:  # else the cache of weights would never be cleared again
            torch.autocast_decrement_nesting()


def _nested() -> int:
    """In how many contexts of autocast this is."""
    return (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1]
