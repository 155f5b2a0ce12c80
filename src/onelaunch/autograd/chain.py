"""Forwards that run one after another, and their backwards in reverse, in shared memory.

A recording captured later reuses memory that earlier ones freed during their capture. So a launch
overwrites data of recordings captured later, and never of earlier ones. Two kinds of data outlive a
launch: the saved tensors of a forward, until its backward is done, and the gradients of a backward,
until nobody holds them. In running order nothing is overwritten too early. A launch out of order is
refused, and the caller runs without the recording.

Gradients outlive the step (accumulated, or cleared only after the next forward), so backwards and
forwards have separate pools.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onelaunch.autograd.backward import Backward, Gradients
from onelaunch.autograd.node import Lease
from onelaunch.driver.protocol import DevicePool, Driver, Launch, Released
from onelaunch.gc_pause import when_gone

NewPool = Callable[[Driver, torch.device], DevicePool]


class Link:
    """The part of a chain on one device: the memory and stream that its recordings share."""

    def __init__(self, driver: Driver, device: torch.device, new_pool: NewPool) -> None:
        self.forwards = new_pool(driver, device)
        self.backwards = new_pool(driver, device)
        self.stream = stream_of(self, driver, device)
        """The stream of all captures and eager backwards: CUDA's allocator returns freed memory
        only to the stream that had it."""
        self.lock = threading.RLock()
        """A lock held from the check that a launch overwrites nothing until it is queued."""
        self._later: list[list[Lease]] = []
        """The leases of later forwards, for each forward in the order of capture."""
        self._captured = 0
        self._unreleased: list[tuple[int, Backward]] = []
        """Backwards whose gradients somebody may hold, in the order of capture."""

    def forward(self, lease: Lease, launch: Launch) -> Launch:
        """Return the launch of the forward captured last, which raises `Released` out of order.
        `lease`: taken while the forward waits for its backward."""
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
        """Return the launch of the backward captured last. It returns None while somebody holds
        gradients that it would overwrite: its own, or those of a backward captured later."""
        place = self._captured
        self._captured += 1

        def in_order(grads: Gradients) -> list[Tensor | None] | None:
            unreleased = self._unreleased
            with self.lock:
                # A backward that is free stays so until its next launch: none is checked twice.
                while unreleased and unreleased[-1][0] >= place:
                    if not unreleased[-1][1].available():
                        return None
                    unreleased.pop()
                gradients = backward.run(grads)
                unreleased.append((place, backward))
                return gradients

        return in_order


class Chain:
    """A chain of callables in the order in which they run, as `make_graphed_callables` gets them.
    `new_pool`: makes memory that no other recording uses."""

    def __init__(self, new_pool: NewPool) -> None:
        self._new_pool = new_pool
        self._links: dict[torch.device, Link] = {}

    def on(self, driver: Driver, device: torch.device) -> Link:
        if device not in self._links:
            self._links[device] = Link(driver, device, self._new_pool)
        return self._links[device]


_spares: dict[torch.device, list[object]] = {}


def stream_of(owner: object, driver: Driver, device: torch.device) -> object:
    """Return a stream for an owner's life. CUDA never destroys one: it is used again."""
    spares = _spares.setdefault(device, [])
    stream = spares.pop() if spares else driver.new_stream(device)
    when_gone(owner, spares.append, stream)
    return stream
