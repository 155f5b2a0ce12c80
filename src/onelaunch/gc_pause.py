"""A pause of garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def no_collection() -> Generator[None]:
    """Disable garbage collection during a context, in all threads.

    Under capture it could run code that CUDA refuses. And a capture makes so many objects that a
    full collection comes every few captures, 150 ms each in a process with torch.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class collection_restored:
    """A context that enables garbage collection again after an interrupt, which may have ended a
    pause half way."""

    __slots__ = ("_enabled",)

    def __enter__(self) -> None:
        self._enabled = gc.isenabled()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None and self._enabled and not issubclass(kind, Exception):
            gc.enable()
