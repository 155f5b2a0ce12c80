"""The modes around a call, and the check whether one of them must see the call's operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from typing import Any

import torch

from onelaunch.unwinding import AUTOCAST, FLAGS, listed

_WARMING: list[int] = []
"""Threads in a warm-up. A graphed callable called inside one runs inlined, as it does inside a
capture: so the warm-up runs the same operations as the capture."""


def inlining() -> AbstractContextManager[None]:
    """Run graphed callables inlined in this thread, for a warm-up."""
    return listed(_WARMING, get_ident())


# Cheap signs of an ambient mode: `ambient` is called if there is any.
_C: Any = torch._C
_dispatch_modes = _C._len_torch_dispatch_stack
_function_modes = _C._len_torch_function_stack
_functorch = _C._functorch.peek_interpreter_stack
_forward_ad: Any = torch.autograd.forward_ad
_anomaly = torch.is_anomaly_enabled
_tracing = _C._is_tracing


MODES: tuple[tuple[str, Callable[[], object]], ...] = (
    ("inference mode", torch.is_inference_mode_enabled),
    *((name, read) for name, read, _ in FLAGS),
)
"""The modes that `GlobalStateGuard` does not cover. 0.03 to 0.07 us each to read."""


_AUTOCAST_DTYPES: tuple[tuple[str, Callable[[], object]], ...] = tuple(
    (f"autocast({kind})_dtype", partial(torch.get_autocast_dtype, kind)) for kind in AUTOCAST
)
"""The dtypes that autocast has where it is off, too, which `GlobalStateGuard` leaves out. 0.2 us
each: noted around a run, and not read at each call."""


_guards: dict[str, Any] = {}
"""Text of a combination of modes that was captured -> torch's guard of it."""


_CPU = torch.device("cpu")

note_mode: Any = getattr(_C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", bool)


def refresh_mode_flag() -> None:
    """Tell torch that this thread has no dispatch mode, if it has none.

    Since pytorch#164992 torch keeps that for each thread, but takes it from a flag of the process,
    so that modes in two threads at once leave it wrong in either. Its guards of tensors then see
    other dispatch keys of a tensor subclass than in other threads.
    """
    if not _dispatch_modes():
        note_mode(False)


def runs_inline() -> bool:
    """Return whether a call must run as it is: inside a warm-up, or under an ambient mode.

    Called at every call: 0.3 us.
    """
    if torch.compiler.is_dynamo_compiling() or (_WARMING and get_ident() in _WARMING):
        return True
    if (
        _dispatch_modes()
        or _function_modes()
        or _functorch() is not None
        or _forward_ad._current_level >= 0
        or _anomaly()
        or _tracing()
    ):
        return ambient() is not None
    return False


def modes() -> tuple[object, ...]:
    """Return the modes in force: the text of torch's `GlobalStateGuard`, then `MODES`."""
    guard: Any = _C._dynamo.guards.GlobalStateGuard()
    return (guard.__getstate__(), *(read() for _, read in MODES))


def noted_modes() -> Callable[[], str]:
    """Return a function that names the modes which are no longer as they are now."""
    guard: Any = _C._dynamo.guards.GlobalStateGuard()
    more = (*MODES, *_AUTOCAST_DTYPES, ("default_device", default_device))
    others = [(name, read, read()) for name, read in more]

    def changed() -> str:
        names = [] if guard.check() else guard.reason().split()
        names += [name for name, read, was in others if read() != was]
        return ", ".join(dict.fromkeys(names))

    return changed


def readers() -> list[tuple[Callable[[], object], object]]:
    """Return functions to check at a later call that these modes are in force, with their results.

    They leave out the default device, which costs more to read and is compared where it was set.
    The same modes give the same functions.
    """
    now: Any = _C._dynamo.guards.GlobalStateGuard()
    guard = _guards.setdefault(now.__getstate__(), now)
    if not guard.check():  # its text leaves something out
        guard = now
    return [(guard.check, True), *((read, read()) for _, read in MODES)]


def ambient() -> str | None:
    """Return the ambient mode that makes a replay meaningless, or None.

    Under any of these the callable itself runs: the tracer, transform or mode around the call must
    see its operations.
    """
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if _C._len_torch_dispatch_stack():
        return "a torch dispatch mode is active"
    if _C._len_torch_function_stack() and not _only_default_device():
        return "a torch function mode is active"
    if _C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode AD is active"
    if torch.is_anomaly_enabled():
        return "anomaly mode is on"
    if _C._is_tracing():
        return "torch.jit is tracing"
    return None


def _only_default_device() -> bool:
    """Return whether the one function mode is `torch.set_default_device`'s, which the signature
    has."""
    if _C._len_torch_function_stack() != 1:
        return False
    return type(_C._get_function_stack_at(0)).__name__ == "DeviceContext"


def default_device() -> torch.device:
    """Return the default device; cheap if none was set."""
    return torch.get_default_device() if _C._len_torch_function_stack() else _CPU
