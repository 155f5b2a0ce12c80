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
from contextlib import AbstractContextManager, contextmanager
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


class SharedSubstitutes:
    """Substitutes for functions of a module, which several threads may need at once."""

    def __init__(self, module: Any, **functions: Callable[..., Any]) -> None:
        self._module, self._functions = module, functions
        self._lock = threading.Lock()
        self.active: list[Any] = []  # what each that needs them has passed, the latest first
        self.own: dict[str, Callable[..., Any]] = {}

    @contextmanager
    def needed(self, by: object) -> Generator[None]:
        """Have the substitutes in place at least for as long as this context."""
        try:
            with self._lock:
                if not self.active:
                    self.own = {name: getattr(self._module, name) for name in self._functions}
                    vars(self._module).update(self._functions)
                self.active = [by, *self.active]
            yield
        finally:
            with self._lock:
                self.active = [one for one in self.active if one is not by]
                if not self.active:
                    vars(self._module).update(self.own)


class _Substitute(NamedTuple):
    here: Callable[..., bool]
    save: Callable[[], Tensor]
    restore: Callable[[Tensor], None]


_of_random_states: dict[int, SharedSubstitutes] = {}


def _of_random_state(module: Any) -> SharedSubstitutes:
    def get_rng_state(*device: Any, **keywords: Any) -> Tensor:
        for substitute in shared.active:
            if substitute.here(*device, **keywords):
                with unwatched():
                    return substitute.save()
        return shared.own["get_rng_state"](*device, **keywords)

    def set_rng_state(new_state: Tensor, *device: Any, **keywords: Any) -> None:
        for substitute in shared.active:
            if substitute.here(*device, **keywords):
                with unwatched():
                    return substitute.restore(new_state)
        return shared.own["set_rng_state"](new_state, *device, **keywords)

    shared = SharedSubstitutes(module, get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    return shared


def substituted(
    module: Any,
    here: Callable[..., bool],
    save: Callable[[], Tensor],
    restore: Callable[[Tensor], None],
) -> AbstractContextManager[None]:
    """Replace ``module.get_rng_state`` and ``module.set_rng_state`` by `save` and `restore`, where
    ``here(device)``. Two drivers may capture at once, each in a thread."""
    shared = _of_random_states.get(id(module))
    shared = shared or _of_random_states.setdefault(id(module), _of_random_state(module))
    return shared.needed(_Substitute(here, save, restore))


@contextmanager
def watching_resizes(resized: Callable[[torch.UntypedStorage, int], object]) -> Generator[None]:
    """Call ``resized(storage, nbytes)`` before this thread, one at a time, resizes a storage."""
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
