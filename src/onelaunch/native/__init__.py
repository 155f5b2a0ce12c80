"""The only C in the package, built by the system's compiler at first use.

    guard.c        StateGuard's check, and that of a compiled graph's parameters
    call_events.c  the filter of what the interpreter reports to a profiling function

Where the build fails, Python does the same: a wheel for each torch and Python is not worth 1,000
lines. The libraries are kept in the user's cache directory, named by the source and the
interpreter. ``ONELAUNCH_NATIVE=0`` disables them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

FAILURES = (OSError, AttributeError, ImportError, subprocess.SubprocessError, LookupError)
"""The errors that `compiled` raises, and whatever connects a library to others may."""


@functools.cache
def compiled(name: str) -> Any:
    """Build ``name.c`` if need be (0.5 s, once for each machine and Python), and load it.

    Raises:
        LookupError: it is turned off, or there is no compiler; the others of `FAILURES`.
    """
    if os.environ.get("ONELAUNCH_NATIVE") == "0":
        raise LookupError("turned off by ONELAUNCH_NATIVE=0")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise LookupError("it relies on the interpreter lock, which this Python goes without")
    source = pkgutil.get_data(__name__, f"{name}.c")  # the package may lie in a zip
    assert source is not None
    path = _built(name, source)
    loader = importlib.machinery.ExtensionFileLoader(f"onelaunch_{name}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _built(name: str, source: bytes) -> Path:
    """Return the shared library, compiled if it is not in the cache."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = hashlib.sha256(source + suffix.encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(home):
        raise LookupError("no home directory, in whose cache it would be kept")
    target = Path(home) / "onelaunch" / key / f"onelaunch_{name}{suffix}"
    if target.exists():
        return target
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise LookupError(f"no Python.h in {include}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        library, text = Path(scratch) / target.name, Path(scratch) / f"{name}.c"
        text.write_bytes(source)
        command = [*_compiler(), "-O2", "-shared", "-fPIC", f"-I{include}", "-o", library, text]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.replace(library, target)
    return target


def _compiler() -> list[str]:
    """Return the compiler that Python was built with, or another that is installed."""
    import shlex  # for this alone, once for each machine

    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    for candidate in ([command[0]], ["cc"], ["gcc"], ["clang"]):
        if shutil.which(candidate[0]):
            return candidate
    raise LookupError("no C compiler")
