"""The modes around a call, and the check whether one of them must see the call's operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext

from onelaunch.beside import listed
from onelaunch.errors import GraphWarning
from onelaunch.source import levels_to_user, user_line
from onelaunch.unwinding import AUTOCAST, FLAGS

_WARMING: list[int] = []
"""Threads in a warm-up. A graphed callable inside a warm-up runs inlined, as inside a capture, so
that both run the same operations."""


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
"""Autocast's dtypes while it is off, which `GlobalStateGuard` leaves out. 0.2 us each: noted around
a run, and not read at each call."""


_guards: dict[str, Any] = {}
"""Text of a captured combination of modes -> torch's guard of the modes."""


_CPU = torch.device("cpu")

note_mode: Any = getattr(_C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", bool)


def refresh_mode_flag() -> None:
    """Tell torch that this thread has no dispatch mode, if it has none. Since pytorch#164992 torch
    keeps a flag for each thread, but copies it from a flag of the process: modes in two threads at
    once leave it wrong. Its guards of tensors then see other dispatch keys of a tensor subclass
    than in other threads."""
    if not _dispatch_modes():
        note_mode(False)


def runs_inline(graphed: Any) -> bool:
    """Return whether a call must run eagerly as a part of another run, a warm-up for example, or
    under an ambient mode. Asked at every call: 0.3 us. `graphed`: the graphed callable, which is
    named if torch.compile traces it."""
    if torch.compiler.is_dynamo_compiling():
        note_traced(graphed._name)
        return True
    if _WARMING and get_ident() in _WARMING:
        return True
    if (
        _dispatch_modes()
        or _function_modes()
        or _functorch() is not None
        or _forward_ad._current_level >= 0
        or _anomaly()
        or _tracing()
    ):
        reason = ambient()
        if reason is not None:
            graphed._table.unserved.note("OL303", reason)
        return reason is not None
    return False


_told: set[str] = set()


def note_traced(name: str) -> None:
    """Warn, once for each name, of a callable that torch.compile traces through, except while code
    is compiled for a recording. Dynamo runs this while it traces."""
    ours = get_ident() in _WARMING or torch.compiler.is_exporting()
    if not ours and name not in _told:
        _told.add(name)
        what = f"`{name}` is graphed, and torch.compile compiles what is inside"
        warnings.warn(GraphWarning("OL313", what, where=user_line()), stacklevel=levels_to_user())


# `torch.compiler.assume_constant_result` sets this too, and imports Dynamo, which takes a second.
_marked: Any = note_traced
_marked._dynamo_marked_constant = True


def modes() -> tuple[object, ...]:
    """Return the modes in force: the text of torch's `GlobalStateGuard`, then `MODES`."""
    guard: Any = _C._dynamo.guards.GlobalStateGuard()
    return (guard.__getstate__(), *(read() for _, read in MODES))


class Modes:
    """The modes of this thread that belong to a signature, to be entered in another thread.
    `graded`: False to replace a mode with gradients by inference mode."""

    def __init__(self, graded: bool = True) -> None:
        grad = torch.is_grad_enabled()
        self._grad = grad and graded
        self._inference = torch.is_inference_mode_enabled() or (grad and not graded)
        self._cache = torch.is_autocast_cache_enabled()
        self._casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in AUTOCAST
        ]

    @contextmanager
    def entered(self) -> Generator[None]:
        with ExitStack() as entered:
            entered.enter_context(torch.inference_mode(self._inference))
            entered.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._casts:
                if enabled:
                    cast = torch.autocast(kind, dtype, cache_enabled=self._cache)
                    entered.enter_context(cast)
            yield


def noted_modes() -> Callable[[], str]:
    """Return a function that names the modes that have changed since now."""
    guard: Any = _C._dynamo.guards.GlobalStateGuard()
    more = (*MODES, *_AUTOCAST_DTYPES, ("default_device", default_device))
    others = [(name, read, read()) for name, read in more]

    def changed() -> str:
        names = [] if guard.check() else guard.reason().split()
        names += [name for name, read, was in others if read() != was]
        return ", ".join(dict.fromkeys(names))

    return changed


def readers() -> list[tuple[Callable[[], object], object]]:
    """Return (reader, result) pairs that check at a later call that the same modes are in force.
    The default device is left out, as it costs more to read: it is compared where it was set. The
    same modes give the same functions."""
    now: Any = _C._dynamo.guards.GlobalStateGuard()
    guard = _guards.setdefault(now.__getstate__(), now)
    if not guard.check():  # its text is not complete
        guard = now
    return [(guard.check, True), *((read, read()) for _, read in MODES)]


def ambient() -> str | None:
    """Return the ambient mode that makes a replay meaningless, or None. The call runs eagerly
    then: the tracer, transform or mode must see its operations."""
    return next((mode for mode, is_active in _AMBIENT if is_active()), None)


def compiles_here() -> bool:
    """Return whether this thread compiles. Torch's flag is of the whole process, so that another
    thread may have set it; an export that Dynamo has no part in is a dispatch mode, too."""
    if not torch.compiler.is_compiling():
        return False
    return (CompileContext.try_get() or TracingContext.try_get()) is not None


def _has_function_mode() -> bool:
    """Return whether there is a function mode other than `torch.set_default_device`'s."""
    modes = [type(_C._get_function_stack_at(i)).__name__ for i in range(_function_modes())]
    return modes not in ([], ["DeviceContext"])


_AMBIENT: tuple[tuple[str, Callable[[], object]], ...] = (
    ("torch.compile is tracing", compiles_here),
    ("a torch dispatch mode is active", _dispatch_modes),
    ("a torch function mode is active", _has_function_mode),
    ("a functorch transform is active", lambda: _functorch() is not None),
    ("forward-mode AD is active", lambda: _forward_ad._current_level >= 0),
    ("anomaly mode is on", _anomaly),
    ("torch.jit is tracing", _tracing),
)


def default_device() -> torch.device:
    """Return the default device; cheap if none was set."""
    return torch.get_default_device() if _C._len_torch_function_stack() else _CPU
