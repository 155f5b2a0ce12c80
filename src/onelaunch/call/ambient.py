"""Whether a call may replay where it happens, or what surrounds it wants to see its operations."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from onelaunch.call.spec import ambient

_WARMING: list[int] = []
"""The threads that are in a warm-up. A graphed callable called inside one runs inlined, as it does
inside a capture, so that what will be captured is what has been warmed up."""


@contextmanager
def inlining() -> Generator[None]:
    """This thread warms a callable up."""
    ident = get_ident()
    _WARMING.append(ident)
    try:
        yield
    finally:
        _WARMING.remove(ident)


# The cheap signs of something ambient, as any of which `ambient` is asked.
_C: Any = torch._C
_dispatch_modes = _C._len_torch_dispatch_stack
_function_modes = _C._len_torch_function_stack
_functorch = _C._functorch.peek_interpreter_stack
_forward_ad: Any = torch.autograd.forward_ad
_anomaly = torch.is_anomaly_enabled
_tracing = _C._get_tracing_state


_note_mode: Any = getattr(
    _C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", bool
)


def note_modes() -> None:
    """See to it that torch knows whether this thread has a dispatch mode.

    It keeps that for each thread, and takes it from a flag of the process, so that modes of two
    threads at once leave it wrong in either (torch 2.11 to 2.13). Its guards of tensors then see
    other dispatch keys of a tensor subclass than in other threads.
    """
    if not _dispatch_modes():
        _note_mode(False)


def runs_inline() -> bool:
    """Whether a call is to run as it is: inside a warm-up, or under what `ambient` names.

    Asked at every call: 0.3 us.
    """
    if torch.compiler.is_dynamo_compiling() or (_WARMING and get_ident() in _WARMING):
        return True
    return (
        bool(
            _dispatch_modes()
            or _function_modes()
            or _functorch() is not None
            or _forward_ad._current_level >= 0
            or _anomaly()
            or _tracing() is not None
        )
        and ambient() is not None
    )
