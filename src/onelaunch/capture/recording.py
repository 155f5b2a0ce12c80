"""The result of a capture: all that the call path needs, and the figures for users."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import Constant, Flat, Tree, first_places
from onelaunch.capture.followed import FollowedNumbers
from onelaunch.capture.hooks import HookInside
from onelaunch.capture.io_plan import Inputs, Outputs, Own
from onelaunch.capture.scalar_trace import Step
from onelaunch.driver.overlaps import Overlaps
from onelaunch.driver.protocol import Driver, Graph, Travel
from onelaunch.driver.schedule import Schedule
from onelaunch.errors import CaptureSignal
from onelaunch.sizes.dims import Varying
from onelaunch.source import Place
from onelaunch.state.counterparts import Counterparts
from onelaunch.state.guard import StateGuard
from onelaunch.state.walk import Slot
from onelaunch.watch.difference import RunDifference
from onelaunch.watch.ledger import Ledger

if TYPE_CHECKING:
    from onelaunch.autograd.pair import AutogradPair

_C: Any = torch._C


@dataclass(frozen=True, slots=True)
class Recording:
    """The facts and figures of one recording at the time of the query.

    Attributes:
        callable: the name of the recorded callable; of a piece, its path in the module.
        spec: the signature.
        why: the reason: ``"first signature"``, or the difference from the recording before it.
        inputs: name of each tensor of the call -> how it travels. ``"node"``: copied inside the
            graph; a plain CPU tensor only if it is written. ``"copy"``: a strided copy before the
            launch. ``"fill"``: a 0-dim host tensor. ``"rebind"``: kernels read the caller's memory.
            ``"pad"``: copied and padded inside the graph. ``"address"``: the very memory of the
            capture. ``"host"``: not used by the device.
        outputs: the memory of each result: ``"own"`` (copied out of the recording), ``"rebind"``
            (written by kernels where the caller gets it), ``"own view"``, ``"argument"``,
            ``"view"``, ``"held"``, ``"held view"`` or ``"host constant"``.
        by_address: the names of the tensors that kernels read in place.
        untraced: tensors read by address for which no attribute or variable was found.
        nodes: kernels and copies in one launch.
        parallel: the lanes of operations that run at the same time, the longest chain, and the
            gain. Its text is a picture. None: each node waits for the one before it.
        capture_seconds: the time that the capture took.
        retries: the reason for each attempt after the first.
        pool_bytes: the growth of the pool for it; 0 if it fitted into memory of the pool.
        kept_bytes: bytes of the pool for this recording alone: static results, tensors that a
            forward saves. It shares all else with the pool's other recordings.
        driver_bytes: device memory of the driver for the graph's structures, outside the pool. CUDA
            takes 2 MiB at a time and keeps it for later graphs, so only a sum of many is right.
        hooks: the hooks inside, whose Python no replay runs.
        told_capturing: True if the callable asked whether it is being captured, and heard yes,
            since its eager way is refused. It may have taken another way than in an eager call.
        numbers: the numbers that each call reads: arguments and state that the caller varies.
        replays: launches so far, of recordings that it replaced too.
    """

    callable: str
    spec: CallSpec
    why: str
    inputs: dict[str, str]
    outputs: list[str]
    by_address: list[str]
    untraced: list[str]
    nodes: int
    parallel: Schedule | None
    capture_seconds: float
    retries: tuple[str, ...]
    pool_bytes: int
    kept_bytes: int
    driver_bytes: int
    hooks: tuple[str, ...]
    told_capturing: bool
    numbers: tuple[str, ...]
    replays: int


class StateOutput(NamedTuple):
    """A slot that the callable rebinds, and the tree of its new value."""

    slot: Slot
    tree: Tree
    output_indices: tuple[int, ...]
    """The indices of its tensors in `Outputs.tensors`."""
    step: Step | None = None
    """The step of the number in the slot, in place of the tree's value."""
    fresh: Callable[[], object] | None = None
    """Makes the value anew, as the callable does: a set, for example."""

    def is_there(self) -> bool:
        """Return whether the slot holds the plain value that the call stores there."""
        made = self.output_indices or self.step or self.fresh
        return not made and self.tree == Constant(self.slot.read())


@dataclass(slots=True, eq=False)
class Bucket:
    """The calls that a recording serves."""

    sizes: tuple[int, ...]  # the recorded size of each bucketed dimension
    least: tuple[int, ...]  # the smallest sizes that are padded to it
    places: dict[int, tuple[int, ...]]
    """Argument index -> the bucketed dimension that each varying dimension follows."""
    around: Callable[..., Any] | None = None
    """The call path that pads before the launch; None if the launch always pads."""
    exact: Callable[..., Any] | None = None  # the call path of calls of its own size
    checked: bool = False  # whether each call checks values of its own
    below: Callable[..., Any] | None = None
    """The call path of calls of smaller buckets, too, once that is proven."""
    tried: bool = False  # whether that was tried


