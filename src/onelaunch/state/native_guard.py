"""The class of `guard.c`'s guard, connected to torch's C interface."""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.identity import id
from onelaunch.native import FAILURES, compiled
from onelaunch.state.slots import MISSING

_FUNCTIONS = (
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dim",
    "aoti_torch_get_dtype",
)


class NativeGuard(NamedTuple):
    """The class of the compiled guard, or the reason why there is none."""

    guard: Any | None
    reason: str
    number: Callable[[Tensor], int] | None = None
    """A function that returns the number of a tensor's dtype in C."""


@functools.cache
def native_guard() -> NativeGuard:
    """Build and load the guard in C, and connect it."""
    try:
        module = compiled("guard")
        offset = _pointer_offset()
        library = ctypes.CDLL(str(_library()))
        addresses = [
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS
        ]
    except FAILURES as error:
        return NativeGuard(None, f"{type(error).__name__}: {error}")
    module.connect(*addresses, offset, torch._C.TensorBase.requires_grad, MISSING)
    if not _dicts_report_changes(module.Guard):
        module.unwatch()
    return NativeGuard(module.Guard, "in use", module.dtype)


class _Object:
    """An object with a dict."""


_CHANGES = [
    compile(line, "<onelaunch>", "exec")
    for line in ("o.a = object()", "o.b = object()", "del o.a", "vars(o).update(a=object())")
]
_WARM = 64  # runs after which the interpreter has specialized the code


def _dicts_report_changes(guard: Any) -> bool:
    """Return whether watched dicts report all changes: Python 3.13.0 reports none by ``o.a = b``
    (cpython#125608)."""

    def seen(change: types.CodeType) -> bool:
        o: Any = _Object()
        o.a = value = object()
        watched = vars(o)
        guarded = guard((), (), (watched,), ("a",), [value], 1, (watched,), [1], 1, (), ())
        works = guarded.check() is True
        exec(change, {"o": o})
        return works and guarded.check() is not True

    return all(seen(change) for change in _CHANGES for _ in range(_WARM))


def _library() -> Path:
    """Return the library that exports the C interface; torch has loaded it already."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (folder / name).exists():
            return folder / name
    raise LookupError(f"no libtorch_cpu in {folder}")


def _pointer_offset() -> int:
    """Find the offset of the pointer to the C++ tensor in a Python tensor, by searching for it."""
    offsets: set[int] | None = None
    plain = (torch.empty(2, device="cpu"), torch.empty(1, device="cpu"))
    for t in (*plain, torch.nn.Parameter(torch.empty(3, device="cpu"))):
        size = type(t).__basicsize__ // 8
        words = (ctypes.c_uint64 * size).from_address(id(t))
        # Without the head: a reference count and a type.
        places = {8 * i for i in range(2, size) if words[i] == t._cdata}
        offsets = places if offsets is None else offsets & places
    if not offsets:
        raise LookupError("this torch keeps its tensors in another way")
    return min(offsets)
