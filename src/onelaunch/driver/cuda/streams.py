"""Streams, and the order of launches that share memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.capabilities import capabilities
from onelaunch.errors import CaptureError

bindings: Any = torch._C
"""The part of torch without public names: raw streams, allocator pools, cuBLAS workspaces."""


class Order:
    """An order of launches that must not overlap, whatever streams they come from.

    A launch holds `lock`, calls `move` if its stream is not `last`, and `mark` afterwards if
    `marked`. While all launches come from one stream of torch's, nothing is recorded: a stream
    keeps its own order. A launch from another stream records an event at the end of the old stream,
    and waits for it. So it also comes after later work there with the results, as an optimizer does
    with gradients. If the old stream cannot be asked, the last launch itself is waited for. Once
    launches come from several streams, an event marks each, about 1 us.
    """

    def __init__(self, index: int) -> None:
        self.lock = threading.RLock()
        self.last: int | None = None
        self.marked = False
        self._index = index
        self._stream: torch.cuda.Stream | None = None
        self._foreign = False
        self._event = torch.cuda.Event()

    @contextmanager
    def launch(self, raw: int) -> Generator[None]:
        """Surround a launch on the current stream, whose handle is `raw`, if time is no concern."""
        with self.lock:
            if raw != self.last:
                self.move(raw)
            yield
            if self.marked:
                self.mark()

    def move(self, raw: int) -> None:
        """Make the current stream, whose handle is `raw`, wait for the last launch."""
        stream = torch.cuda.current_stream(self._index)
        if self._stream is not None:
            if not self._foreign:
                self._mark_late(self._stream)
            stream.wait_event(self._event)
            self.marked = True
        # The owner of a foreign stream may destroy it, so that nothing could be recorded there
        # later. The id of such a stream is its handle.
        self._foreign = raw != 0 and stream.stream_id == raw
        self.marked = self.marked or self._foreign
        self._stream, self.last = stream, raw

    def mark(self) -> None:
        """Record an event at the end of the last launch."""
        self._event.record(self._stream)

    def _mark_late(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                if self.marked:
                    return
                raise RuntimeError(
                    "the stream of this pool's last launch is being captured by somebody else, so "
                    "a launch from another stream cannot be ordered after it"
                )
        self._event.record(stream)


def device_index(device: torch.device) -> int:
    """Find the index of a CUDA device; for plain ``cuda`` that of the current one."""
    index = cast("int | None", device.index)
    return torch.cuda.current_device() if index is None else index


@functools.cache
def random_order(index: int) -> Order:
    """Return the order of launches that draw random numbers on a device. Before pytorch#176752
    torch hands all graphs their seed and offset in the same two tensors of a generator, filled at
    each replay. Launches that draw must not overlap, even in two pools."""
    return Order(index)


def raw_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@functools.cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """Return the stream of every warm-up and capture of a device, which nobody else has. Torch
    hands out 32 streams in turn: another thread's work there would be captured too."""
    return new_stream(index)


def new_stream(index: int) -> torch.cuda.Stream:
    """Make a stream of a device that nobody else has; it lives as long as the process. Refuse
    (OL109) a machine where nothing can be recorded."""
    if not capabilities().records:
        raise CaptureError("OL109", f"no graph can be changed here: {capabilities().why_not}")
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # the device has its context from here on
        return torch.cuda.ExternalStream(nodes.new_stream(), device=torch.device("cuda", index))


@functools.cache
def anything(index: int) -> torch.Tensor:
    """Allocate one byte of device memory, for a node or kernel that has nothing else to do."""
    with torch.inference_mode(False):  # it is written outside of inference, too
        return torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", index))
