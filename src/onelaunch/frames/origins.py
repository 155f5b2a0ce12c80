"""The origin of code, by its file: the user, a package, or the internals of torch and Python."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType

from onelaunch.source import (
    PACKAGE,
    PACKAGE_FOLDERS,
    PLUMBING,
    STANDARD,
    TORCH,
    is_standard,
    is_users,
    live,
)

_READ_OF_TORCH = tuple(
    TORCH + name
    for name in (
        "nn",
        "optim",
        "distributions",
        "amp",
        "ao",
        "fx",
        "backends",
        "functional",
        "distributed/fsdp",
    )
)
"""Parts of torch that keep the user's state in Python; the rest is internal."""
_SYMBOLIC_SHAPES = TORCH + "fx/experimental"
_CONTAINERS = ("collections" + os.sep, "_collections_abc.py", "_weakrefset.py", "weakref.py")
_STRING = ("string.py", "string" + os.sep)  # a package since Python 3.14
_HOLDERS = ("configparser.py", "os.py", "queue.py", "types.py", *_STRING)
_READ_OF_STANDARD = (
    "<frozen _collections_abc",
    "<frozen os>",  # `environ`
    *(os.path.join(path, name) for path in STANDARD for name in (*_CONTAINERS, *_HOLDERS)),
)
"""Parts of the standard library that keep the user's objects in Python; the rest is internal."""
_ENVIRONMENT = ("<frozen os>", *(os.path.join(path, "os.py") for path in STANDARD))
"""The part that keeps `environ`, which the standard library asks for its caller."""


@functools.cache
def is_installed(file: str) -> bool:
    """Return whether code belongs to an installed package, the standard library, or onelaunch."""
    if file.startswith((PACKAGE, TORCH)) or is_standard(file):
        return True
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return file != main and file.startswith(tuple(_folders_of_packages(os.path.dirname(main))))


def _folders_of_packages(programs: str) -> Iterator[str]:
    """Return the folders of installed packages that this Python imports from. The program's own
    folder is not among them, whatever its name."""
    own = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    for path in {*own, *sys.path}:
        named = os.path.basename(path.rstrip(os.sep)) in PACKAGE_FOLDERS
        if path in own or (named and path != programs):
            yield os.path.join(path, "")


@functools.cache
def is_machinery(file: str) -> bool:
    """Return whether code is internal to the standard library, torch, Triton or onelaunch."""
    if file.startswith(TORCH):
        return not file.startswith(_READ_OF_TORCH) or file.startswith(_SYMBOLIC_SHAPES)
    if is_container_code(file):
        return False
    if file.startswith((PACKAGE, "<onelaunch", "<__array_function__")) or is_standard(file):
        return True
    triton = getattr(sys.modules.get("triton"), "__file__", None)  # it launches kernels
    return triton is not None and file.startswith(os.path.join(os.path.dirname(triton), ""))


def library_calls() -> Iterator[tuple[str, str]]:
    """Return the functions of installed libraries between the user's line and here, innermost
    first: ``("torch/nn/modules/batchnorm.py", "forward")``."""
    for frame in live():
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(PACKAGE) or is_standard(file):
            continue
        if is_installed(file):
            yield _path_of(frame), name
        elif is_users(file):
            return


def _path_of(frame: FrameType) -> str:
    path = str(frame.f_globals.get("__name__")).replace(".", "/")
    is_package = os.path.basename(frame.f_code.co_filename) == "__init__.py"
    return f"{path}/__init__.py" if is_package else f"{path}.py"


def gives_own_work(frame: FrameType) -> bool:
    """Return whether a frame that gives work to another thread serves the callable, and neither
    torch's compiler nor a progress bar."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename in PLUMBING:
        caller = caller.f_back
    if caller is None:
        return True
    module = str(caller.f_globals.get("__name__")).partition(".")[0]
    return module != "tqdm" and not caller.f_code.co_filename.startswith(TORCH)


@functools.cache
def is_standard_machinery(file: str) -> bool:
    return is_machinery(file) and is_standard(file)


@functools.cache
def is_container_code(file: str) -> bool:
    """Return whether code belongs to the standard library's containers."""
    return file.startswith(_READ_OF_STANDARD)


def serves_machinery(frame: FrameType) -> bool:
    """Return whether a frame runs a container's code that machinery called. The environment serves
    whoever calls the standard library."""
    file = frame.f_code.co_filename
    if not is_container_code(file):
        return False
    passes_on = is_standard if file.startswith(_ENVIRONMENT) else is_container_code
    caller = frame.f_back
    while caller is not None and passes_on(caller.f_code.co_filename):
        caller = caller.f_back
    return caller is not None and is_machinery(caller.f_code.co_filename)


def is_generated(frame: FrameType) -> bool:
    """Return whether machinery generated a frame's code, for its own named tuple or dataclass."""
    if frame.f_code.co_filename != "<string>":
        return False
    name = str(frame.f_globals.get("__name__"))
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.startswith("namedtuple_") or (file is not None and is_machinery(file))
