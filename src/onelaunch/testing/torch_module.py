"""The module ``torch.tape`` of the emulated device, as ``torch.cuda`` is.

Everything is synchronous, so streams and events order nothing; they are here to be refused where a
capture refuses them on CUDA, and to be noted elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from onelaunch.beside import listed
from onelaunch.error_catalogue import WAIT
from onelaunch.testing.recorder import recording

Note = Callable[[str], object]

_notes: list[Note] = []
"""Functions told of waits outside of captures."""


def wait(what: str) -> None:
    """Refuse what waits for the device, during a capture; else tell those that note it."""
    recorder = recording()
    if recorder is not None:
        raise recorder.note_refusal("OL109", f"`{what}` waits for the device", WAIT)
    for note in _notes:
        note(what)


def noting_waits(note: Note) -> AbstractContextManager[None]:
    """Tell `note` the name of each wait for the device outside of captures."""
    return listed(_notes, note)


def _waiting(what: str, result: object = None) -> Callable[..., Any]:
    """Make a method that waits for the device, and returns `result`."""

    def method(self: object, *args: object) -> object:
        wait(what)
        return result

    return method


class Event:
    """A point in a stream that is always in the past."""

    def __init__(self, enable_timing: bool = False, **options: bool) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Mark this moment."""

    def wait(self, stream: Stream | None = None) -> None:
        """Return: there is nothing to wait for."""

    elapsed_time = _waiting("Event.elapsed_time", 0.0)
    query = _waiting("Event.query", True)
    synchronize = _waiting("Event.synchronize")


class Stream:
    """A queue of work that is always empty."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device(torch._C._get_privateuse1_backend_name())
        self.priority = priority

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *raised: object) -> None:
        """Leave it, which changes nothing."""

    def wait_stream(self, stream: Stream) -> None:
        """Return: there is nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Return: there is nothing to wait for."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark this moment."""
        event = event or Event()
        event.record(self)
        return event

    query = _waiting("Stream.query", True)
    synchronize = _waiting("Stream.synchronize")


class Module:
    """The functions that torch looks up on a device's module, and those that programs call."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self._stream = Stream()

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """List types for `torch.autocast`, which checkpointing enters whether it is on or not."""
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """Refuse during a capture; else torch seeds the CPU's generator, which serves here."""
        recorder = recording()
        if recorder is not None:
            raise recorder.note_seeding("manual_seed_all")

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    synchronize = _waiting("synchronize")

    def current_stream(self, device: Any = None) -> Stream:
        return self._stream

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        """Select a stream, which changes nothing."""
        yield
