"""Garbage: a pause of its collection, and what is done once an object is gone."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

FROZEN_AT_START = 10_000
"""More objects than an interpreter freezes itself (Python 3.12 some 400), and fewer than a program
with torch does by `gc.freeze` (ten times as many)."""
MOST_FREEZES = 64  # freezes after which garbage is collected; a full collection takes some 0.15 s


@contextlib.contextmanager
def no_collection() -> Generator[None]:
    """Disable garbage collection during a context, in all threads. Under capture it could run code
    that CUDA refuses. Captures make so many objects that a full collection, 150 ms in a process
    with torch, comes every few captures."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            _frozen.collect_if_due()


@contextlib.contextmanager
def out_of_reach() -> Generator[None]:
    """Keep present objects from a `gc.collect()` of the callable's too, besides `no_collection`.
    Garbage may hold another graph, for example, which CUDA refuses to destroy, and that ends the
    capture. Costs microseconds: lists are joined. Garbage is collected afterwards."""
    with no_collection():
        mine = _frozen.begin()
        try:
            yield
        finally:
            if mine:
                _frozen.end()


@contextlib.contextmanager
def importing() -> Generator[None]:
    """Import without a collection, and have all objects be old ones afterwards. A full collection
    in a process with torch takes 0.1 s. Those of young objects, which an import leaves by the ten
    thousand, take some 8 ms; what is imported is no garbage."""
    with no_collection():
        yield
        if _frozen.begin():
            _frozen.end()


class _Frozen:
    """The frozen objects. Nothing is frozen if the program has frozen objects itself, as `unfreeze`
    would let go of all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._freezes, self._collections = 0, -1
        """Freezes since a full collection, and how many of these there were."""
        self._ours = False
        """True from before a freeze until after its end, as an interrupt may come between."""

    def begin(self) -> bool:
        with self._lock:
            if not self._ours and gc.get_freeze_count() > FROZEN_AT_START:
                return False
            self._depth += 1
            if not self._ours:
                self._ours = True
                self._freezes += 1
                gc.freeze()
            return True

    def collect_if_due(self) -> None:
        """Collect all garbage after many freezes: each makes it old, and sets the counts back by
        which Python would collect it."""
        if self._freezes < MOST_FREEZES or self._ours:
            return
        collections = gc.get_stats()[-1]["collections"]
        due, self._freezes = collections == self._collections, 0
        if due:
            gc.collect()
        self._collections = collections + due

    def end(self, *, every: bool = False) -> None:
        with self._lock:
            self._depth = 0 if every else max(self._depth - 1, 0)
            if self._ours and not self._depth:
                gc.unfreeze()
                self._ours = False


_frozen = _Frozen()


class collection_restored:
    """A context that enables garbage collection again after an interrupt."""

    __slots__ = ("_enabled",)

    def __enter__(self) -> None:
        self._enabled = gc.isenabled()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            _frozen.end(every=True)
            if self._enabled:
                gc.enable()


_ends: dict[int, weakref.ref[Any]] = {}  # its id -> a reference whose object is awaited


def when_gone(owner: object, function: Callable[..., object], *args: object) -> None:
    """Call a function once an object is gone, unless the process ends. `weakref.finalize` would do,
    but keeps a table that a callable seems to read if garbage goes while it runs."""

    def ended(reference: weakref.ref[Any]) -> None:
        _ends.pop(id(reference), None)
        if not sys.is_finalizing():
            function(*args)

    reference = weakref.ref(owner, ended)
    _ends[id(reference)] = reference