@dataclass(slots=True, eq=False)
class Writes:
    """The memory that each launch writes, beside its results."""

    tensors: list[Tensor]
    """Tensors outside the arguments."""
    inputs: list[int]
    bumped: list[Tensor]
    """Tensors outside the arguments whose version counters eager advances."""
    bumped_inputs: list[int]


class Growing(NamedTuple):
    """Containers that the callable adds to, and replays do not."""

    names: tuple[str, ...] = ()
    place: Place | None = None  # the user's line that adds to one


@dataclass(slots=True, eq=False)
class RunFacts:
    """Facts of the captured run, for users and warnings; see `Recording`."""

    seconds: float
    retries: tuple[str, ...]
    told_capturing: bool
    untraced: list[Tensor]
    hooks: tuple[HookInside, ...]
    growing: Growing


@dataclass(slots=True, eq=False)
class RunComparison:
    """The captured run, compared with the runs before it."""

    ledger: Ledger | None
    """Its operations."""
    reads_more: bool = False
    """True if it read more than all runs before it, so that the guard lacks some reads."""
    differs: RunDifference | None = None
    """The difference from the run before it, if no guarded value explains it."""
    resized: bool = False
    """True if the run before it found state of another size, and not only a smaller one."""


@dataclass(slots=True, eq=False)
class CapturedCall:
    """The result of a capture: all that the call path needs of a recording."""

    driver: Driver
    device: torch.device
    graph: Graph
    inputs: Inputs
    state_input_slots: list[Slot]
    """Slots whose tensors are inputs, after the arguments."""
    caller_input_count: int
    """The number of inputs from the caller: the arguments, and state that the caller replaces."""
    outputs: Outputs
    tree: Tree
    output_indices: tuple[int, ...]
    state: list[StateOutput]
    guard: StateGuard
    writes: Writes
    facts: RunFacts
    compared: RunComparison
    optimizers: list[Optimizer]
    """The optimizers that step in the call."""
    draws: list[Callable[[], object]]
    """Draws from the host's default generator whose results the device does not use."""
    statics: list[Tensor]
    """Captured results that stay in the recording's memory, under ``outputs="static"``."""
    kept_gradients: list[Tensor]
    """Gradients that stay in the recording's memory."""
    device_constants: list[Tensor]
    """The device's copies of host values, which the graph reads."""
    values: dict[int, bytes]
    """Index of a host argument -> the elements that the host read."""
    marks: dict[int, Callable[[Tensor], bool]]
    """Input index -> check of the attributes that were read."""
    changed_numbers: tuple[Slot, ...]
    """Numbers that the callable reads and changes: each value needs a recording."""
    followed: FollowedNumbers = field(default_factory=FollowedNumbers.none)
    """Numbers that each call writes into the graph."""
    stored: Collection[tuple[int, str]] = ()
    """(id of a group, key) of optimizers' numbers that their steps set themselves."""
    pair: AutogradPair | None = None
    """The autograd side of the recording, if its results require grad."""
    bucket: Bucket | None = None
    """The bucket that it serves, if the callable has buckets."""
    expected: ExpectedInputs | None = None
    """The conditions on its inputs, once its call path is made."""
    launches: list[int] = field(default_factory=lambda: [0, 0])
    """The number of launches, counted by the call path, and the time of the last, by `clock`."""
    clock: Callable[[], int] | None = None

    def has_effects(self) -> bool:
        """Return whether a call changes state, draws random numbers, or moves numbers on."""
        state = [s for s in self.state if not s.is_there()]
        changed = (*self.writes.tensors, *state, *self.optimizers)
        return bool(changed or self.draws or self.moved_numbers())

    def shows_other_sizes(self) -> bool:
        """Return whether its run may show what a run at other sizes does."""
        ledger, hidden = self.compared.ledger, self.pair is not None or self.followed.of_state
        return (
            ledger is not None and ledger.shows_whole_run() and not (hidden or self.has_effects())
        )

    def moved_numbers(self) -> list[Slot]:
        """Return the numbers that the call both reads and changes."""
        return [*self.changed_numbers, *self.followed.counted]


