"""Batches copied to a GPU while it works on those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.cuda.streams import device_index

Mapper = Callable[[Any, Callable[[Tensor], Tensor]], Any]

_IN_FLIGHT = 4
"""Batches whose work may be queued, so that a host that runs ahead does not fill the memory."""


def copied_ahead(batches: Iterator[Any], device: torch.device, mapped: Mapper) -> Iterator[Any]:
    """Each batch on the device, copied from pinned memory on a stream of its own.

    The copy of one batch is begun before the batch before it is handed out. The stream that is
    current when a batch is handed out waits for its copy; the host does not.

    Args:
        mapped: a batch with each of its tensors replaced.
    """
    index = device_index(device)
    stream = torch.cuda.Stream(index)
    done: deque[torch.cuda.Event] = deque()

    def copy(t: Tensor) -> Tensor:
        pinned = t if t.is_pinned() or not t.numel() else t.pin_memory()
        return pinned.to(device, non_blocking=True)

    def begin() -> tuple[Any, list[Tensor], torch.cuda.Event]:
        batch = next(batches)
        made: list[Tensor] = []

        def noted(t: Tensor) -> Tensor:
            if t.device.type != "cpu":
                return t  # whoever made it knows on which stream
            made.append(copy(t))
            return made[-1]

        with torch.cuda.stream(stream):
            moved = mapped(batch, noted)
        return moved, made, _marked(stream)

    def handed(ready: tuple[Any, list[Tensor], torch.cuda.Event]) -> Any:
        batch, tensors, event = ready
        consumer = torch.cuda.current_stream(index)
        consumer.wait_event(event)
        for t in tensors:
            t.record_stream(consumer)
        return batch

    try:
        ready = begin()
    except StopIteration:
        return
    while True:
        try:
            following = begin()
        except StopIteration:
            yield handed(ready)
            return
        except Exception:  # of the loader: after the batch that it gave before
            yield handed(ready)
            raise
        batch, ready = handed(ready), following
        del following  # what has been handed out is the consumer's alone
        yield batch
        del batch
        done.append(_marked(torch.cuda.current_stream(index)))
        if len(done) > _IN_FLIGHT:
            done.popleft().synchronize()


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
