"""The only C in the package.

    guard.c  StateGuard's check, built by the system's compiler at first use

Where the build fails, the guard runs in Python: a wheel for each torch and Python is not worth 500
lines. The library is kept in the user's cache directory, named by the source and the interpreter.
``ONELAUNCH_NATIVE=0`` disables it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onelaunch.state.slots import MISSING

_SOURCE = Path(__file__).with_name("guard.c")
_FUNCTIONS = (
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dim",
    "aoti_torch_get_dtype",
)


@dataclass(frozen=True)
class Native:
    """The class of the compiled guard, or the reason why there is none."""

    guard: Any | None
    reason: str


@functools.cache
def native() -> Native:
    """Build `guard.c` if need be (0.5 s, once for each machine and Python), load it, connect it."""
    if os.environ.get("ONELAUNCH_NATIVE") == "0":
        return Native(None, "turned off by ONELAUNCH_NATIVE=0")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Native(None, "it relies on the interpreter lock, which this Python goes without")
    try:
        module = _load(_built())
        offset = _pointer_offset()
        library = ctypes.CDLL(str(_library()))
        addresses = [
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS
        ]
    except (OSError, AttributeError, ImportError, subprocess.SubprocessError, LookupError) as error:
        return Native(None, f"{type(error).__name__}: {error}")
    module.connect(*addresses, offset, torch._C.TensorBase.requires_grad, MISSING)
    if not _dicts_report_changes(module.Guard):
        module.unwatch()
    return Native(module.Guard, "in use")


class _Object:
    """An object with a dict."""

    a: object
    b: object


def _replace(o: _Object) -> None:
    o.a = object()


def _add(o: _Object) -> None:
    o.b = object()


def _remove(o: _Object) -> None:
    del o.a


def _update(o: _Object) -> None:
    vars(o).update(a=object())


_WARM = 64  # runs after which the interpreter has specialized the code


def _dicts_report_changes(guard: Any) -> bool:
    """Return whether watched dicts report all changes: Python 3.13.0 reports none by ``o.a = b``
    (cpython#125608)."""

    def seen(change: Callable[[_Object], None]) -> bool:
        o = _Object()
        o.a = value = object()
        watched = vars(o)
        made = guard((), (), (watched,), ("a",), [value], 1, (watched,), [1], 1, (), False)
        known = made.check() is True
        change(o)
        return known and made.check() is not True

    changes = (_replace, _add, _remove, _update)
    return all(seen(change) for change in changes for _ in range(_WARM))


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
        found = {8 * i for i in range(2, size) if words[i] == t._cdata}
        offsets = found if offsets is None else offsets & found
    if not offsets:
        raise LookupError("this torch keeps its tensors in another way")
    return min(offsets)


def _built() -> Path:
    """Return the shared library, compiled if it is not in the cache."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = hashlib.sha256(_SOURCE.read_bytes() + suffix.encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    target = Path(home) / "onelaunch" / key / f"onelaunch_guard{suffix}"
    if target.exists():
        return target
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise LookupError(f"no Python.h in {include}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [*_compiler(), "-O2", "-shared", "-fPIC", f"-I{include}", "-o", made, _SOURCE]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.replace(made, target)
    return target


def _compiler() -> list[str]:
    """Return the compiler that Python was built with, or another that is installed."""
    wanted = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    for candidate in ([wanted[0]], ["cc"], ["gcc"], ["clang"]):
        if shutil.which(candidate[0]):
            return candidate
    raise LookupError("no C compiler")


def _load(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("onelaunch_guard", str(path))
    spec = importlib.util.spec_from_loader("onelaunch_guard", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
