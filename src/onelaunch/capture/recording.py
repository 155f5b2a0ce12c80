"""One captured graph: the figures for users, and all that the call path needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.autograd.pair import AutogradPair
from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import Flat, Tree
from onelaunch.capture.counts import Follower
from onelaunch.capture.followed import FollowedNumbers
from onelaunch.capture.hooks import HookInside
from onelaunch.capture.io_plan import Inputs, Outputs, Own
from onelaunch.driver.protocol import Driver, Graph, Travel
from onelaunch.optimizers.scalars import PatchedScalars
from onelaunch.state.guard import StateGuard
from onelaunch.state.walk import Slot
from onelaunch.watch.difference import Difference
from onelaunch.watch.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Recording:
    """The facts and figures of one recording at the time of the query.

    Attributes:
        callable: the name of the recorded callable; of a piece, its path in the module.
        spec: the signature.
        why: the reason: ``"first signature"``, or the difference from the recording before it.
        inputs: each tensor of the call, and how it travels: ``"node"`` (a copy inside the graph; a
            plain CPU tensor that nothing writes is not copied), ``"copy"`` (a strided copy before
            the launch), ``"fill"`` (a 0-dim host tensor), ``"rebind"`` (kernels read the caller's
            memory), ``"pad"`` (copied and padded inside the graph), ``"address"`` (the very memory
            of the capture), ``"host"`` (not used by the device).
        outputs: the memory of each result: ``"own"`` (copied out of the recording), ``"rebind"``
            (written by kernels where the caller gets it), ``"own view"``, ``"argument"``,
            ``"view"``, ``"held"``, ``"held view"`` or ``"host constant"``.
        by_address: the names of the tensors that kernels read in place.
        untraced: tensors read by address for which no attribute or variable was found.
        nodes: kernels and copies in one launch.
        capture_seconds: the time that the capture took.
        retries: what each attempt before the last one showed, so that another was needed.
        pool_bytes: the growth of the pool for it; 0 if it fitted into memory of the pool.
        kept_bytes: bytes of the pool that it keeps for itself (static results, tensors that a
            forward saves); it shares all else with the pool's other recordings.
        driver_bytes: device memory that the driver took for the graph's structures, outside the
            pool. CUDA takes it in steps of 2 MiB, so only a sum of many is right, and keeps it for
            later graphs when this one is freed.
        hooks: the hooks inside, whose Python no replay runs.
        told_capturing: True if the callable asked whether it is being captured, and was told yes,
            as what it does in a call is refused: it may have taken another way than a call does.
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
    """A slot that the callable rebinds, and the tree of the value that it puts there."""

    slot: Slot
    tree: Tree
    numbers: tuple[int, ...]
    """The places of its tensors in `Outputs.made`."""
    step: int | None = None
    """The amount to add to the number in the slot, instead of storing the tree's value."""


@dataclass(slots=True)
class Bucket:
    """The calls that a recording serves.

    Attributes:
        sizes: the recorded size of each bucketed dimension.
        least: the smallest sizes that are padded to it.
        places: for each argument that may be smaller, the bucketed dimensions that its varying
            dimensions follow.
        around: the call path that pads before the launch; None if the launch always pads.
    """

    sizes: tuple[int, ...]
    least: tuple[int, ...]
    places: dict[int, tuple[int, ...]]
    around: Callable[..., Any] | None = None


@dataclass(slots=True)
class CapturedCall:
    """All that the call path needs of a recording."""

    driver: Driver
    device: torch.device
    graph: Graph
    inputs: Inputs
    hidden: list[Slot]
    """Slots whose tensors are inputs, after the arguments."""
    outputs: Outputs
    tree: Tree
    numbers: tuple[int, ...]
    state: list[StateOutput]
    guard: StateGuard
    written: list[Tensor]
    """Tensors outside the arguments that the graph writes."""
    written_inputs: list[int]
    version_bumped: list[Tensor]
    bumped_inputs: list[int]
    """The inputs whose version counters eager advances; `version_bumped` has the other tensors."""
    scalars: PatchedScalars
    optimizers: list[Optimizer]
    """The optimizers that step in the call."""
    draws: list[Callable[[], object]]
    """The draws of the call from the host's default generator, whose numbers it does not use."""
    statics: list[Tensor]
    """The captured results themselves, under ``outputs="static"``."""
    lasting: list[Tensor]
    """Gradients that stay in the recording's memory."""
    untraced: list[Tensor]
    hooks: tuple[HookInside, ...]
    """The hooks that ran inside, whose Python no replay runs."""
    changed_numbers: tuple[Slot, ...]
    """Numbers that the callable reads and changes: a recording serves one value of each."""
    grown: tuple[str, ...]
    """Containers that the callable adds to, and replays do not."""
    seconds: float
    counts: Sequence[Follower] = ()
    """Numbers that the callable counts, of which a recording serves many values."""
    followed: FollowedNumbers = field(default_factory=FollowedNumbers.none)
    """Numbers that the caller varies, which each call writes into the graph."""
    pair: AutogradPair | None = None
    """The autograd side of the recording, if its results require grad."""
    bucket: Bucket | None = None
    """The bucket that it serves, if the callable has buckets."""
    unlike: Callable[[Sequence[Tensor]], str | None] = lambda tensors: None
    """A function that describes how tensors differ from the captured arguments: in type, layout, or
    this thread's dispatch modes."""
    launches: list[int] = field(default_factory=lambda: [0, 0])
    """The number of launches, counted by the call path; and the time of the last, by `clock`."""
    clock: Callable[[], int] | None = None
    values: dict[int, bytes] = field(default_factory=dict)
    """The elements of host arguments that the host read, by number."""
    retries: tuple[str, ...] = ()
    """The reasons for the attempts after the first; see `Recording`."""
    lifted: list[Tensor] = field(default_factory=list)
    """The device's copies of host values, which the graph reads."""
    told_capturing: bool = False
    """True if it was told that it is captured; see `Recording`."""
    ledger: Ledger | None = None
    """The operations of the captured run."""
    reads_more: bool = False
    """True if it read more than all runs before it, so that the guard does not cover all reads."""
    differs: Difference | None = None
    """The difference from the run before it, if no guarded value explains it."""


class NeedsGrad(Exception):
    """The outputs require grad, so a forward has to be captured instead."""


def describe(
    name: str,
    captured: CapturedCall,
    spec: CallSpec,
    flat: Flat,
    why: str,
    kept_bytes: int,
) -> Recording:
    """Return the facts and figures of a new recording, for users."""
    names = [*flat.paths, *(slot.name for slot in captured.hidden)]
    travels = list(captured.inputs.travels)
    for group, how in zip(captured.inputs.groups, captured.graph.travels, strict=True):
        for member in group.members:
            travels[member] = how
    memories = [output.memory for output in captured.outputs.made]
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
        untraced=[str(TensorSpec.of(t)) for t in captured.untraced],
        nodes=captured.graph.nodes,
        capture_seconds=captured.seconds,
        retries=captured.retries,
        pool_bytes=captured.graph.memory_bytes,
        kept_bytes=kept_bytes,
        driver_bytes=captured.graph.driver_bytes,
        hooks=tuple(hook.name for hook in captured.hooks),
        told_capturing=captured.told_capturing,
        numbers=captured.followed.shown(flat.tree),
        replays=captured.launches[0],
    )
