"""Storages that a program resizes itself, which no dispatcher sees."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def watching_resizes(
    resized: Callable[[torch.UntypedStorage, int], object],
) -> Generator[None]:
    """Call ``resized(storage, nbytes)`` before this thread resizes a storage.

    To be used by one thread at a time.
    """
    thread = threading.get_ident()

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if threading.get_ident() == thread:
            resized(storage, nbytes)
        return resize(storage, nbytes)

    kind: Any = torch.UntypedStorage
    inherited = "resize_" not in vars(kind)
    before = kind.resize_
    kind.resize_ = resize_
    try:
        yield
    finally:
        if inherited:
            del kind.resize_
        else:
            kind.resize_ = before


resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_
"""The method outside of every watch."""
