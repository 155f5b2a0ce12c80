"""One captured graph: what is known of it, and what the call path needs of it."""

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
from onelaunch.capture.io_plan import Inputs, Outputs
from onelaunch.driver.protocol import Driver, Graph
from onelaunch.optimizers.scalars import PatchedScalars
from onelaunch.state.guard import StateGuard
from onelaunch.state.walk import Slot
from onelaunch.watch.ledger import Difference, Ledger


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording as it was when it was asked for: what was captured, why, its cost and its use.

    Attributes:
        callable: the name of what was recorded.
        spec: the signature.
        why: the reason: ``"first signature"``, or the difference from the recording before it.
        inputs: each tensor of the call, and how it travels: ``"node"`` (a copy inside the graph; of
            plain CPU tensors none where nothing writes the input), ``"copy"`` (a strided copy
            before the launch), ``"fill"`` (a 0-dim host tensor), ``"rebind"`` (kernels read the
            caller's memory), ``"pad"`` (copied and padded inside the graph), ``"address"`` (the
            very memory of the capture), ``"host"`` (not used by the device).
        outputs: the memory of each result: ``"own"``, ``"argument"``, ``"view"``, ``"held"``,
            ``"held view"`` or ``"host constant"``.
        by_address: the names of the tensors that kernels read where they are.
        untraced: tensors read by address that no attribute or variable was found for.
        nodes: kernels and copies in one launch.
        capture_seconds: the time that the capture took.
        pool_bytes: what the pool grew by for it; 0 where it fitted into memory of the pool.
        kept_bytes: what of the pool it keeps for itself (static results, what a forward saves); all
            else it shares with the pool's other recordings.
        driver_bytes: device memory that the driver took for the graph's own structures, outside
            the pool. CUDA takes it in steps of 2 MiB, so it is right only as a sum of many, and
            keeps it for later graphs when this one is gone.
        hooks: the hooks inside, whose Python no replay runs.
        replays: launches so far, with those of recordings that it took the place of.
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
    pool_bytes: int
    kept_bytes: int
    driver_bytes: int
    hooks: tuple[str, ...]
    replays: int


class StateOutput(NamedTuple):
    """A slot that the callable rebinds, and the tree of what it puts there."""

    slot: Slot
    tree: Tree
    numbers: tuple[int, ...]
    """The places of its tensors in `Outputs.made`."""
    step: int | None = None
    """How far a number is counted up from where it is, in place of what the tree says."""


@dataclass(slots=True)
class Bucket:
    """The calls that a recording serves.

    Attributes:
        sizes: what it was recorded at, for each bucketed dimension.
        least: the smallest sizes that are padded to it.
        places: for each argument that may be smaller, the bucketed dimensions that its varying ones
            follow.
        around: the call path that pads before the launch; None where the launch always pads.
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
    """Those of both whose version counters eager advances."""
    scalars: PatchedScalars
    optimizers: list[Optimizer]
    """Those that step in the call."""
    draws: list[Callable[[], object]]
    """What the call draws from the host's default generator, and does not use."""
    statics: list[Tensor]
    """Under ``outputs="static"``: the captured tensors themselves."""
    lasting: list[Tensor]
    """Gradients that stay the recording's own memory."""
    untraced: list[Tensor]
    hooks: tuple[str, ...]
    """Those that ran inside, whose Python no replay runs."""
    moves: tuple[str, ...]
    """Numbers that the callable reads and moves on: a recording serves one value of each."""
    grown: tuple[str, ...]
    """Containers that the callable adds to, and replays do not."""
    seconds: float
    pair: AutogradPair | None = None
    """What joins the results to autograd, where they require grad."""
    bucket: Bucket | None = None
    """The bucket that it serves, of a callable that has any."""
    unlike: Callable[[Sequence[Tensor]], str | None] = lambda tensors: None
    """How tensors differ from the arguments that it was captured for: in type, layout, or what this
    thread has torch do with them."""
    launches: list[int] = field(default_factory=lambda: [0, 0])
    """How many, counted up by the call path; and when the last one was, by the `clock`."""
    clock: Callable[[], int] | None = None
    values: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """The elements of host arguments that the host read, by number."""
    lifted: list[Tensor] = field(default_factory=list[Tensor])
    """The device's copies of host values, which the graph reads."""
    ledger: Ledger | None = None
    """Its operations."""
    reads_more: bool = False
    """Whether it read what no run before it did, so that the guard does not tell all of it."""
    differs: Difference | None = None
    """How it differs from the run before it, if nothing that is guarded explains that."""


class NeedsGrad(Exception):
    """The outputs require grad: the capture is to be one of a forward."""


def describe(
    name: str,
    captured: CapturedCall,
    spec: CallSpec,
    flat: Flat,
    why: str,
    kept_bytes: int,
) -> Recording:
    """What is told of a recording."""
    names = [*flat.paths, *(slot.name for slot in captured.hidden)]
    travels = list(captured.inputs.travels)
    for group, how in zip(captured.inputs.groups, captured.graph.travels, strict=True):
        for member in group.members:
            travels[member] = how
    return Recording(
        callable=name,
        spec=spec,
        why=why,
        inputs=dict(zip(names, map(str, travels), strict=True)),
        outputs=[output.source for output in captured.outputs.made],
        by_address=captured.guard.names(),
        untraced=[str(TensorSpec.of(t)) for t in captured.untraced],
        nodes=captured.graph.nodes,
        capture_seconds=captured.seconds,
        pool_bytes=captured.graph.memory_bytes,
        kept_bytes=kept_bytes,
        driver_bytes=captured.graph.driver_bytes,
        hooks=captured.hooks,
        replays=captured.launches[0],
    )
