"""The restoration of a thread's modes after a run that was interrupted."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from traceback import clear_frames
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.beside import is_beside
from onelaunch.call_events import pause, set_profile
from onelaunch.uncompiled import leave_alone

T = TypeVar("T")

_C: Any = torch._C
_MODE_KEYS = ("Python", "PythonTLSSnapshot")
"""Dispatch keys of active modes. An interrupted guard of torch's may leave a key on without a mode,
and then no operation runs any more."""
AUTOCAST = ("cpu", "cuda", "privateuseone")  # the devices whose autocast a callable may set


class _CompiledForCapture(threading.local):
    by_dynamo = False


unnoticed = _CompiledForCapture()
"""`by_dynamo`: True while this thread runs code that is compiled for a capture."""


class FunctionMode(TorchFunctionMode):
    """A function mode that ends only itself, whatever is on top of the stack. Torch pops a mode
    while the mode handles an operation (`_pop_mode_temporarily`, since pytorch#84774). After a
    Ctrl-C it does not push the mode again, whose exit would then pop another mode."""

    def __exit__(self, *raised: Any) -> None:
        if not any(mode is self for mode in function_modes()[-1:]):
            _C._push_on_torch_function_stack(self)
        super().__exit__(*raised)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that ends only itself, below other modes too, and in several threads at once.
    Torch keeps in flags of the process whether a mode is on, and a mode restores their previous
    values (pytorch#122339). With modes in two threads the flags would stay on, and nothing would be
    compiled any more."""

    _thread = 0  # the thread where the mode is active

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own: Any = vars(cls).get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)
        if own is not None:  # torch's wrapper would import Dynamo at the first operation: 2 s
            cls.__torch_dispatch__ = own
            leave_alone(own)

    def __enter__(self) -> Any:
        with _flags:
            self._thread = threading.get_ident()
            _entered.add(self)
            return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        above: list[object] = []
        if any(mode is self for mode in dispatch_modes()):
            while dispatch_modes()[-1] is not self:
                above.append(_C._pop_torch_dispatch_stack(None))
        else:
            _C._push_on_torch_dispatch_stack(self)
        with _flags:
            if len(self.old_dispatch_mode_flags) == 1:
                _entered.discard(self)
            if _entered or _C._len_torch_dispatch_stack() == 1:
                for name, value in vars(self).items():
                    if name.startswith("old_") and name.endswith("_flags"):
                        value[-1] = bool(_entered)
            super().__exit__(*raised)
        for mode in reversed(above):
            _C._push_on_torch_dispatch_stack(mode)


_entered: weakref.WeakSet[DispatchMode] = weakref.WeakSet()  # the active modes of all threads
_flags = threading.RLock()


