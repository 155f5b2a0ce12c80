"""A call that may get a recording: the status of its signature, and how it is recorded."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat
from onelaunch.capture.recording import CapturedCall
from onelaunch.driver.capture_query import CaptureAnswer
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError
from onelaunch.replay.call_path import CallPath, build_call
from onelaunch.runtime.patience import History
from onelaunch.sizes.dims import SizeLink, Varying
from onelaunch.state.slots import is_leaf
from onelaunch.state.snapshot import ReachableState
from onelaunch.state.walk import StateWalk
from onelaunch.watch.compiled_accesses import CompiledAccesses
from onelaunch.watch.ledger import Ledger

if TYPE_CHECKING:
    from onelaunch.autograd.chain import Chain

E = TypeVar("E")


class OneWarmup(enum.Enum):
    """Answers to whether one warm-up call is enough before a capture."""

    UNASKED = enum.auto()
    ENOUGH = enum.auto()
    FAILED = enum.auto()  # a capture after one failed


@dataclass(slots=True, eq=False)
class StandingRefusal:
    """The reason for which a signature runs eagerly, or is refused."""

    code: str | None = None  # the code of the reason for running eagerly for good, or None
    error: CaptureError | None = None
    """A refusal that stays. A later capture could pass by chance. Examples: runs that differ, a
    run that leaves a mode of torch changed, one that gives a tensor of the state a graph."""
    training: bool | None = None
    """True if the module was training when it was refused; None if it has no such flag."""


@dataclass(slots=True, eq=False)
class SignatureStatus:
    """The facts about one signature that its warm-ups showed; why it may be refused; and its
    recordings so far."""

    warmups: int = 0
    """The warm-up calls since its last recording, or of all time; `Warmup.run` counts them."""
    has_backward: bool = False
    """True if its results require grad, so that the capture has a forward and a backward."""
    kept_graph: tuple[str, str | None] | None = None
    """(slot with a tensor that requires grad, line that made the tensor), if no result requires
    grad. A step stores such a tensor with its graph."""
    threads: set[int] = field(default_factory=set)
    """The threads that warmed up: cuBLAS and cuDNN make a handle per thread, not under capture."""
    one_warmup: OneWarmup = OneWarmup.UNASKED
    """The answer to whether one warm-up is enough, as another bucket is recorded."""
    least: int = 0  # fewest warm-up calls, whatever the option says: DDP and FSDP modules need some
    accesses: CompiledAccesses | None = None
    """The reads and writes of a watched run, for code whose operations cannot be watched."""
    ledger: Ledger | None = None  # the operations of the last run, to compare the next capture with
    draws: bool = False  # True if a run drew from the device's default generator
    need_bytes: int = 0
    """The bytes that a recording needs in a pool for itself, estimated in a warm-up; 0 if unknown.
    With buckets a warm-up runs at the size of its call, and shows a lower bound."""
    capture_answer: CaptureAnswer = field(default_factory=CaptureAnswer)
    """The answer to the callable where it asks whether it is being captured."""
    refusal: StandingRefusal = field(default_factory=StandingRefusal)
    history: History = field(default_factory=History)
    other_mode: SignatureStatus | None = None
    """The status for training if inference was refused, or the other way round."""
    by_gradients: dict[tuple[bool, ...], SignatureStatus] | None = None
    """Leaves without a gradient, as flags -> the status for this case. None until a recording is
    dropped because a gradient was replaced."""

    def enough_warmups(self, option: int) -> int:
        """Return the number of warm-up calls, where the options ask for `option`."""
        return max(1 if self.one_warmup is OneWarmup.ENOUGH else option, self.least)

    def begin_anew(self) -> None:
        """Forget what the warm-ups have shown. The next calls warm up in full."""
        self.capture_answer, self.warmups, self.ledger = CaptureAnswer(), 0, None
        if self.one_warmup is OneWarmup.ENOUGH:
            self.one_warmup = OneWarmup.FAILED

    def agreed(self) -> None:
        """Note a capture that did and read no more than the runs before it. The next one may begin
        in another state, so the answer about capturing is found anew."""
        self.ledger, self.capture_answer = None, CaptureAnswer()
        self.history.differed = self.history.read_more = 0

    def for_case(self, training: bool | None, reached: ReachableState) -> SignatureStatus:
        """Return the status for training or for inference, as a refusal in one leaves the other;
        and for the leaves that have a gradient now, if that matters. `training`: whether the module
        is training; None if it has no such flag."""
        status = self
        if self.refusal.training not in (None, training):
            self.other_mode = status = self.other_mode or self._new_case()
        return status if status.by_gradients is None else status._for_gradients(reached.walk())

    def past_launches(self) -> int:
        """Return the launches of dropped recordings that no new recording continues yet."""
        cases = [*(self.by_gradients or {}).values(), *filter(None, [self.other_mode])]
        launches = self.history.launches
        return sum(case.past_launches() for case in cases) + (launches[0] if launches else 0)

    def _new_case(self) -> SignatureStatus:
        """Return the status for another case of this signature, without any facts yet."""
        return SignatureStatus(history=History(self.history.worth))

    def _for_gradients(self, walked: StateWalk) -> SignatureStatus:
        """Return the status for the leaves that have a gradient now."""
        assert self.by_gradients is not None
        empty = tuple(t.grad is None for _, t in walked.tensors() if t.requires_grad and is_leaf(t))
        if empty not in self.by_gradients:  # the first goes on where this one was
            case, history = self._new_case(), self.history
            case.warmups, case.threads = self.warmups, self.threads
            case.history.why, case.history.launches = history.why, history.launches
            self.by_gradients[empty] = case
            self.warmups, history.launches = 0, None
        return self.by_gradients[empty]


class Strategy:
    """The way to record a call: this one records it as it is, `BucketStrategy` pads it.

    Attributes:
        varying: argument index -> how an argument that may be smaller in a call varies.
        follows: for each tensor of the result, the dimensions that follow sizes of arguments.
    """

    varying: Mapping[int, Varying] = {}
    follows: Sequence[tuple[SizeLink, ...]] = ()

    def mismatching(self, entries: Sequence[E]) -> Sequence[E]:
        """Return the recordings that make a new signature a mismatch."""
        return entries

    def rehearse(self, candidate: Candidate, warm: Callable[[], None]) -> None:
        """Warm up without a call, by `warm` or in another way."""
        warm()

    def prepare(self, candidate: Candidate) -> None:
        """Decide before a capture which arguments may be smaller in a call: `varying`."""

    def captured(self, fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the callable as a capture runs it."""
        return fn

    def pad_outside(self) -> None:
        """Let no argument vary: a capture has shown that the recording cannot pad by itself."""

    def call_path(self, captured: CapturedCall, spec: CallSpec, label: str) -> CallPath:
        return build_call(captured, spec, label)


UNPADDED = Strategy()


class Call(NamedTuple):
    """A call that no recording fits. `flat`: its arguments; a `Bucketed` has padded them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: Flat
    driver: Driver
    device: torch.device
    strategy: Strategy = UNPADDED


@dataclass(slots=True, eq=False)
class Candidate:
    """A call that may get a recording: it warms up its signature, or is captured. `flat`: its
    arguments; of the bucket's size for a capture. `reached`: the state that it reaches."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: Flat
    driver: Driver
    device: torch.device
    strategy: Strategy
    spec: CallSpec
    status: SignatureStatus
    reached: ReachableState
    ahead: bool = False  # True for `capture(...)`, a capture without a call
    chain: Chain | None = None  # the chain under capture, if the callable is a part of it
    studied: Ledger | None = None
    """The operations of a recording for other sizes, which stand for a warm-up's."""
