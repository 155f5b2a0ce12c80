"""Forwards that run one after another, and their backwards in reverse, in common memory.

What a recording frees while it is captured, those captured after it use again. So a launch
overwrites what recordings captured later have left in their memory, and nothing of those captured
earlier, whose memory was taken. Two things are left there for longer than a launch: what a forward
saves, until its backward is done, and the gradients of a backward, until nobody holds them. In
running order nothing is overwritten too early; a launch out of order is refused, and the caller
does without the recording. Gradients outlive the step (accumulated, or cleared only after the next
forward), so that backwards have a pool apart from that of the forwards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onelaunch.autograd.backward import Backward, Gradients
from onelaunch.autograd.node import Lease
from onelaunch.driver.protocol import Driver, Launch, Pool, Released

NewPool = Callable[[Driver, torch.device], Pool]


class Link:
    """What the recordings of a chain on one device have in common.

    Attributes:
        forwards, backwards: their memory.
        stream: of all captures, and of eager backwards: CUDA's allocator gives freed memory to the
            stream alone that had it.
        lock: held from the check whether a launch overwrites anything until it is queued.
    """

    def __init__(self, driver: Driver, device: torch.device, new_pool: NewPool) -> None:
        self.forwards = new_pool(driver, device)
        self.backwards = new_pool(driver, device)
        self.stream = take_stream(driver, device)
        weakref.finalize(self, spare_streams(device).append, self.stream).atexit = False
        self.lock = threading.RLock()
        self._later: list[list[Lease]] = []
        """For each forward, in the order of capture, the leases of those captured later."""
        self._captured = 0
        self._given: list[tuple[int, Backward]] = []
        """Backwards whose gradients somebody may hold, the first captured first."""

    def forward(self, lease: Lease, launch: Launch) -> Launch:
        """The launch of the forward that was captured now, refused out of order.

        Args:
            lease: taken while the forward waits for its backward.
        """
        later: list[Lease] = []
        for others in self._later:
            others.append(lease)
        self._later.append(later)

        def in_order(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
            with self.lock:
                if any(other.taken for other in later):
                    raise Released("a forward that runs after this one waits for its backward")
                launch(sources, targets)

        return in_order

    def backward(self, backward: Backward) -> Callable[[Gradients], list[Tensor | None] | None]:
        """The launch of the backward that was captured now in `backwards`.

        It returns None while somebody holds gradients that it would overwrite: its own, or those of
        a backward that was captured later.
        """
        place = self._captured
        self._captured += 1

        def in_order(grads: Gradients) -> list[Tensor | None] | None:
            given = self._given
            with self.lock:
                # Those that are free stay so until they are launched again: none is asked twice.
                while given and given[-1][0] >= place:
                    if not given[-1][1].available():
                        return None
                    given.pop()
                found = backward.run(grads)
                given.append((place, backward))
                return found

        return in_order


class Chain:
    """Callables in the order in which they run, as `make_graphed_callables` is given them.

    Args:
        new_pool: makes memory that no other recording uses.
    """

    def __init__(self, new_pool: NewPool) -> None:
        self._new_pool = new_pool
        self._links: dict[torch.device, Link] = {}

    def on(self, driver: Driver, device: torch.device) -> Link:
        """The part of it on one device."""
        if device not in self._links:
            self._links[device] = Link(driver, device, self._new_pool)
        return self._links[device]


_spares: dict[torch.device, list[object]] = {}


def spare_streams(device: torch.device) -> list[object]:
    """Streams of recordings that are gone: the device would keep each for ever."""
    return _spares.setdefault(device, [])


def take_stream(driver: Driver, device: torch.device) -> object:
    """A stream that nobody else works on. To give it back, append it to `spare_streams`."""
    spare = spare_streams(device)
    return spare.pop() if spare else driver.new_stream(device)