class ExpectedInputs(NamedTuple):
    """Conditions on the inputs of a recording: the call's tensors, then tensors in slots."""

    number: int
    twice: dict[int, int]  # input index -> the first input that is the same tensor
    tensors: Any
    """The check in C++ of type, dispatch keys, dtype, device, sizes, strides and `requires_grad` of
    all other inputs."""
    addresses: dict[int, int]  # index of an input that is read in place -> its address
    kept: dict[int, Tensor]  # input index -> the argument that the callable keeps
    movable: Sequence[int]  # indices of the inputs that may lie elsewhere in each call
    overlapping: Overlaps | None
    """The search for memory that movable inputs share with each other, or with memory that the
    graph uses by address; None if any overlap will do."""
    overlaps: object  # the result of `overlapping` in the capture

    @classmethod
    def of(cls, captured: CapturedCall) -> ExpectedInputs:
        """Return the conditions of a recording, while it still has the tensors of its capture.
        Arguments captured as one run of bytes must overlap as they did. Other overlaps matter only
        if the graph writes to an argument, or to memory that it reads by address."""
        inputs = captured.inputs
        first = first_places(inputs.tensors)
        twice = {i: first[id(t)] for i, t in enumerate(inputs.tensors) if first[id(t)] != i}
        guarded = captured.guard.tensor_ids()
        arguments = inputs.tensors[: captured.caller_input_count]
        movable = inputs.going(Travel.NODE, Travel.COPY, Travel.PAD)
        fixed = list(captured.writes.tensors)
        if captured.writes.inputs:
            fixed = [t for t in captured.guard.tensors if t.device.type == captured.device.type]
        writes = bool(captured.writes.inputs or captured.writes.tensors)
        shared = any(len(group.members) > 1 for group in inputs.groups)
        matters = movable and (shared or (writes and (len(movable) > 1 or fixed)))
        overlapping = Overlaps(captured.driver, fixed) if matters else None
        # `TensorGuards` refuses one tensor twice.
        checked = [(i, t) for i, t in enumerate(inputs.tensors) if i not in twice]
        return cls(
            len(inputs.tensors),
            twice,
            _tensor_guards(checked, inputs.varying),
            {i: inputs.tensors[i].data_ptr() for i in inputs.going(Travel.ADDRESS)},
            {i: t for i, t in enumerate(arguments) if id(t) in guarded},
            movable,
            overlapping,
            overlapping and overlapping(*(inputs.tensors[i] for i in movable)),
        )

    def transferred(self, parts: Counterparts) -> ExpectedInputs:
        """Return the same conditions over other objects."""
        # Memory keeps its place, and so does what it overlaps with.
        return self._replace(kept={i: parts.of(t) for i, t in self.kept.items()})

    def checked(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs for `tensors` to check."""
        return [value for i, value in enumerate(values) if i not in self.twice]

    def unlike(self, tensors: Sequence[Tensor], names: Sequence[str]) -> str | None:
        """Describe how inputs differ from the captured inputs; None if they do not."""
        if len(tensors) != self.number:  # tensors that the callable keeps are missing
            return None
        checked = self.checked(tensors)
        difference = self.tensors.check_verbose(*checked, tensor_check_names=self.checked(names))
        return None if difference is True else str(difference)


def _tensor_guards(examples: Sequence[tuple[int, Tensor]], varying: dict[int, Varying]) -> Any:
    sizes = strides = None
    if varying:
        moving = {i: how.dims for i, how in varying.items()}
        sizes = [
            [None if dim in moving.get(i, ()) else size for dim, size in enumerate(t.shape)]
            for i, t in examples
        ]
        strides = [[None] * t.dim() if i in varying else list(t.stride()) for i, t in examples]
    return _C._dynamo.guards.TensorGuards(
        *(t for _, t in examples), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )


class NeedsGrad(CaptureSignal):
    """A sign that outputs require grad, so that a forward has to be captured instead. `kept_graph`:
    the name of the slot with such a tensor, and the line that made it; None for a result."""

    def __init__(self, kept_graph: tuple[str, str | None] | None = None) -> None:
        super().__init__()
        self.kept_graph = kept_graph


def describe(
    name: str, captured: CapturedCall, spec: CallSpec, flat: Flat, why: str, kept_bytes: int
) -> Recording:
    """Return the facts and figures of a new recording, for users."""
    names = [*flat.paths, *(slot.name for slot in captured.state_input_slots)]
    travels = list(captured.inputs.travels)
    for group, how in zip(captured.inputs.groups, captured.graph.travels, strict=True):
        for member in group.members:
            travels[member] = how
    memories = [output.memory for output in captured.outputs.tensors]
    rebound = captured.graph.rebound
    return Recording(
        callable=name,
        spec=spec,
        why=why,
        inputs=dict(zip(names, map(str, travels), strict=True)),
        outputs=[
            str(Travel.REBIND) if isinstance(m, Own) and m.group in rebound else m.kind
            for m in memories
        ],
        by_address=captured.guard.names(),
        untraced=[str(TensorSpec.of(t)) for t in captured.facts.untraced],
        nodes=captured.graph.nodes,
        parallel=captured.graph.schedule,
        capture_seconds=captured.facts.seconds,
        retries=captured.facts.retries,
        pool_bytes=captured.graph.memory_bytes,
        kept_bytes=kept_bytes,
        driver_bytes=captured.graph.driver_bytes,
        hooks=tuple(hook.name for hook in captured.facts.hooks),
        told_capturing=captured.facts.told_capturing,
        numbers=captured.followed.shown(flat.tree),
        replays=captured.launches[0],
    )
