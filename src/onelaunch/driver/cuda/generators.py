"""The default generator of a device, left to other threads by a capture that draws nothing.

`CUDAGraph.capture_begin` registers the state of the default generator with the graph. Before
pytorch#176752 that state then counts as captured for the whole process, and each eager draw from it
fails until `capture_end`. So a capture that draws nothing has another state registered.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch

from onelaunch.unwinding import DispatchMode, same_modes

SHARED: bool = cast(Any, torch.__version__) < (2, 12)
"""True if a state that one thread captures is captured for all; see the module."""
_UNREGISTERED = re.compile(r"generator not in capture mode|must be registered")


def is_unregistered_draw(error: RuntimeError) -> bool:
    """Tell whether torch refuses a draw in a capture, as the graph has not got the generator."""
    return _UNREGISTERED.search(str(error)) is not None


@contextmanager
def default_left(index: int) -> Generator[None]:
    """Have a capture that begins in the context register another state than the default
    generator's. Draws of other threads go on in the same order, unless two of them come within the
    microsecond of an exchange."""
    if not SHARED:
        yield
        return
    exchange = _Exchange(torch.cuda.default_generators[index])
    with same_modes(), exchange:
        try:
            exchange.begin()
            yield
        finally:
            exchange.end()
    if exchange.interrupt is not None:
        raise exchange.interrupt


class _Exchange(DispatchMode):
    """A time in which the default generator has a copy of its own state, up to the first operation.
    This is `capture_begin` making memory for the state that it has taken, and not marked yet."""

    def __init__(self, default: torch.Generator) -> None:
        super().__init__()
        self.interrupt: BaseException | None = None
        """A Ctrl-C in the operation: torch ends the process if a graph is half registered."""
        self._default: Any = default
        self._own: Any = self._default.graphsafe_get_state()
        self._other: Any = None  # the copy; the graph has it before the context ends
        self._exchanged = False

    def begin(self) -> None:
        """Give the default generator a copy of its state, at the place of its own."""
        own = self._own
        while not self._exchanged:
            self._other = own.clone_state()
            offset = self._other.get_offset()
            self._exchanged = True
            self._default.graphsafe_set_state(self._other)
            if own.get_offset() != offset:  # a thread has drawn since the copy was made
                self._default.graphsafe_set_state(own)
                self._exchanged = False

    def end(self) -> None:
        """Give the default generator its own state back, with what was drawn from the other."""
        if not self._exchanged:
            return
        own, other = self._own, self._other
        if torch.cuda.is_current_stream_capturing():  # no operation came, and none may ask now
            self._default.graphsafe_set_state(own)
            self._exchanged = False
            return
        if other.initial_seed() != own.initial_seed():  # a thread has seeded it
            own.manual_seed(other.initial_seed())
        offset = other.get_offset()
        own.set_offset(offset)
        self._default.graphsafe_set_state(own)
        self._exchanged = False
        late = other.get_offset() - offset
        if late:
            own.set_offset(own.get_offset() + late)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            self.end()
        except BaseException as error:  # noqa: BLE001 - raised once the capture has begun
            self.interrupt = error
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False) if func is _EMPTY else nullcontext():
            return func(*args, **(kwargs or {}))


_EMPTY = torch.ops.aten.empty.memory_format
