"""A call on its way to a recording: where its signature stands, and how it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat
from onelaunch.capture.recording import CapturedCall
from onelaunch.driver.capture_query import Asking
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError
from onelaunch.optimizers.capturable import Options as StepOptions
from onelaunch.replay.call_path import CallPath, build_call
from onelaunch.runtime.pool import Backoff
from onelaunch.sizes.dims import Follow, Varying
from onelaunch.state.snapshot import ReachableState
from onelaunch.state.walk import StateWalk
from onelaunch.watch.compiled import CompiledAccesses
from onelaunch.watch.ledger import Ledger

E = TypeVar("E")


@dataclass(slots=True)
class SignatureState:
    """What is known of a signature, recorded or not."""

    warm: int = 0
    forward: bool = False
    """Whether its results require grad, so that it is captured as a forward with a backward."""
    threads: set[int] = field(default_factory=set[int])
    """Who warmed up: cuBLAS and cuDNN make a handle for each thread, and not under capture."""
    least: int = 0
    """Warm-up calls that what it reaches needs, whatever the option says."""
    unfit: int = 0
    """Recordings in a row that did not fit the very call that they were captured for."""
    eager: str | None = None
    """Why it runs eagerly for good, or None."""
    known: CompiledAccesses | None = None
    ledger: Ledger | None = None
    """The operations of the last run, with which the next capture is compared."""
    differing: int = 0
    """Captures in a row that differed from the run before them."""
    unread: int = 0
    """Captures in a row that read more than the runs before them."""
    alone: int = 0
    """Recordings in a row that served the call that they were captured for, and no other."""
    launched: int = 0
    """Launches of all its recordings, as the last one was captured."""
    why: str | None = None
    launches: list[int] | None = None
    """The count of a recording that this signature's next one takes the place of."""
    need_bytes: int = 0
    """What a recording needs in a pool of its own, as far as a warm-up showed; or 0. With buckets
    a warm-up runs at the size of its call, and shows what is needed at least."""
    backoff: Backoff = field(default_factory=Backoff)
    asking: Asking = field(default_factory=Asking)
    """What the callable is told where it asks whether it is being captured."""
    options: StepOptions | None = None
    """Of the optimizers that step in the last recording."""
    parts: dict[tuple[bool, ...], SignatureState] | None = None
    """By which leaves have a gradient, once a recording was dropped because one was replaced."""

    def lost(self, launches: list[int]) -> None:
        """A recording of it is gone. The next one goes on with its count."""
        launches[0] += self.launches[0] if self.launches else 0
        self.launches = launches

    def gone(self) -> int:
        """Launches of recordings that are gone, and that no other goes on counting yet."""
        parts = () if self.parts is None else list(self.parts.values())
        return sum(part.gone() for part in parts) + (self.launches[0] if self.launches else 0)

    def part(self, walked: StateWalk) -> SignatureState:
        """The signature with the gradients of now, if they count."""
        if self.parts is None:
            return self
        empty = tuple(t.grad is None for _, t in walked.tensors() if t.is_leaf and t.requires_grad)
        if empty not in self.parts:  # the first goes on where this one was
            part = SignatureState(
                self.warm, threads=self.threads, why=self.why, launches=self.launches
            )
            self.parts[empty] = part
            self.warm, self.launches = 0, None
        return self.parts[empty]


@dataclass(slots=True)
class Attempt:
    """A call that warms its signature up, or is to be recorded.

    Attributes:
        flat: its arguments; of the bucket's size where it is to be recorded.
        reached: the state that it reaches.
    """

    driver: Driver
    device: torch.device
    spec: CallSpec
    signature: SignatureState
    flat: Flat
    reached: ReachableState
    strategy: Strategy
    ahead: bool = False
    """Whether there is no call, only a capture."""


class Strategy:
    """The recording of a call as it is. Calls with buckets have one that pads.

    Attributes:
        varying: arguments that may be smaller in a call than in its recording.
        follows: for each tensor of the result the dimensions that follow their sizes.
    """

    varying: Mapping[int, Varying] = {}
    follows: Sequence[tuple[Follow, ...]] = ()

    def alike(self, entries: Sequence[E]) -> Sequence[E]:
        """Return the recordings that a new signature is a mismatch to."""
        return entries

    def rehearse(self, attempt: Attempt, warm: Callable[[], None]) -> None:
        """Warm up without a call, by `warm` or otherwise."""
        warm()

    def record(self, attempt: Attempt, record: Callable[[], E]) -> E:
        """Capture by `record`, which may be called again with other `varying` arguments."""
        return record()

    def call_path(self, captured: CapturedCall, spec: CallSpec, label: str) -> CallPath:
        """Return the call path of a recording."""
        return build_call(captured, spec, label)


AS_IT_IS = Strategy()


# Where the signature of a call stands.


class Eager(NamedTuple):
    """A call that runs as it is, with a warning where there is a code."""

    code: str = ""
    why: str = ""


class Refused(NamedTuple):
    """A signature that cannot be captured."""

    signature: SignatureState
    error: CaptureError


class Warming(NamedTuple):
    """A signature that needs more warm-up calls."""

    attempt: Attempt


class Ready(NamedTuple):
    """A signature that is to be captured."""

    attempt: Attempt


Phase = Eager | Refused | Warming | Ready
