"""Whether a call may replay where it happens, or what surrounds it wants to see its operations."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from onelaunch.spec import ambient

WARMING: list[int] = []
"""The threads that are in a warm-up. A graphed callable called inside one runs inlined, as it does
inside a capture, so that what will be captured is what has been warmed up."""


@contextmanager
def inlining() -> Generator[None]:
    """This thread warms a callable up."""
    ident = get_ident()
    WARMING.append(ident)
    try:
        yield
    finally:
        WARMING.remove(ident)


# The cheap signs of something ambient, as any of which `ambient` is asked.
_C: Any = torch._C
dispatch_modes = _C._len_torch_dispatch_stack
function_modes = _C._len_torch_function_stack
functorch = _C._functorch.peek_interpreter_stack
forward_ad: Any = torch.autograd.forward_ad
anomaly = torch.is_anomaly_enabled
tracing = _C._get_tracing_state


def surrounded() -> bool:
    """Whether a call is to run as it is: inside a warm-up, or under what `ambient` names.

    `Graphed.__call__` has these lines written out, which spares it a call.
    """
    if torch.compiler.is_dynamo_compiling() or (WARMING and get_ident() in WARMING):
        return True
    return (
        bool(
            dispatch_modes()
            or function_modes()
            or functorch() is not None
            or forward_ad._current_level >= 0
            or anomaly()
            or tracing() is not None
        )
        and ambient() is not None
    )
