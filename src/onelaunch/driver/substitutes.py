"""Functions of torch that are replaced while a capture runs, as no dispatcher sees what they do.

`get_rng_state` and `set_rng_state`; the `resize_` of storages, which a program may call itself; and
the methods of events that a capture records, for which the host would wait after it. Under capture
an event is a fork of the graph and marks no moment. CUDA answers "invalid argument" when the host
waits for it afterwards, and no replay records it again. An event that another stream of the
callable waits for is a fork as it should be.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call_events import unwatched
from onelaunch.errors import CaptureError
from onelaunch.source import PACKAGE, TORCH, Place, user_frame

UNKNOWN = "a random state is set that was not saved in the call"


@contextmanager
def replaced(owner: Any, **functions: Callable[..., Any]) -> Generator[None]:
    """Replace functions of a module or class for a while."""
    own = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name in functions:
            if name in own:
                setattr(owner, name, own[name])
            else:  # it is inherited
                delattr(owner, name)


class _Substitute(NamedTuple):
    """The functions that a capture has in place of torch's; see `substituted`."""

    here: Callable[..., bool]
    save: Callable[[], Tensor]
    restore: Callable[[Tensor], None]


class _Substituted:
    """The functions of a module, while any capture replaces them."""

    def __init__(self, module: Any) -> None:
        self._get, self._set = module.get_rng_state, module.set_rng_state
        self.active: list[_Substitute] = []
        functions = {"get_rng_state": self._get_rng_state, "set_rng_state": self._set_rng_state}
        self.replaced = replaced(module, **functions)
        self.replaced.__enter__()

    def _get_rng_state(self, *device: Any, **keywords: Any) -> Tensor:
        for substitute in self.active:
            if substitute.here(*device, **keywords):
                with unwatched():
                    return substitute.save()
        return self._get(*device, **keywords)

    def _set_rng_state(self, new_state: Tensor, *device: Any, **keywords: Any) -> None:
        for substitute in self.active:
            if substitute.here(*device, **keywords):
                with unwatched():
                    return substitute.restore(new_state)
        return self._set(new_state, *device, **keywords)


_lock = threading.Lock()

_substituted: dict[int, _Substituted] = {}


@contextmanager
def substituted(
    module: Any,
    here: Callable[..., bool],
    save: Callable[[], Tensor],
    restore: Callable[[Tensor], None],
) -> Generator[None]:
    """Replace ``module.get_rng_state`` and ``module.set_rng_state`` by `save` and `restore`, where
    ``here(device)``. Two drivers may capture at once, each in a thread."""
    substitute = _Substitute(here, save, restore)
    with _lock:
        if id(module) not in _substituted:
            _substituted[id(module)] = _Substituted(module)
        all_of_it = _substituted[id(module)]
        all_of_it.active = [substitute, *all_of_it.active]
    try:
        yield
    finally:
        with _lock:
            all_of_it.active = [one for one in all_of_it.active if one is not substitute]
            if not all_of_it.active:
                _substituted.pop(id(module)).replaced.__exit__(None, None, None)


@contextmanager
def watching_resizes(resized: Callable[[torch.UntypedStorage, int], object]) -> Generator[None]:
    """Call ``resized(storage, nbytes)`` before this thread resizes a storage. To be used by one
    thread at a time."""
    thread = threading.get_ident()

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if threading.get_ident() == thread:
            resized(storage, nbytes)
        return resize(storage, nbytes)

    with replaced(torch.UntypedStorage, resize_=resize_):
        yield


resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_
"""The method outside of every watch."""


_FIX = "record it after the call: `y = fast(x); event.record()`"


@contextmanager
def refusing_events(kind: Any, capturing: Callable[[Any], bool]) -> Generator[None]:
    """Refuse, at the end of this context, an event that was recorded inside for the host. Captures
    are made one at a time, so the methods of a class have a single substitute. `capturing`: tells
    whether a stream, or with None the current one, is being captured."""
    ident, record, wait = get_ident(), kind.record, kind.wait
    recorded: dict[int, tuple[Any, Place | None]] = {}
    own = record.__code__.co_filename

    def record_noted(event: Any, stream: Any = None) -> None:
        if get_ident() == ident and capturing(stream):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename == own:
                frame = frame.f_back  # `Stream.record_event`
            if not frame.f_code.co_filename.startswith((TORCH, PACKAGE)):
                recorded[id(event)] = event, user_frame()
        record(event, stream)

    def wait_noted(event: Any, stream: Any = None) -> None:
        wait(event, stream)
        if get_ident() == ident:
            recorded.pop(id(event), None)

    with replaced(kind, record=record_noted, wait=wait_noted):
        yield
    for _, place in recorded.values():
        what = "an event is recorded in a capture, and no stream waits for it there"
        raise CaptureError("OL109", what, where=place, fix=_FIX)
