"""Files as they are shown, and whose they are."""

from __future__ import annotations

import functools
import os
import sysconfig

STANDARD = sysconfig.get_path("stdlib") + os.sep


def in_library(file: str) -> bool:
    """Return whether a file belongs to an installed package or to Python."""
    return "-packages" + os.sep in file or file.startswith((STANDARD, "<frozen"))


def shown(file: str) -> str:
    """Return a file as it is shown: from the current folder, if it is in there."""
    return _shown(file, os.getcwd())


@functools.lru_cache(maxsize=1024)
def _shown(file: str, folder: str) -> str:
    try:
        path = os.path.relpath(file, folder)
    except ValueError:  # another drive, on Windows
        return file
    return file if path.startswith("..") or file.startswith("<") else path