class same_modes:
    """A context around a run that restores the stacks of modes and the profiler if the run raises.
    A Ctrl-C between any two lines, or a recursion that goes too deep, stops a context manager half
    way: a `with` that has not begun is not exited."""

    __slots__ = ("_dispatch", "_functions", "_keys", "_paused", "_profile")

    def __enter__(self) -> Self:
        self._dispatch = dispatch_modes()
        self._functions = function_modes()
        self._keys = {key: _C._dispatch_tls_is_dispatch_key_included(key) for key in _MODE_KEYS}
        self._profile = sys.getprofile()
        self._paused = pause(False)
        pause(self._paused)
        return self

    def restore(self) -> None:
        """Restore the stacks after a run that ended modes half way."""
        self._restore_modes(Exception, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._restore_modes(kind, traceback)

    def _restore_modes(self, kind: type[BaseException], traceback: TracebackType | None) -> None:
        if not issubclass(kind, Exception):  # interrupted generators end now, not when freed
            clear_frames(traceback)
        if sys.getprofile() is not self._profile:  # setting a C profiler again would end it
            set_profile(self._profile)
        pause(self._paused)
        pop, push = lambda: _C._pop_torch_dispatch_stack(None), _C._push_on_torch_dispatch_stack
        _restore(self._dispatch, dispatch_modes(), pop, push)
        pop, push = _C._pop_torch_function_stack, _C._push_on_torch_function_stack
        _restore(self._functions, function_modes(), pop, push)
        _forget_interrupted()
        for key, included in self._keys.items():
            _C._dispatch_tls_set_dispatch_key_included(key, included)


def _kinds_autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    return tuple([(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in AUTOCAST])


def _set_autocast(settings: tuple[tuple[bool, torch.dtype], ...]) -> None:
    for kind, (enabled, dtype) in zip(AUTOCAST, settings, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _set_deterministic(setting: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])


def _reduces(kind: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    name = f"allow_{kind}_reduced_precision_reduction"
    matmul: Any = torch.backends.cuda.matmul
    return getattr(_C, f"_get_cublas_{name}"), lambda setting: setattr(matmul, name, setting)


_PRECISIONS = tuple((of, op) for of in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn"))


@functools.cache
def _same(*values: T) -> tuple[T, ...]:
    """Return the same tuple for the same values."""
    return values


def _or_precisions(
    read: Callable[[], Any], write: Callable[[Any], object]
) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return reader and writer of an older setting of float32's precision. Torch refuses to read it
    after some values of `fp32_precision`: then the reader returns all present precisions."""

    def now() -> Any:
        try:
            value = read()
            return sys.intern(value) if type(value) is str else value
        except RuntimeError:
            return _same(*(_C._get_fp32_precision_getter(*kind) for kind in _PRECISIONS))

    def restore(was: Any) -> None:
        if type(was) is not tuple:
            write(was)
            return
        for kind, precision in zip(_PRECISIONS, was, strict=True):  # pyright: ignore
            _C._set_fp32_precision_setter(*kind, precision)

    return now, restore


def _attention_order() -> tuple[int, ...]:
    return _same(*_C._get_sdp_priority_order())


def _flag(read: str, write: str = "") -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return reader and writer of a flag, which have such names in torch."""
    return getattr(_C, f"_get_{read}"), getattr(_C, f"_set_{write or read}")


FLAGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("float32 matmul precision", *_or_precisions(*_flag("float32_matmul_precision"))),
    ("fp16 accumulation", *_flag("cublas_allow_fp16_accumulation")),
    ("cudnn.enabled", *_flag("cudnn_enabled")),
    ("cudnn.benchmark", *_flag("cudnn_benchmark")),
    ("cudnn.deterministic", *_flag("cudnn_deterministic")),
    ("cudnn.allow_tf32", *_or_precisions(*_flag("cudnn_allow_tf32"))),
    ("flash attention", *_flag("flash_sdp_enabled", "sdp_use_flash")),
    ("memory-efficient attention", *_flag("mem_efficient_sdp_enabled", "sdp_use_mem_efficient")),
    ("math attention", *_flag("math_sdp_enabled", "sdp_use_math")),
    ("cuDNN attention", *_flag("cudnn_sdp_enabled", "sdp_use_cudnn")),
    ("half-precision reduction of math attention", *_flag("math_sdp_allow_fp16_bf16_reduction")),
    ("order of attention", _attention_order, _C._set_sdp_priority_order),
    ("mkldnn", *_flag("mkldnn_enabled")),
    ("mkldnn.deterministic", *_flag("mkldnn_deterministic")),
    ("filling of uninitialized memory", *_flag("deterministic_fill_uninitialized_memory")),
)
"""Flags of torch's libraries: name, reader and writer."""


def shared_settings() -> list[object]:
    """Return the settings of torch that all threads share."""
    return [torch.get_default_dtype(), _deterministic(), *(read() for _, read, _ in FLAGS)]


def _default_device() -> torch.device | None:
    """Return the device that `torch.set_default_device` has set in this thread."""
    kept: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    context = getattr(kept, "device_context", None)
    return None if context is None else context.device


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (_kinds_autocast, _set_autocast),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (_deterministic, _set_deterministic),
    _reduces("fp16"),
    _reduces("bf16"),
    *((read, write) for _, read, write in FLAGS),
)
"""(reader, writer) for the settings of torch that a call may leave changed."""


class TorchSettings:
    """The settings of torch as they are now, to be restored. A capture beside calls restores
    none, as other threads set flags of the process meanwhile."""

    def __init__(self) -> None:
        self._were = [read() for read, _ in _SETTINGS]

    def restore(self) -> None:
        for (read, write), was in zip(_SETTINGS, self._were, strict=True):
            if read() != was and not is_beside():
                write(was)


class unwound(same_modes):
    """A context around a capture that also restores torch's settings and saved-tensor hooks. An
    eager call may leave them changed when it fails, but a failed capture must have no effects."""

    __slots__ = ("_hooks", "_nested", "_settings")

    def __enter__(self) -> Self:
        super().__enter__()
        self._settings = TorchSettings()
        self._hooks = _saving_hooks()
        self._nested = _nested()
        return self

    def _restore_modes(self, kind: type[BaseException], traceback: TracebackType | None) -> None:
        super()._restore_modes(kind, traceback)
        self._settings.restore()
        while _saving_hooks() not in (self._hooks, None):
            _C._autograd._pop_saved_tensors_default_hooks()
        while _nested() > self._nested:  # else the cache of weights would never be cleared
            torch.autocast_decrement_nesting()


def dispatch_modes() -> list[object]:
    return [_C._get_dispatch_stack_at(i) for i in range(_C._len_torch_dispatch_stack())]


def _forget_interrupted() -> None:
    """Restore torch's flags after a mode of this thread that was entered and never exited."""
    thread, on = threading.get_ident(), dispatch_modes()
    with _flags:
        gone = [m for m in _entered if m._thread == thread and not any(m is other for other in on)]
        _entered.difference_update(gone)
        if gone and not (_entered or on):
            for name, value in vars(_python_dispatch).items():
                if name.startswith("_is_in_") and value is True:
                    setattr(_python_dispatch, name, False)


def function_modes() -> list[object]:
    """Return the function modes of this thread, outermost first."""
    return [_C._get_function_stack_at(i) for i in range(_C._len_torch_function_stack())]


def _saving_hooks() -> object:
    return _C._autograd._top_saved_tensors_default_hooks(False)


def _restore(
    before: list[object],
    now: list[object],
    pop: Callable[[], object],
    push: Callable[[object], object],
) -> None:
    """Pop the modes of a stack that are new, and push the missing ones."""
    same = 0
    while same < min(len(before), len(now)) and before[same] is now[same]:
        same += 1
    for _ in now[same:]:
        pop()
    for mode in before[same:]:
        push(mode)


def _nested() -> int:
    """Return the number of autocast contexts around."""
    return (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1]
