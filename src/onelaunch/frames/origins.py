"""The origin of code, by its file: the user, a package, or the internals of torch and Python."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import FrameType

from onelaunch.source import PACKAGE, TORCH

_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_READ_OF_TORCH = tuple(
    TORCH + name for name in ("nn", "optim", "distributions", "amp", "ao", "fx", "distributed/fsdp")
)
"""Parts of torch that keep the user's state in Python; the rest is internal."""
_CONTAINERS = ("collections" + os.sep, "_collections_abc.py", "_weakrefset.py", "weakref.py")
_HOLDERS = ("configparser.py", "queue.py", "string.py", "types.py")
_READ_OF_STANDARD = (
    "<frozen _collections_abc",
    *(os.path.join(path, name) for path in _STANDARD for name in (*_CONTAINERS, *_HOLDERS)),
)
"""Parts of the standard library that keep the user's objects in Python; the rest is internal."""


def is_installed(file: str) -> bool:
    """Return whether code belongs to an installed package, the standard library, or onelaunch."""
    return (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith((*_STANDARD, "<frozen", PACKAGE))
    )


@functools.cache
def is_machinery(file: str) -> bool:
    """Return whether code is internal to the standard library, torch, Triton or onelaunch: not
    read."""
    if file.startswith(TORCH):
        return not file.startswith(_READ_OF_TORCH)
    if f"-packages{os.sep}triton{os.sep}" in file:  # a kernel's launch
        return True
    if "site-packages" in file or "dist-packages" in file or is_container_code(file):
        return False
    return file.startswith((*_STANDARD, "<frozen", PACKAGE, "<onelaunch", "<__array_function__"))


@functools.cache
def is_container_code(file: str) -> bool:
    """Return whether code is of the standard library's containers, which machinery uses too."""
    return file.startswith(_READ_OF_STANDARD)


def serves_machinery(frame: FrameType) -> bool:
    """Return whether a frame is of a container's code that machinery called."""
    if not is_container_code(frame.f_code.co_filename):
        return False
    caller = frame.f_back
    while caller is not None and is_container_code(caller.f_code.co_filename):
        caller = caller.f_back
    return caller is not None and is_machinery(caller.f_code.co_filename)


def is_generated(frame: FrameType) -> bool:
    """Return whether machinery generated a frame's code, for its own named tuple or dataclass."""
    if frame.f_code.co_filename != "<string>":
        return False
    name = str(frame.f_globals.get("__name__"))
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.startswith("namedtuple_") or (file is not None and is_machinery(file))
